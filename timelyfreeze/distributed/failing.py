"""From exceptions to what other ranks are told, and back."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from timelyfreeze.distributed.failure import Failure
from timelyfreeze.distributed.groups import Place
from timelyfreeze.distributed.monitor import FailureMonitor
from timelyfreeze.errors import StageError, TransportError, problem

_RESTART = "Restart from the last checkpoint; torchrun --max-restarts does it."


class RemoteTracebackError(Exception):
    """The traceback of an exception on another rank, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Blame:
    """What is needed to say which rank is at fault.

    Attributes:
        place: of this process.
        own_stages: of this rank.
        monitor: asks other ranks.
        probe_s: how long they may take to answer.
        status: what this rank is doing.
    """

    place: Place
    own_stages: Sequence[int]
    monitor: FailureMonitor
    probe_s: float
    status: Callable[[], str]


def describe(error: BaseException, step: int | None, blame: Blame) -> Failure:
    """What the other ranks are told of an exception on this one; no ``step``: while the pipeline was made."""
    own = blame.place.own_member
    text = f"{type(error).__name__}: {error}"
    detail = "".join(traceback.format_exception(error))
    if isinstance(error, StageError):
        return Failure("stage", own, str(error), detail, stage=error.stage, action=error.action, step=error.step)
    if isinstance(error, TransportError):
        return Failure("lost", own if error.rank is None else error.rank, str(error), step=step)
    if isinstance(error, TimeoutError):
        return _find_culprit(step, blame)
    if isinstance(error, Exception):
        stage = blame.own_stages[0] if blame.own_stages else None
        return Failure("call", own, text, detail, stage=stage, action="", step=step)
    return Failure("stopped", own, text, step=step)


def _find_culprit(step: int | None, blame: Blame) -> Failure:
    """The step has taken too long: a rank that does not answer, or that works while all others wait."""
    answers = blame.monitor.probe(blame.probe_s)
    silent = [rank for rank, answer in sorted(answers.items()) if answer is None]
    if silent:
        return Failure("lost", silent[0], "it does not answer: stopped, or its machine is not reachable", step=step)
    answers[blame.place.own_member] = blame.status()
    for word in ("running", "between"):
        for rank, answer in sorted(answers.items()):
            if answer is not None and answer.startswith(word):
                return Failure("timeout", rank, f"it is {answer}, while others wait for it", step=step)
    return Failure("timeout", blame.place.own_member, "every rank waits for another", step=step)


def as_exception(failure: Failure) -> BaseException:
    """What a rank raises where another one has failed."""
    made: BaseException
    where = "while the pipeline was made" if failure.step is None else f"step {failure.step}"
    name = "a rank" if failure.rank < 0 else f"rank {failure.rank}"
    if failure.kind == "stage":
        stage, step = failure.stage or 0, failure.step or 0
        made = StageError(failure.text, rank=failure.rank, stage=stage, action=failure.action or "", step=step)
    elif failure.kind == "call":
        made = StageError(
            problem(
                f"{name} failed: {failure.text}",
                where=where,
                hint="Gradients are as they were before; mend the cause and make the call again on all ranks.",
            ),
            rank=failure.rank,
            stage=failure.stage or 0,
            action="",
            step=failure.step or 0,
        )
    else:
        what = {"lost": "is gone", "stopped": "was stopped", "timeout": "kept the others waiting"}[failure.kind]
        text = problem(f"{name} {what}: {failure.text}", where=where, hint=_RESTART)
        made = TransportError(text, failure.rank if failure.rank >= 0 else None)
    if failure.detail:
        made.__cause__ = RemoteTracebackError(failure.detail)
    return made


def is_final(failure: Failure) -> bool:
    """Whether there is no going on after it."""
    return failure.kind in ("lost", "timeout")
