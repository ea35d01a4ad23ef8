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

# Where every column and every row stands in a simplex basis.
AT_LOWER, BASIC, AT_UPPER = 0, 1, 2
Statuses = tuple[Index, Index]


@dataclass(frozen=True)
class SparseLp:
    """minimise cost . x  subject to  col_lower <= x <= col_upper  and  row_lower <= A x <= row_upper.

    A is stored by rows (``starts``, ``index``, ``value``). Columns: the start of every node, the makespan T (column
    ``makespan``), then the freeze ratios. Times are in units of ``scale_s``, so that every number is about 1.
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

    @property
    def num_ratios(self) -> int:
        """How many columns after the makespan are freeze ratios."""
        return len(self.cost) - self.makespan - 1


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

    Rows, in this order: t_b - t_a + span_a r_a >= upper_a (+ transfer) for the order on each rank and then for the data
    of every node; T - t_a + span_a r_a >= upper_a for the last node of every rank; the budgets.
    """
    graph, num = problem.graph, len(problem.graph.actions)
    scale = float(problem.upper_s.max()) or 1.0
    upper, span, transfer = problem.upper_s / scale, problem.span_s / scale, problem.transfer_s / scale
    before, after = row_nodes(graph)
    num_ranks = graph.rank[-1] + 1
    num_data = len(before) - (num - num_ranks) - num_ranks
    first_data = num - num_ranks
    delay = np.zeros(len(before))
    readers = after[first_data : first_data + num_data]
    delay[first_data : first_data + num_data] = transfer[readers]

    acts = span[before] > 0
    widths = np.concatenate([2 + acts, [len(budget.ratios) for budget in problem.budgets]]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    index = np.empty(starts[-1], dtype=np.int32)
    value = np.ones(starts[-1])
    at = starts[: len(before)]
    index[at] = after
    index[at + 1] = before
    value[at + 1] = -1.0
    index[at[acts] + 2] = num + 1 + problem.ratio[before[acts]]
    value[at[acts] + 2] = span[before[acts]]
    for row, budget in enumerate(problem.budgets, len(before)):
        index[starts[row] : starts[row + 1]] = num + 1 + np.asarray(budget.ratios)

    num_ratios = len(problem.upper)
    cost = np.zeros(num + 1 + num_ratios)
    cost[num] = 1.0
    return SparseLp(
        cost=cost,
        col_lower=np.concatenate([np.zeros(num + 1), problem.lower]),
        col_upper=np.concatenate([np.full(num + 1, np.inf), problem.upper]),
        row_lower=np.concatenate([upper[before] + delay, np.full(len(problem.budgets), -np.inf)]),
        row_upper=np.concatenate([np.full(len(before), np.inf), [budget.limit for budget in problem.budgets]]),
        starts=starts,
        index=index,
        value=value,
        makespan=num,
        scale_s=scale,
    )


def row_nodes(graph: Graph) -> tuple[Ints, Ints]:
    """For every row of the program before the budgets, the two nodes (before, after); T counts as node ``n``."""
    num = len(graph.actions)
    previous, data = np.array(graph.previous), np.array(graph.data)
    chained, fed = np.flatnonzero(previous != NOTHING), np.flatnonzero(data != NOTHING)
    last = np.flatnonzero(np.diff(graph.rank, append=graph.rank[-1] + 1))
    before = np.concatenate([previous[chained], data[fed], last])
    after = np.concatenate([chained, fed, np.full(len(last), num)])
    return before, after


def critical_path_basis(problem: Problem) -> Statuses:
    """A good simplex basis to start from: (columns, rows), each AT_LOWER, BASIC or AT_UPPER.

    Starts and T are basic, held up by the tree of longest paths with everything frozen; ratios are 1 on the critical
    path and 0 elsewhere. It is dual feasible (one unit of flow along the path), so the dual simplex needs no first
    phase and skips the thousands of pivots that bring the starts into the basis: on 1F1B 16 x 64 with equal stages it
    ends after about 700 pivots where HiGHS needs 2,800 from its own start.
    """
    graph, num = problem.graph, len(problem.graph.actions)
    length = (problem.upper_s - problem.span_s).tolist()
    transfer = problem.transfer_s.tolist()
    end = [0.0] * num
    parent = [NOTHING] * num
    by_data = [False] * num
    for node in graph.order:
        previous, data = graph.previous[node], graph.data[node]
        begin = end[previous] if previous != NOTHING else 0.0
        parent[node] = previous
        if data != NOTHING and (previous == NOTHING or end[data] + transfer[node] > begin):
            begin, parent[node], by_data[node] = end[data] + transfer[node], data, True
        end[node] = begin + length[node]

    before, after = row_nodes(graph)
    last = [int(node) for node, target in zip(before, after, strict=True) if target == num]
    final = max(last, key=end.__getitem__)
    columns = np.full(num + 1 + len(problem.upper), BASIC, dtype=np.int32)
    columns[:num][np.array(parent) == NOTHING] = AT_LOWER
    columns[num + 1 :] = AT_LOWER
    node = final
    while node != NOTHING:
        if problem.ratio[node] >= 0:
            columns[num + 1 + problem.ratio[node]] = AT_UPPER
        node = parent[node]

    # A row is tight where it holds its node up: rank-order rows come first, then data rows, then those of T.
    chained = np.flatnonzero(np.array(graph.previous) != NOTHING)
    fed = np.flatnonzero(np.array(graph.data) != NOTHING)
    held_by_data = np.array(by_data)
    tight = np.concatenate([~held_by_data[chained], held_by_data[fed], np.array(last) == final])
    rows = np.concatenate([np.where(tight, AT_LOWER, BASIC), np.full(len(problem.budgets), BASIC)]).astype(np.int32)
    return columns, rows
