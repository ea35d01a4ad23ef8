"""When everything starts and ends, given how long every action takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from timelyfreeze.errors import problem, raise_all
from timelyfreeze.schedule.actions import Action, Kind
from timelyfreeze.schedule.checks import Transfers, check_transfers, is_time, some
from timelyfreeze.schedule.core import Schedule
from timelyfreeze.schedule.graph import NOTHING, Graph, graph_of


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action, in seconds from the step's beginning.

    Attributes:
        start_s, end_s: by action.
        makespan_s: end of the last action.
        busy_s: for every rank, the sum of its actions' durations.
        bubble_ratio: the share of the ranks' time in which they do nothing, in [0, 1].
        idle_s: for every rank, the time in which it does nothing between the start of its first action and the end of
            its last one.
    """

    start_s: dict[Action, float]
    end_s: dict[Action, float]
    makespan_s: float
    busy_s: list[float]
    bubble_ratio: float
    idle_s: list[float]


def simulate(
    schedule: Schedule,
    durations_s: Mapping[Action, float],
    transfer_s: Transfers = 0.0,
    skipped: Collection[Action] = (),
) -> Timeline:
    """Run a schedule on paper: every action starts as soon as its rank is free and its data is there.

    Args:
        schedule: the order on every rank.
        durations_s: seconds of every action; those of skipped actions do not count and may be left out.
        transfer_s: seconds from one rank to another: one number, or by (from stage, to stage), where pairs that are
            left out take no time. Between stages on one rank nothing is sent.
        skipped: backward actions that do not run at all. They take no time and nothing is sent to them, but they keep
            their place in the order: a rank passes one once the backward above it has ended.

    Raises:
        ValueError: durations are missing, negative or not finite, or belong to no action of the schedule.

    >>> from timelyfreeze.schedule import create_schedule
    >>> schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    >>> timeline = simulate(schedule, {action: 1.0 for action in schedule.actions})
    >>> timeline.makespan_s, round(timeline.bubble_ratio, 3)
    (6.0, 0.333)
    """
    graph = graph_of(schedule)
    skip = set(skipped)
    _check(graph, durations_s, skip)
    transfers = transfer_times(schedule, transfer_s)
    num = len(graph.actions)
    is_skipped = [action in skip for action in graph.actions] if skip else [False] * num
    length = [0.0 if is_skipped[node] else float(durations_s[action]) for node, action in enumerate(graph.actions)]
    start = [0.0] * num
    end = [0.0] * num
    for node in graph.order:
        previous, source = graph.previous[node], graph.data[node]
        begin = end[previous] if previous != NOTHING else 0.0
        if source != NOTHING:
            begin = max(begin, end[source] + (0.0 if is_skipped[node] else transfers[node]))
        start[node] = begin
        end[node] = begin + length[node]
    busy = [0.0] * schedule.num_ranks
    for node, rank in enumerate(graph.rank):
        busy[rank] += length[node]
    makespan = max(end)
    idle_ratio = 1.0 - sum(busy) / (makespan * len(busy)) if makespan > 0 else 0.0
    return Timeline(
        dict(zip(graph.actions, start, strict=True)),
        dict(zip(graph.actions, end, strict=True)),
        makespan,
        busy,
        min(max(idle_ratio, 0.0), 1.0),
        _idle_times(graph, start, end, busy),
    )


def _idle_times(graph: Graph, start: list[float], end: list[float], busy: list[float]) -> list[float]:
    first = [start[node] for node, previous in enumerate(graph.previous) if previous == NOTHING]
    last = [0.0] * len(busy)
    for node, rank in enumerate(graph.rank):
        last[rank] = end[node]
    return [max(0.0, last[rank] - first[rank] - busy[rank]) for rank in range(len(busy))]


def transfer_times(schedule: Schedule, transfer_s: Transfers) -> list[float]:
    """Seconds that every node's data takes to reach it (0 where it comes from its own rank or there is none).

    Raises:
        ValueError: a time is negative or not finite, or a pair is not two neighbouring stages.
    """
    graph = graph_of(schedule)
    if isinstance(transfer_s, Mapping):
        check_transfers(transfer_s, schedule.num_stages)
        return [
            float(transfer_s.get((graph.actions[source].stage, action.stage), 0.0)) if sent else 0.0
            for action, source, sent in zip(graph.actions, graph.data, graph.crosses_ranks, strict=True)
        ]
    check_transfers(transfer_s)
    return [float(transfer_s) if sent else 0.0 for sent in graph.crosses_ranks]


def _check(graph: Graph, durations_s: Mapping[Action, float], skipped: set[Action]) -> None:
    index = graph.index
    faults = []
    missing = [str(action) for action in graph.actions if action not in durations_s and action not in skipped]
    unknown = [str(action) for action in durations_s if action not in index]
    bad = [f"{action}: {time!r}" for action, time in durations_s.items() if not is_time(time)]
    forward = [str(action) for action in skipped if action not in index or action.kind is Kind.F]
    if missing:
        faults.append(problem("durations_s lacks actions of the schedule", got=some(missing)))
    if unknown:
        faults.append(problem("durations_s has actions that are not in the schedule", got=some(unknown)))
    if bad:
        faults.append(problem("durations_s", expected="finite seconds, at least 0", got=some(bad)))
    if forward:
        faults.append(problem("skipped", expected="backward actions of the schedule", got=some(forward)))
    raise_all(ValueError, faults)
