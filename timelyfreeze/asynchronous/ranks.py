"""The ranks of an asynchronous pipeline as processes of ``torch.distributed``."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from timelyfreeze.asynchronous.norms import RemoteNorm
from timelyfreeze.distributed.failing import Blame, as_exception, describe
from timelyfreeze.distributed.failure import Failure
from timelyfreeze.distributed.groups import find_place
from timelyfreeze.distributed.messages import DisagreementError
from timelyfreeze.distributed.ranks import ProcessRanks
from timelyfreeze.errors import problem
from timelyfreeze.runtime.engine import Engine

if TYPE_CHECKING:
    from timelyfreeze.asynchronous.engine import AsyncEngine

_PROBE_S = 2.0
_REPORT_S = 15.0  # longer than the monitor waits for the store


def make_async_ranks(process_group: Any, timeout_s: float) -> AsyncRanks | None:
    """The ranks as processes of a group; None where there is none."""
    return None if process_group is None else AsyncRanks(process_group, timeout_s)


class AsyncRanks(ProcessRanks):
    """Ranks with a stage each, which work while nobody calls.

    So a stage that fails is reported by its own thread, whatever the caller does meanwhile, and a failure on any rank
    is one of the stream on all of them: each learns of it in the call that it is in, or in its next one.

    Args:
        process_group: of which each rank is a stage.
        timeout_s: after which a rank that does not answer is given up.
    """

    def __init__(self, process_group: Any, timeout_s: float) -> None:
        self._stream: AsyncEngine | None = None
        self._reporter: threading.Thread | None = None
        self._reporting = threading.Lock()
        self._own_error: BaseException | None = None
        self._step: int | None = None  # of the call that it is in, or was in last
        super().__init__(find_place(process_group, None), timeout_s)

    def attach(self, stream: AsyncEngine) -> None:
        """From now on its stage is connected with those of the other ranks."""
        self._stream = stream
        self._connect_stream()

    def call(self, step: int | None) -> Any:
        self._step = step
        return super().call(step)

    def connect(self, engine: Engine) -> None:
        super().connect(engine)
        if self._stream is not None:
            self._connect_stream()

    def tie_none(self, names: Sequence[Sequence[str]], model: nn.Module, options: Any) -> None:
        """The last of making a pipeline: all ranks are made alike, and share no parameter.

        Args:
            options: plain data that must be the same on all ranks.

        Raises:
            DisagreementError: on all ranks.
        """
        self.tie(names, model)
        every = self._gather(options)
        differing = [rank for rank, other in enumerate(every) if other != every[0]]
        if differing:
            expected = "the same accumulation, schedule, memory and clipping on every rank"
            raise DisagreementError(problem("the pipeline", expected=expected, got=f"others on ranks {differing}"))
        assert self._ties is not None
        if self._ties.names:
            raise DisagreementError(
                problem(
                    "parameters in two stages",
                    expected="each in one stage, whose optimizer alone updates it",
                    got=", ".join(name for names in self._ties.names for name in names),
                    hint="Split elsewhere, untie them, or use FreezingPipeline.",
                )
            )

    def open_stream(self, num_batches: int) -> int:
        """Before the first micro-batch of a stream: what all ranks must know. All of them call it together.

        Returns:
            the largest ``num_batches``: after a failure a rank may have given out a result more than another.
        """
        assert self._stream is not None
        every = self._gather([num_batches, self._stream.own_place()])
        self._stream.take_places([place for _, place in every])
        return max(int(number) for number, _ in every)

    def share_loss(self, own: torch.Tensor | None) -> torch.Tensor:
        """The last rank's, 0-dimensional, on all ranks. All of them call it together."""
        told = None if own is None else [own.item(), str(own.dtype).removeprefix("torch.")]
        value, dtype = self._gather(told)[-1]
        return torch.tensor(value, dtype=getattr(torch, dtype)) if own is None else own

    def shut(self) -> None:
        super().shut()
        if self._stream is not None:
            self._stream.close()

    def _connect_stream(self) -> None:
        assert self._stream is not None
        assert self._groups is not None
        place = self._place
        below, above = (
            place.member_of(place.replica, rank) if 0 <= rank < self.num_ranks else None
            for rank in (self.own_rank - 1, self.own_rank + 1)
        )
        norms = self._stream.norms
        assert isinstance(norms, RemoteNorm)
        self._stream.runtime.connect(self._groups.transport, below, above, norms.board, self._on_own_failure)

    def _on_own_failure(self) -> None:
        """The stream has failed here. Runs on the thread that failed."""
        error = None if self._stream is None else self._stream.failure()
        if error is None:
            return
        self._own_error = error
        # Not here: the thread is waited for, and interrupted where it does not come back.
        reporter = threading.Thread(target=self._report, args=(error,), name="timelyfreeze-report", daemon=True)
        with self._reporting:
            reporter.start()
            self._reporter = reporter

    def _report(self, error: BaseException) -> None:
        blame = Blame(self._place, self._own_stages, self._monitor, _PROBE_S, self._status)
        self._monitor.report(replace(describe(error, self._step, blame), call=self._num_calls))

    def _end_report(self) -> None:
        """A report is of the epoch in which it is made: none may come later."""
        with self._reporting:
            reporter, self._reporter = self._reporter, None
        if reporter is not None:
            reporter.join(_REPORT_S)

    def _fail(self, error: BaseException, step: int | None) -> BaseException:
        self._end_report()
        return super()._fail(error, step)

    def _on_failure(self, failure: Failure) -> None:
        if self._stream is not None:
            self._stream.runtime.fail(as_exception(failure))
        super()._on_failure(failure)

    def _concerns(self, failure: Failure) -> bool:
        return True

    def _raise_told(self, failure: Failure | None) -> None:
        if failure is not None and failure.reporter == self._place.own_member and self._own_error is not None:
            raise self._own_error
        super()._raise_told(failure)

    def _renew(self) -> None:
        self._end_report()
        self._own_error = None
        super()._renew()

    def _status(self) -> str:
        action = None if self._stream is None else self._stream.runtime.running_action
        if action is None:
            return super()._status()
        since_s = time.monotonic() - self._began_s
        return f"running {action[0]}{action[1]}{action[2]}, {since_s:.1f} s after the last call began or ended"
