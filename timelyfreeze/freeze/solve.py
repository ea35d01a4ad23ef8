"""Solving for a plan in the background, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from timelyfreeze.planner import Plan


class BackgroundSolve:
    """Runs a function that returns a plan on a thread of its own.

    The thread is a daemon: a solve that never ends does not keep the process alive.

    >>> solve = BackgroundSolve(lambda: 1 / 0)
    >>> solve.wait()
    >>> solve.poll()
    ZeroDivisionError('division by zero')
    """

    def __init__(self, make: Callable[[], Plan]) -> None:
        self._outcome: Plan | Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make,), name="timelyfreeze-planner", daemon=True)
        self._thread.start()

    @classmethod
    def done(cls, plan: Plan) -> BackgroundSolve:
        """A solve whose outcome is there already."""
        made = cls(lambda: plan)
        made.wait()
        return made

    def poll(self) -> Plan | Exception | None:
        """The plan, or why there is none; None while the solve goes on."""
        return self._outcome if self._done.is_set() else None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the outcome is there, or after ``timeout_s``."""
        self._done.wait(timeout_s)

    def _run(self, make: Callable[[], Plan]) -> None:
        try:
            self._outcome = make()
        except Exception as error:  # whatever it is, training goes on and the report tells
            self._outcome = error
        self._done.set()
