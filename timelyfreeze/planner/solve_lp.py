"""Solve the linear program that knows no cuts, exactly: the least makespan, then the least freezing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from timelyfreeze.planner.highs import TOLERANCE, Basis, HighsSolver
from timelyfreeze.planner.lp import Problem, build_lp
from timelyfreeze.planner.model import Floats

# The first solve weighs the price of the ratios this little beside the makespan, in units of the longest action. It
# ends at or next to the vertex that the two exact solves look for, and is itself faster than minimising the makespan
# alone, whose optimum is hugely degenerate (32 x 128: 1.1 for 3.3 s). With ten times as much the first solve is a
# little faster, but the way from there takes up to 2 s; with a tenth the weight hardly breaks a tie.
_WEIGHT = 1e-4


def minimize_lp(
    solver: HighsSolver,
    problem: Problem,
    prices: Floats,
    start: Basis | None,
    *,
    target_s: float = 0.0,
) -> tuple[Floats, float, Basis]:
    """Minimise the makespan, down to a target, and then, at that makespan, the price of the ratios.

    Args:
        prices: of every ratio.
        start: the basis that this returned for a similar problem.

    Returns:
        the ratios, the least makespan in seconds, and a basis. Where the makespan is below the target, the ratios are
        those of the target.
    """
    lp = build_lp(problem)
    makespan, ratios = lp.makespan, slice(lp.makespan + 1, None)
    time_only, price_only = lp.cost, np.zeros(len(lp.cost))
    price_only[ratios] = prices
    weight = _WEIGHT / (prices.max(initial=0.0) or 1.0)
    solver.load(replace(lp, cost=time_only + weight * price_only), start)
    solver.minimize()
    basis = solver.basis()  # the best start for other bounds: it is dual feasible for these costs
    solver.set_costs(time_only)
    shortest = float(solver.minimize(from_feasible=True)[makespan])
    solver.set_costs(price_only)
    # Room for rounding; ratios move by 1e-10 at most.
    solver.set_upper(makespan, max(shortest + TOLERANCE, target_s / lp.scale_s))
    return solver.minimize(from_feasible=True)[ratios], shortest * lp.scale_s, basis
