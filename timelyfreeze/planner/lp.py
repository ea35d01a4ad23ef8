"""The planning problem as a sparse linear program (TimelyFreeze, arXiv 2602.05754, its time-minimising program)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planner.model import Floats, Ints
from timelyfreeze.schedule.graph import NOTHING, Graph

Index = NDArray[np.int32]  # HiGHS's own index type


@dataclass(frozen=True)
class SparseLp:
    """minimise cost . x  subject to  col_lower <= x <= col_upper  and  row_lower <= A x <= row_upper.

    A is stored by rows (``starts``, ``index``, ``value``). Columns: starts, the makespan T (column ``makespan``), then
    the freeze ratios. Times are in units of ``scale_s``, the longest action or transfer, so that numbers are small.
    """

    cost: Floats
    col_lower: Floats
    col_upper: Floats
    row_lower: Floats
    row_upper: Floats
    starts: Index
    index: Index
    value: Floats
    makespan: int
    scale_s: float


class Budget(NamedTuple):
    """The sum of some ratios, by their number, may not pass a limit."""

    ratios: Sequence[int]
    limit: float


@dataclass(frozen=True)
class Problem:
    """What a linear program is built from; one entry a node of ``graph``. Times are seconds.

    Attributes:
        upper_s: duration at ratio 0.
        span_s: how much shorter the duration is at ratio 1; 0 where no ratio acts.
        ratio: the number of the ratio that acts on the node; -1 for none.
        transfer_s: how long its data takes to reach it.
        lower, upper: bounds of every ratio.
        budgets: limits on sums of ratios.
    """

    graph: Graph
    upper_s: Floats
    span_s: Floats
    ratio: Ints
    transfer_s: Floats
    lower: Floats
    upper: Floats
    budgets: Sequence[Budget]


def build_lp(problem: Problem) -> SparseLp:
    """Write the program: minimise T, where every action starts after what it waits for and T is after all ends.

    Actions that wait for the same ends share one start, and where all that is waited for can be compared beforehand
    the start is no column at all (see ``_Starts``). In 1F1B without transfers a rank's backward and the next rank's
    forward wait for the same two ends: 32 x 128 has 3,937 starts for 8,192 actions, and 8,000 rows where a start an
    action needs 16,160. Nothing else made the simplex as much faster: four of those rows for two starts are one too
    many, so that its vertices were degenerate 3,100 times over.

    Rows, in this order: start - t + sum of span r >= offset for every end ``t + offset - sum of span r`` that a start
    waits for; the same for T and the last end of every rank; the budgets.
    """
    graph = problem.graph
    scale = float(max(problem.upper_s.max(), problem.transfer_s.max())) or 1.0
    upper, span, transfer = (times.tolist() for times in (problem.upper_s, problem.span_s, problem.transfer_s))
    ratio = problem.ratio.tolist()
    starts = _Starts()
    ends: list[_Moment] = [_BEGIN] * len(graph.actions)
    for node in graph.order:
        previous, data = graph.previous[node], graph.data[node]
        sources = [] if previous == NOTHING else [ends[previous]]
        if data != NOTHING:
            sources.append(ends[data].later(transfer[node]))
        end = starts.after(sources).later(upper[node])
        ends[node] = end.shortened(ratio[node], span[node]) if span[node] > 0 else end
    makespan = starts.num_columns
    last = np.flatnonzero(np.diff(graph.rank, append=graph.rank[-1] + 1))
    starts.rows += [(makespan, ends[node]) for node in last]

    terms, offsets = [], []
    for column, end in starts.rows:
        known = {} if end.column == NOTHING else {end.column: -1.0}
        terms.append({column: 1.0, **known, **{makespan + 1 + number: by / scale for number, by in end.spans}})
        offsets.append(end.offset / scale)
    terms += [dict.fromkeys((makespan + 1 + number for number in budget.ratios), 1.0) for budget in problem.budgets]
    limits = [budget.limit for budget in problem.budgets]
    cost = np.zeros(makespan + 1 + len(problem.upper))
    cost[makespan] = 1.0
    return SparseLp(
        cost=cost,
        col_lower=np.concatenate([np.zeros(makespan + 1), problem.lower]),
        col_upper=np.concatenate([np.full(makespan + 1, np.inf), problem.upper]),
        row_lower=np.concatenate([offsets, np.full(len(limits), -np.inf)]),
        row_upper=np.concatenate([np.full(len(offsets), np.inf), limits]),
        starts=np.concatenate([[0], np.cumsum([len(row) for row in terms])]).astype(np.int32),
        index=np.array([column for row in terms for column in row], dtype=np.int32),
        value=np.array([value for row in terms for value in row.values()]),
        makespan=makespan,
        scale_s=scale,
    )


class _Moment(NamedTuple):
    """A time: a start (the step's begin where ``column`` is NOTHING) + ``offset`` - the sum of span times ratio."""

    column: int
    offset: float
    spans: tuple[tuple[int, float], ...]  # (ratio's number, span)

    def later(self, by: float) -> _Moment:
        return _Moment(self.column, self.offset + by, self.spans)

    def shortened(self, ratio: int, span: float) -> _Moment:
        spans = dict(self.spans)
        spans[ratio] = spans.get(ratio, 0.0) + span  # a stage's I and W have one ratio
        return _Moment(self.column, self.offset, tuple(spans.items()))


_BEGIN = _Moment(NOTHING, 0.0, ())
_MOST_SPANS = 8  # of a moment that stands for a start: one rank's chain of n would fill n^2 / 2 places


class _Starts:
    """The starts that need a column, and what each waits for.

    Of ends that differ in their offset only, the last counts. Where that leaves a single one, the start is that moment:
    forwards of the fill then start at known times, and chains have no columns within. Otherwise it is a column, the
    same for all that wait for the same ends.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, _Moment]] = []  # (column, a moment before which it cannot be)
        self.num_columns = 0
        self._columns: dict[tuple[_Moment, ...], int] = {}

    def after(self, ends: Sequence[_Moment]) -> _Moment:
        """The first moment that is after all ends."""
        latest: dict[tuple[int, tuple[tuple[int, float], ...]], _Moment] = {}
        for end in ends:
            key = (end.column, end.spans)
            if key not in latest or end.offset > latest[key].offset:
                latest[key] = end
        waited_for = tuple(sorted(latest.values())) or (_BEGIN,)
        if len(waited_for) == 1 and len(waited_for[0].spans) <= _MOST_SPANS:
            return waited_for[0]
        if waited_for not in self._columns:
            self._columns[waited_for] = self.num_columns
            self.rows += [(self.num_columns, end) for end in waited_for]
            self.num_columns += 1
        return _Moment(self._columns[waited_for], 0.0, ())


def row_nodes(graph: Graph) -> tuple[Ints, Ints]:
    """For every row of the program before the budgets, the two nodes (before, after); T counts as node ``n``."""
    num = len(graph.actions)
    previous, data = np.array(graph.previous), np.array(graph.data)
    chained, fed = np.flatnonzero(previous != NOTHING), np.flatnonzero(data != NOTHING)
    last = np.flatnonzero(np.diff(graph.rank, append=graph.rank[-1] + 1))
    before = np.concatenate([previous[chained], data[fed], last])
    after = np.concatenate([chained, fed, np.full(len(last), num)])
    return before, after
