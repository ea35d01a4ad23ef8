"""Solve the linear program that knows no cuts, exactly: the least makespan, then the least freezing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from timelyfreeze.planner.highs import Basis, HighsSolver
from timelyfreeze.planner.lp import Problem, Statuses, build_lp, critical_path_basis
from timelyfreeze.planner.model import Floats

# The first solve weighs the sum of ratios this little beside the makespan. It ends at or next to the vertex that the
# two exact solves look for, and is itself faster than minimising the makespan alone, whose optimum is hugely
# degenerate (16 x 64 with 5 % scatter, all solves together: 169 for 211 ms at cap 0.8, 221 for 296 ms at 0.5).
_WEIGHT = 1e-3


def minimize_lp(
    solver: HighsSolver,
    problem: Problem,
    prices: Floats,
    start: Statuses | Basis | None,
    *,
    target_s: float = 0.0,
) -> tuple[Floats, float]:
    """Minimise the makespan, down to a target, and then, at that makespan, the price of the ratios.

    Args:
        prices: of every ratio.
        start: a basis to start from; None: the critical path's.

    Returns:
        the ratios, and the least makespan in seconds. Where it is below the target, the ratios are those of the target.
    """
    lp = build_lp(problem)
    makespan, ratios = lp.makespan, slice(lp.makespan + 1, None)
    time_only, price_only = lp.cost, np.zeros(len(lp.cost))
    price_only[ratios] = prices
    solver.load(replace(lp, cost=time_only + _WEIGHT * price_only), start or critical_path_basis(problem))
    solver.minimize()
    solver.set_costs(time_only)
    shortest = float(solver.minimize(from_feasible=True)[makespan])
    solver.set_costs(price_only)
    # Room for rounding; ratios move by 1e-10 at most.
    solver.set_upper(makespan, max(shortest * (1 + 1e-12), target_s / lp.scale_s))
    return solver.minimize(from_feasible=True)[ratios], shortest * lp.scale_s
