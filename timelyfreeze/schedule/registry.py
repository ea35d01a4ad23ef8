"""Schedules by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

from timelyfreeze.errors import problem, raise_all
from timelyfreeze.schedule.actions import Action
from timelyfreeze.schedule.core import Schedule
from timelyfreeze.schedule.passes import merge_backward

Generator = Callable[[int, int, int], list[list[Action]]]

# A count typed with some zeros too many is refused at once instead of filling memory. 32 x 128 has 8,192 actions.
_MAX_ACTIONS = 1_000_000


class _Entry(NamedTuple):
    name: str
    generate: Generator
    stages_per_rank: int
    or_more: bool


_SCHEDULES: dict[str, _Entry] = {}  # by the name's plain form


def register_schedule(
    name: str, *, stages_per_rank: int = 1, or_more: bool = False
) -> Callable[[Generator], Generator]:
    """Decorator: make ``generate(num_ranks, num_microbatches, stages_per_rank)`` known to ``create_schedule``.

    Args:
        name: as ``Schedule.name`` will be.
        stages_per_rank: how many stages a rank holds where the caller does not say.
        or_more: whether the schedule takes more stages a rank than that, too.

    What it raises as ValueError about its counts reaches the caller of ``create_schedule``.

    Example::

        @register_schedule("mine")
        def generate(num_ranks, num_microbatches, stages_per_rank):
            numbers, kinds = range(num_microbatches), (Kind.F, Kind.B)
            return [[Action(rank, kind, mb) for mb in numbers for kind in kinds] for rank in range(num_ranks)]
    """

    def register(generate: Generator) -> Generator:
        _SCHEDULES[_plain(name)] = _Entry(name, generate, stages_per_rank, or_more)
        return generate

    return register


def schedule_names() -> list[str]:
    """The names that ``create_schedule`` knows, simple ones first.

    >>> schedule_names()[:2]
    ['gpipe', '1f1b']
    """
    return [entry.name for entry in _SCHEDULES.values()]


def default_stages_per_rank(name: str) -> int:
    """How many stages a rank holds in a schedule where the caller does not say.

    Raises:
        ValueError: an unknown name.

    >>> default_stages_per_rank("1f1b"), default_stages_per_rank("ZBV")
    (1, 2)
    """
    if _plain(name) not in _SCHEDULES:
        raise ValueError(_unknown(name))
    return _SCHEDULES[_plain(name)].stages_per_rank


def create_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Make a schedule by name (``schedule_names()``; case, ``-`` and ``_`` do not matter).

    Args:
        name: of the schedule.
        num_ranks, num_microbatches: any numbers from 1. Where a schedule is made for more micro-batches or for
            multiples of the ranks, it is the next larger one without the surplus.
        stages_per_rank: default: the schedule's own, ``default_stages_per_rank(name)``.

    Raises:
        ValueError: an unknown name, or counts that the schedule cannot have; says which are valid.
        TypeError: a count is not a whole number.

    >>> print(create_schedule("gpipe", num_ranks=2, num_microbatches=2))
    rank 0 | 0F0 0F1         0B0 0B1
    rank 1 |     1F0 1F1 1B0 1B1
    >>> print(create_schedule("ZB-H1", num_ranks=2, num_microbatches=2))
    rank 0 | 0F0 0F1     0B0     0B1
    rank 1 |     1F0 1I0 1F1 1I1 1W0 1W1
    """
    entry = _SCHEDULES.get(_plain(name))
    if stages_per_rank is None:
        stages_per_rank = entry.stages_per_rank if entry is not None else 1
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    for argument, count in counts.items():
        try:
            if isinstance(count, bool):
                raise TypeError
            counts[argument] = operator.index(count)
        except TypeError:
            raise TypeError(problem(argument, expected="a whole number", got=repr(count))) from None
    faults = [problem(a, expected="at least 1", got=count) for a, count in counts.items() if count < 1]
    if entry is None:
        faults.append(_unknown(name))
    elif counts["stages_per_rank"] >= 1:
        faults += _check_stages(entry, counts["stages_per_rank"])
    ranks, microbatches, per_rank = counts.values()
    num_actions = 3 * ranks * microbatches * per_rank  # F, I and W
    if not faults and num_actions > _MAX_ACTIONS:
        faults.append(problem("schedule too large", expected=f"at most {_MAX_ACTIONS} actions", got=num_actions))
    raise_all(ValueError, faults)
    assert entry is not None  # else there is a fault
    return merge_backward(Schedule(entry.generate(ranks, microbatches, per_rank), name=entry.name))


def _plain(name: object) -> str:
    """What names are compared by."""
    return name.lower().replace("-", "").replace("_", "") if isinstance(name, str) else ""


def _unknown(name: object) -> str:
    return problem("unknown schedule", expected=f"one of {', '.join(schedule_names())}", got=repr(name))


def _check_stages(entry: _Entry, stages_per_rank: int) -> list[str]:
    own = entry.stages_per_rank
    if stages_per_rank == own or (entry.or_more and stages_per_rank > own):
        return []
    expected = f"at least {own}" if entry.or_more else own
    return [problem(f"stages_per_rank of schedule {entry.name}", expected=expected, got=stages_per_rank)]
