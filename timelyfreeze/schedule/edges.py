"""Which action waits for which other one's data."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from timelyfreeze.schedule.actions import Action, Kind

if TYPE_CHECKING:
    from timelyfreeze.schedule.core import Schedule


class Edge(NamedTuple):
    """``after`` needs what ``before`` makes; ``transfer`` says that the two run on different ranks."""

    before: Action
    after: Action
    transfer: bool


def data_dependencies(schedule: Schedule) -> list[Edge]:
    """List what every action of a schedule waits for, apart from the order of its rank (``schedule.ranks``).

    A forward needs the forward of the stage before; a backward (B or I) needs the backward (B or I) of the stage after
    and its own forward; a weight gradient (W) needs its own forward and its own input gradient. Nothing else: two
    micro-batches never wait for each other's data.

    >>> from timelyfreeze.schedule import create_schedule
    >>> for edge in data_dependencies(create_schedule("1f1b", num_ranks=2, num_microbatches=1)):
    ...     print(edge.before, "->", edge.after, edge.transfer)
    0F0 -> 0B0 False
    1B0 -> 0B0 True
    0F0 -> 1F0 True
    1F0 -> 1B0 False
    """
    split = {(a.stage, a.microbatch) for order in schedule.ranks for a in order if a.kind is Kind.I}
    rank_of = schedule.stage_to_rank
    edges = []
    for order in schedule.ranks:
        for action in order:
            for before in needed_data(action, schedule.num_stages, split):
                edges.append(Edge(before, action, rank_of[before.stage] != rank_of[action.stage]))
    return edges


def needed_data(action: Action, num_stages: int, split: set[tuple[int, int]]) -> list[Action]:
    """The actions whose results ``action`` reads; ``split`` holds the (stage, micro-batch) pairs that have I and W."""
    stage, kind, microbatch = action
    if kind is Kind.F:
        return [Action(stage - 1, Kind.F, microbatch)] if stage > 0 else []
    needed = [Action(stage, Kind.F, microbatch)]
    if kind is Kind.W:
        needed.append(Action(stage, Kind.I, microbatch))
    elif stage + 1 < num_stages:
        above = Kind.I if (stage + 1, microbatch) in split else Kind.B
        needed.append(Action(stage + 1, above, microbatch))
    return needed
