"""A track as arrays over its schedule's nodes: what every way of drawing starts from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.schedule import Kind, Schedule
from timelyfreeze.schedule.graph import NOTHING, Graph, graph_of
from timelyfreeze.schedule.simulate import transfer_times
from timelyfreeze.viz.view import Track

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_LEAST_HEIGHT = 0.62  # of a bar; a label still fits in


@dataclass(frozen=True)
class Layout:
    """A track by node, in the order of ``schedule.actions`` (rank by rank).

    Attributes:
        graph: the nodes and what each waits for.
        start_s, end_s: seconds ``[num_actions]``; a skipped action takes no time.
        ratio: freeze ratio, NaN where an action has none.
        is_skipped: whether it does not run.
        ends_backward: whether its micro-batch is cut here: no backward runs below this action.
        path: nodes of the critical path, first to last.
        height: of its bar, as a share of its rank's row; see ``bar_heights``.
    """

    graph: Graph
    start_s: Floats
    end_s: Floats
    ratio: Floats
    is_skipped: Bools
    ends_backward: Bools
    path: list[int]
    height: Floats


def lay_out(track: Track) -> Layout:
    """Order a track's values by node and find its critical path."""
    graph = graph_of(track.schedule)
    start, end = _times(track, graph)
    is_skipped = np.array([action in track.skipped for action in graph.actions])
    return Layout(
        graph=graph,
        start_s=np.array(start),
        end_s=np.array(end),
        ratio=np.array([track.ratios.get(action, np.nan) for action in graph.actions]),
        is_skipped=is_skipped,
        ends_backward=_ends(track, graph, end),
        path=_critical_nodes(track, graph, end),
        height=np.array(bar_heights(track.schedule))[graph.arrays.stage],
    )


def bar_heights(schedule: Schedule) -> list[float]:
    """How high every stage's bars are: a rank's lowest stage fills its row, its highest is the lowest bar.

    Height, since colours stand for kinds and shades for freeze ratios.

    >>> from timelyfreeze.schedule import create_schedule
    >>> bar_heights(create_schedule("zbv", num_ranks=2, num_microbatches=2))
    [1.0, 1.0, 0.62, 0.62]
    """
    heights = [1.0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        own = [stage for stage, on in enumerate(schedule.stage_to_rank) if on == rank]
        for place, stage in enumerate(own):
            heights[stage] = 1.0 - (1.0 - _LEAST_HEIGHT) * place / max(1, len(own) - 1)
    return heights


def _times(track: Track, graph: Graph) -> tuple[list[float], list[float]]:
    """Start and end by node. A skipped action without times stands where its rank would pass it."""
    start, end = [0.0] * len(graph.actions), [0.0] * len(graph.actions)
    for node in graph.order:
        action = graph.actions[node]
        if action in track.start_s:
            start[node], end[node] = float(track.start_s[action]), float(track.end_s[action])
        else:
            sources = (graph.previous[node], graph.data[node])
            start[node] = end[node] = max((end[source] for source in sources if source != NOTHING), default=0.0)
        if action in track.skipped:
            end[node] = start[node]
    return start, end


def _ends(track: Track, graph: Graph, end: list[float]) -> Bools:
    """Marks of the last backward action in every micro-batch's cut stage; a cut at stage 0 is none."""
    last: dict[int, int] = {}
    cuts = track.cuts if track.cuts is not None else [0] * track.schedule.num_microbatches
    for node, action in enumerate(graph.actions):
        microbatch = action.microbatch
        if action.kind is not Kind.F and cuts[microbatch] == action.stage > 0 and action not in track.skipped:
            other = last.get(microbatch)
            if other is None or end[node] >= end[other]:
                last[microbatch] = node
    marks = np.zeros(len(graph.actions), dtype=np.bool_)
    marks[list(last.values())] = True
    return marks


def _critical_nodes(track: Track, graph: Graph, end: list[float]) -> list[int]:
    """From the last action back to whatever reached it latest: its rank being free, or its data with the transfer."""
    transfers = transfer_times(track.schedule, track.transfer_s)
    node = max(range(len(end)), key=lambda candidate: (end[candidate], graph.actions[candidate] not in track.skipped))
    path = [node]
    while True:
        previous, data = graph.previous[node], graph.data[node]
        if previous == NOTHING and data == NOTHING:
            return path[::-1]
        transfer_s = 0.0 if graph.actions[node] in track.skipped else transfers[node]
        waits_for_data = data != NOTHING and (previous == NOTHING or end[data] + transfer_s > end[previous])
        node = data if waits_for_data else previous
        path.append(node)
