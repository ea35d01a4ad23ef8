"""A schedule's actions as numbered nodes with what each waits for: the form that simulation and planning run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.schedule.actions import Action, Kind

if TYPE_CHECKING:
    from timelyfreeze.schedule.core import Schedule

NOTHING = -1  # in ``previous`` and ``data``: waits for nothing

Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class NodeArrays:
    """What the nodes are, as arrays with one entry a node."""

    stage: Ints
    microbatch: Ints
    is_weight: Bools  # B or W: computes a weight gradient
    is_backward: Bools  # B, I or W
    previous: Ints
    data: Ints
    # Nodes by level (Graph.levels). Nodes of a level never wait for each other, so that a level can be computed at
    # once; level i is by_level[bounds[i] : bounds[i + 1]].
    by_level: Ints
    bounds: list[int]


@dataclass(frozen=True)
class Graph:
    """Nodes 0..n-1 are the actions, rank by rank. Every node waits for at most two others.

    Waiting for a stage's own forward (or, for W, its own I) needs no edge: both run on one rank, in order.
    """

    actions: list[Action]
    index: dict[Action, int]
    rank: list[int]
    previous: list[int]  # the node before it on its rank
    data: list[int]  # the node of the neighbouring stage whose result it reads
    crosses_ranks: list[bool]  # whether that result has to be sent
    order: list[int]  # every node after all that it waits for; shorter than actions if they wait in a circle

    @cached_property
    def levels(self) -> list[int]:
        """For every node how many others must run before it, one after the other; for graphs without circles."""
        level = [0] * len(self.actions)
        for node in self.order:
            sources = (self.previous[node], self.data[node])
            level[node] = max((level[source] + 1 for source in sources if source != NOTHING), default=0)
        return level

    @cached_property
    def arrays(self) -> NodeArrays:
        """The nodes as arrays, made once; for graphs without circles."""
        by_level = sorted(range(len(self.actions)), key=self.levels.__getitem__)
        widths = [len(list(group)) for _, group in groupby(by_level, key=self.levels.__getitem__)]
        return NodeArrays(
            stage=np.array([action.stage for action in self.actions]),
            microbatch=np.array([action.microbatch for action in self.actions]),
            is_weight=np.array([action.kind in (Kind.B, Kind.W) for action in self.actions]),
            is_backward=np.array([action.kind is not Kind.F for action in self.actions]),
            previous=np.array(self.previous),
            data=np.array(self.data),
            by_level=np.array(by_level),
            bounds=[0, *np.cumsum(widths).tolist()],
        )


def link_actions(ranks: Sequence[Sequence[Action]], num_stages: int) -> Graph:
    """Number the actions and find what each waits for; neighbours that are missing are left out."""
    actions = [action for order in ranks for action in order]
    index = {action: node for node, action in enumerate(actions)}
    rank: list[int] = []
    previous: list[int] = []
    data: list[int] = []
    for number, order in enumerate(ranks):
        for position, action in enumerate(order):
            previous.append(len(rank) - 1 if position else NOTHING)
            rank.append(number)
            data.append(_neighbour(action, num_stages, index))
    crosses = [source != NOTHING and rank[source] != rank[node] for node, source in enumerate(data)]
    return Graph(actions, index, rank, previous, data, crosses, topological_order(previous, data))


def graph_of(schedule: Schedule) -> Graph:
    """The schedule's graph, built once."""
    return schedule._graph


def without_data(graph: Graph) -> Graph:
    """The same actions, each waiting for the one before it on its rank only: no rank for another.

    The end of its last action is the largest sum of a rank's durations: the time from batch to batch where batches
    follow each other without a flush.
    """
    num = len(graph.actions)
    return replace(graph, data=[NOTHING] * num, crosses_ranks=[False] * num, order=list(range(num)))


def _neighbour(action: Action, num_stages: int, index: dict[Action, int]) -> int:
    stage, kind, microbatch = action
    if kind is Kind.F:
        return index.get(Action(stage - 1, Kind.F, microbatch), NOTHING)
    if kind is Kind.W or stage + 1 >= num_stages:
        return NOTHING
    full = index.get(Action(stage + 1, Kind.B, microbatch), NOTHING)
    return full if full != NOTHING else index.get(Action(stage + 1, Kind.I, microbatch), NOTHING)


def topological_order(previous: Sequence[int], data: Sequence[int]) -> list[int]:
    """Every node after the (at most two) that it waits for; nodes that wait in a circle are left out.

    >>> topological_order([NOTHING, 0], [1, NOTHING])
    []
    """
    waiting = [(a != NOTHING) + (b != NOTHING) for a, b in zip(previous, data, strict=True)]
    followers: list[list[int]] = [[] for _ in previous]
    for node, sources in enumerate(zip(previous, data, strict=True)):
        for source in sources:
            if source != NOTHING:
                followers[source].append(node)
    order = [node for node, count in enumerate(waiting) if count == 0]
    for node in order:  # grows while it is walked
        for follower in followers[node]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                order.append(follower)
    return order
