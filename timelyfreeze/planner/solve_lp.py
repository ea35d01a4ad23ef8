"""Solve a planning problem's linear program exactly: the least makespan, then the least freezing."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from timelyfreeze.planner.highs import TOLERANCE, Basis, HighsSolver
from timelyfreeze.planner.lp import Problem, build_lp
from timelyfreeze.planner.model import Floats

# The first solve weighs the price of the ratios this little beside the makespan, in units of the longest time. It
# ends at or next to the vertex that the two exact solves look for, and is itself faster than minimising the makespan
# alone, whose optimum is hugely degenerate (32 x 128: 1.1 for 3.3 s). With ten times as much the first solve is a
# little faster, but the way from there takes up to 2 s; with a tenth the weight hardly breaks a tie.
_WEIGHT = 1e-4


class Solution(NamedTuple):
    """What ``minimize_lp`` found.

    Attributes:
        ratios: in the order of the problem.
        shortest_s: the least makespan in seconds; where a target is longer than that, some makespan below the target.
        basis: where to start from for a similar problem.
    """

    ratios: Floats
    shortest_s: float
    basis: Basis


def minimize_lp(
    solver: HighsSolver,
    problem: Problem,
    prices: Floats,
    start: Basis | None = None,
    *,
    target_s: float = 0.0,
    is_exact: bool = True,
) -> Solution:
    """Minimise the makespan, down to a target, and then, at that makespan, the price of the ratios.

    Args:
        prices: of every ratio; 1 is the dearest.
        start: the basis of a similar problem's solution.
        target_s: a shorter makespan than this is not wanted; then a lower price is.
        is_exact: False: where the target is not passed, the price is only weighed beside the makespan, in one solve
            instead of three, which may make the step longer by the weight of what that spares.

    Raises:
        PlanError: the program was not solved.
    """
    lp = build_lp(problem)
    makespan, ratios = lp.makespan, slice(lp.makespan + 1, None)
    time_only, price_only = lp.cost, np.zeros(len(lp.cost))
    price_only[ratios] = prices
    target = target_s / lp.scale_s
    solver.load(replace(lp, cost=time_only + _WEIGHT * price_only), start)
    values = solver.minimize()
    basis = solver.basis()  # the best start for other bounds: it is dual feasible for these costs
    shortest = float(values[makespan])
    if is_exact and shortest >= target:
        solver.set_costs(time_only)
        shortest = float(solver.minimize(from_feasible=True)[makespan])
    if is_exact or shortest < target:
        solver.set_costs(price_only)
        # Room for rounding; ratios move by 1e-10 at most.
        solver.set_upper(makespan, max(shortest + TOLERANCE, target))
        values = solver.minimize(from_feasible=True)
    return Solution(values[ratios], shortest * lp.scale_s, basis)
