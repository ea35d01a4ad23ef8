"""Schedules by name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from timelyfreeze.errors import problem, raise_all
from timelyfreeze.schedule.actions import Action, Kind
from timelyfreeze.schedule.core import Schedule

Generator = Callable[[int, int, int], list[list[Action]]]

_GENERATORS: dict[str, Generator] = {}
# A count typed with some zeros too many is refused at once instead of filling memory. 32 x 128 has 8,192 actions.
_MAX_ACTIONS = 1_000_000


def register_schedule(name: str) -> Callable[[Generator], Generator]:
    """Decorator: make ``generate(num_ranks, num_microbatches, stages_per_rank)`` known to ``create_schedule``.

    What it raises as ValueError about its counts reaches the caller of ``create_schedule``.
    """

    def register(generate: Generator) -> Generator:
        _GENERATORS[name] = generate
        return generate

    return register


def schedule_names() -> list[str]:
    """The names that ``create_schedule`` knows."""
    return sorted(_GENERATORS)


def create_schedule(name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Make a schedule by name (``schedule_names()``; case, ``-`` and ``_`` do not matter).

    Raises:
        ValueError: an unknown name, or counts that the schedule cannot have; says which are valid.
        TypeError: a count is not a whole number.

    >>> print(create_schedule("gpipe", num_ranks=2, num_microbatches=2))
    rank 0 | 0F0 0F1         0B0 0B1
    rank 1 |     1F0 1F1 1B0 1B1
    """
    key = name.lower().replace("-", "").replace("_", "") if isinstance(name, str) else name
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    for argument, count in counts.items():
        try:
            if isinstance(count, bool):
                raise TypeError
            counts[argument] = operator.index(count)
        except TypeError:
            raise TypeError(problem(argument, expected="a whole number", got=repr(count))) from None
    faults = [problem(a, expected="at least 1", got=count) for a, count in counts.items() if count < 1]
    if key not in _GENERATORS:
        faults.append(problem("unknown schedule", expected=f"one of {', '.join(schedule_names())}", got=repr(name)))
    ranks, microbatches, per_rank = counts.values()
    if not faults and 2 * ranks * microbatches * per_rank > _MAX_ACTIONS:
        faults.append(
            problem(
                "schedule too large",
                expected=f"at most {_MAX_ACTIONS} actions",
                got=2 * ranks * microbatches * per_rank,
            )
        )
    raise_all(ValueError, faults)
    return Schedule(_GENERATORS[key](ranks, microbatches, per_rank), name=key)


@register_schedule("gpipe")
def _gpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965)."""
    _require_one_stage("gpipe", stages_per_rank)
    return [
        [Action(stage, kind, microbatch) for kind in (Kind.F, Kind.B) for microbatch in range(num_microbatches)]
        for stage in range(num_ranks)
    ]


@register_schedule("1f1b")
def _one_forward_one_backward(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """Forwards until the pipeline is full, then one backward for each forward (PipeDream-flush, arXiv 2006.09503)."""
    _require_one_stage("1f1b", stages_per_rank)

    def order(stage: int) -> Iterator[Action]:
        num_ahead = min(num_microbatches, num_ranks - 1 - stage)
        for microbatch in range(num_ahead):
            yield Action(stage, Kind.F, microbatch)
        for microbatch in range(num_microbatches):
            if microbatch + num_ahead < num_microbatches:
                yield Action(stage, Kind.F, microbatch + num_ahead)
            yield Action(stage, Kind.B, microbatch)

    return [list(order(stage)) for stage in range(num_ranks)]


def _require_one_stage(name: str, stages_per_rank: int) -> None:
    if stages_per_rank != 1:
        raise ValueError(problem(f"stages_per_rank of schedule {name}", expected=1, got=stages_per_rank))
