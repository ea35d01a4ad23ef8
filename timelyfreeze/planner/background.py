"""Make plans while training goes on."""

from __future__ import annotations

import atexit
import queue
import threading
from contextlib import suppress
from types import TracebackType
from weakref import WeakSet

from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner.cut_search import DEFAULT_EFFORT
from timelyfreeze.planner.make import Planner
from timelyfreeze.planner.options import PlanOptions
from timelyfreeze.planner.plan import Plan
from timelyfreeze.schedule import Schedule

# Longer than a slice of the solver (0.5 s) and what follows it (0.2 s at 32 x 128).
_JOIN_S = 30.0


class _Solve:
    """One plan in the making: its thread, and what came of it."""

    def __init__(
        self, planner: Planner, costs: ActionCosts, options: PlanOptions | None, before: _Solve | None
    ) -> None:
        self.stopped = threading.Event()
        self._found: queue.SimpleQueue[Plan] = queue.SimpleQueue()  # each better than the one before
        self.error: BaseException | None = None
        # A daemon, so that a forgotten planner does not keep the interpreter; it is stopped and joined at exit.
        self.thread = threading.Thread(
            target=self._run, args=(planner, costs, options, before), name="timelyfreeze-planner", daemon=True
        )

    def _run(self, planner: Planner, costs: ActionCosts, options: PlanOptions | None, before: _Solve | None) -> None:
        if before is not None:  # cancelled, but still in its last slice: the planner is not ours yet
            before.thread.join()
        try:
            self._found.put(planner.solve(costs, self.stopped.is_set, self._found.put, options))
        except BaseException as error:  # handed to whoever takes the result
            self.error = error

    def take(self) -> Plan | None:
        """The best plan so far that was not taken."""
        plan = None
        with suppress(queue.Empty):
            while True:
                plan = self._found.get_nowait()
        return plan


class BackgroundPlanner:
    """A planner with a thread of its own. HiGHS runs without the GIL, so training goes on meanwhile.

    Args:
        schedule, options, time_limit_s, effort: as for ``Planner``.

    Not thread-safe itself: one thread starts, takes and closes.

    >>> from timelyfreeze.schedule import create_schedule
    >>> schedule = create_schedule("gpipe", num_ranks=1, num_microbatches=1)
    >>> with BackgroundPlanner(schedule) as background:
    ...     background.start(ActionCosts({action: 1.0 for action in schedule.actions}))
    ...     _ = background.wait(60)
    ...     background.take().makespan_s
    2.0
    """

    def __init__(
        self,
        schedule: Schedule,
        options: PlanOptions | None = None,
        *,
        time_limit_s: float = 600.0,
        effort: int = DEFAULT_EFFORT,
    ) -> None:
        self._planner = Planner(schedule, options, time_limit_s=time_limit_s, effort=effort)
        self._current: _Solve | None = None
        self._last: _Solve | None = None
        self._is_closed = False
        _LIVE.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether a plan is in the making."""
        return self._current is not None and self._current.thread.is_alive()

    def start(self, costs: ActionCosts, options: PlanOptions | None = None) -> None:
        """Begin to make a plan. One that is in the making is cancelled, one that was not taken is dropped.

        Args:
            options: from now on, instead of those so far.

        Raises:
            RuntimeError: the planner is closed.
        """
        if self._is_closed:
            raise RuntimeError("this BackgroundPlanner is closed; make a new one")
        self.cancel()
        self._current = _Solve(self._planner, costs, options, self._last)
        self._last = self._current
        self._current.thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the plan in the making, if there is one; whether it has ended."""
        if self._current is not None:
            self._current.thread.join(timeout_s)
        return not self.is_busy

    def take(self) -> Plan | None:
        """The best plan so far, once: None if there is none that was not taken. While busy, better ones may follow.

        Raises:
            PlanError, ValueError: what making it raised, once.
        """
        current = self._current
        if current is None:
            return None
        ended = not current.thread.is_alive()  # before taking: what is found after that is not lost
        plan = current.take()
        if plan is None and ended:
            self._current = None
            if current.error is not None:
                raise current.error
        return plan

    def cancel(self) -> None:
        """Give up the plan in the making, without waiting; it ends within a second, or with the bound it works on."""
        if self._current is not None:
            self._current.stopped.set()
            self._current = None

    def close(self) -> None:
        """Cancel, and wait until the thread has ended. May be called again."""
        self._is_closed = True
        self.cancel()
        if self._last is not None:
            self._last.thread.join(_JOIN_S)
        _LIVE.discard(self)

    def __enter__(self) -> BackgroundPlanner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_LIVE: WeakSet[BackgroundPlanner] = WeakSet()


@atexit.register
def _close_all() -> None:
    """End every thread before the interpreter does: HiGHS's own globals go away with the process."""
    for background in list(_LIVE):
        background.close()
