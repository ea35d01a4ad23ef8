"""The ranks that save or load together: what fails on one of them fails, with its text, on all."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from timelyfreeze.errors import TimelyFreezeError
from timelyfreeze.runtime.ranks import Exchange

T = TypeVar("T")


class CheckpointError(TimelyFreezeError):
    """A checkpoint that cannot be written, found, read or loaded. Every rank gets it, with every rank's cause.

    On a rank where something was raised, that is ``__cause__``.

    >>> raise CheckpointError("no checkpoint")
    Traceback (most recent call last):
    timelyfreeze.distributed.checkpoint_ranks.CheckpointError: no checkpoint
    """


class Ranks:
    """The processes of a group, or this one alone.

    Every method is a collective: all ranks call it, in the same order, also those that have nothing to do.

    Args:
        group: a ``torch.distributed`` group; None: this process alone, whether or not torch.distributed is in use.
        exchange: a pipeline's, instead of a group. It ends where a rank is lost or stopped, so that KeyboardInterrupt
            and its like need not be sent as an answer.
    """

    def __init__(self, group: Any = None, exchange: Exchange | None = None) -> None:
        self._group = group
        self._exchange = exchange
        self._answered = BaseException if exchange is None else Exception
        self.rank, self.size = 0, 1
        if exchange is not None:
            self.rank, self.size = exchange.rank, exchange.num_ranks
        elif group is not None:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def share(self, what: str, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank; each gets all results (plain data), by rank.

        Raises CheckpointError on all ranks if it raises on any.
        """
        value, error = self._attempt(work)
        answers = self._gather((None if error is None else describe(error), value))
        _raise_together(what, [text for text, _ in answers], error)
        return [value for _, value in answers]

    def agree(self, what: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; each keeps its own result, and all raise CheckpointError if any raises."""
        kept: list[T] = []
        self.share(what, lambda: kept.append(work()))
        return kept[0]

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 alone; each rank gets its result (plain data)."""
        answers: list[Any] = self.share(what, work if self.rank == 0 else lambda: None)
        result: T = answers[0]
        return result

    def _attempt(self, work: Callable[[], T]) -> tuple[Any, BaseException | None]:
        try:
            return work(), None
        except self._answered as error:  # the other ranks wait for an answer
            return None, error

    def _gather(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        if self._exchange is not None:
            own = zlib.compress(pickle.dumps(value), level=1)  # plans of what to write where, many of them much alike
            return [pickle.loads(zlib.decompress(one)) for one in self._exchange.tell(own)]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered


@contextmanager
def ranks_of(pipe: Any, call: str) -> Iterator[Ranks]:
    """The ranks of a pipeline, for one call that all of them make.

    Where the pipeline has ``together``, as ``FreezingPipeline`` has, it watches over them: a rank that is lost, stopped
    or in another call ends this one as it would end a step.
    """
    together = getattr(pipe, "together", None)
    if together is None:
        yield Ranks(pipe.process_group)
        return
    alike: CheckpointError | None = None
    with together(call) as exchange:
        try:
            yield Ranks(exchange=exchange)
        except CheckpointError as error:  # on all ranks, and nothing is on its way: no failure of the pipeline's
            alike = error
    if alike is not None:
        raise alike


def describe(error: BaseException) -> str:
    """The text of an error that may come from another rank: its type too, unless it is one of ours.

    >>> describe(OSError(28, "No space left on device"))
    'OSError: [Errno 28] No space left on device'
    """
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _raise_together(what: str, texts: list[str | None], own: BaseException | None) -> None:
    if own is not None and not isinstance(own, Exception):
        raise own
    failures = {rank: text for rank, text in enumerate(texts) if text is not None}
    if failures:
        raise CheckpointError(_message(what, failures, of=len(texts))) from own


def _message(what: str, failures: dict[int, str], of: int = 0) -> str:
    """One text where all failures have the same, else one a rank."""
    by_text: dict[str, list[int]] = {}
    for rank, text in failures.items():
        by_text.setdefault(text, []).append(rank)
    causes = [
        text if len(ranks) == of else f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()
    ]
    return f"{what}: " + "; ".join(causes) if len(causes) == 1 else f"{what}:\n  " + "\n  ".join(causes)
