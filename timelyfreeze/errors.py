"""What can go wrong, as types, and the one form in which it is said."""

from __future__ import annotations


def problem(
    what: str,
    *,
    expected: object | None = None,
    got: object | None = None,
    where: str | None = None,
    hint: str | None = None,
) -> str:
    """Format an error message: what failed, what was expected and got, where, and one next action.

    >>> problem("bad ratio", expected="a number in [0, 1]", got=1.5, where="stage 2", hint="Pass max_ratio=0.8.")
    'bad ratio: expected a number in [0, 1], got 1.5 (stage 2). Pass max_ratio=0.8.'
    """
    text = what
    if expected is not None:
        text += f": expected {expected}"
    if got is not None:
        text += f"{', ' if expected is not None else ': '}got {got}"
    if where is not None:
        text += f" ({where})"
    text += "."
    if hint is not None:
        text += f" {hint}"
    return text


def raise_all(error: type[Exception], problems: list[str]) -> None:
    """Raise ``error`` with every collected problem, so that one run shows them all; do nothing for an empty list.

    >>> raise_all(ValueError, [])
    """
    if not problems:
        return
    if len(problems) == 1:
        raise error(problems[0])
    raise error(f"{len(problems)} problems:\n" + "\n".join(f"  {i}. {text}" for i, text in enumerate(problems, 1)))


class TimelyFreezeError(Exception):
    """Base of every error that the package raises about its own work.

    >>> issubclass(StageError, TimelyFreezeError)
    True
    """


class ScheduleError(TimelyFreezeError):
    """A schedule that cannot run: an action missing, doubled, on the wrong rank, or waiting for itself.

    >>> from timelyfreeze.schedule import Schedule
    >>> try:
    ...     Schedule([["0F0"]])
    ... except ScheduleError as error:
    ...     "0B0" in str(error)
    True
    """


class PlanError(TimelyFreezeError):
    """A plan that cannot be made, read or applied.

    >>> raise PlanError("no plan")
    Traceback (most recent call last):
    timelyfreeze.errors.PlanError: no plan
    """


class TransportError(TimelyFreezeError):
    """Data did not get from one rank to another.

    Attributes:
        rank: the rank that is gone or does not answer, if it is known.

    >>> raise TransportError("rank 1 is gone", 1)
    Traceback (most recent call last):
    timelyfreeze.errors.TransportError: rank 1 is gone
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.rank)


class StageError(TimelyFreezeError):
    """User code failed inside a stage. The original exception is ``__cause__``.

    Attributes:
        rank: the rank whose worker ran the action; with replicas, its process's number among those of all replicas.
        stage: the stage it belongs to.
        action: its text form, such as ``"1B3"``.
        step: the index of the step, counted from 0.

    >>> error = StageError("stage 1 failed", rank=1, stage=1, action="1B3", step=7)
    >>> error.action, error.step
    ('1B3', 7)
    """

    def __init__(self, message: str, *, rank: int, stage: int, action: str, step: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.action = action
        self.step = step

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_stage_error, (str(self), self.rank, self.stage, self.action, self.step)


def _rebuild_stage_error(message: str, rank: int, stage: int, action: str, step: int) -> StageError:
    return StageError(message, rank=rank, stage=stage, action=action, step=step)
