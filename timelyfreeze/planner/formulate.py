"""From a schedule and its costs to the linear program's data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.lp import Budget, Problem
from timelyfreeze.planner.model import CostModel, Floats, Ints


@dataclass(frozen=True)
class Formulation:
    """A planning problem with the order of its ratios.

    Attributes:
        problem: the linear program that knows no cuts.
        model: the true cost model.
        limits: on the ratios. The program knows those on the stages' sums.
        stages, microbatches: of every ratio, in the order of the program's columns.
        numbers: ``[num_stages, num_microbatches]``, the ratio's number; -1 where there is none.
    """

    problem: Problem
    model: CostModel
    limits: Limits
    stages: Ints
    microbatches: Ints
    numbers: Ints

    @property
    def prices(self) -> Floats:
        """Of every ratio, in the order of the program's columns."""
        prices: Floats = self.limits.relative_prices[self.stages]
        return prices

    def to_grid(self, values: Floats) -> Floats:
        """Spread the program's ratios over ``[num_stages, num_microbatches]``, with what cannot be frozen at 0."""
        grid = np.zeros((self.model.num_stages, self.model.num_microbatches))
        # A basic solution is exact up to rounding; ratios within 1e-9 of a bound are that bound.
        values = np.where(values < 1e-9, 0.0, np.where(values > 1 - 1e-9, 1.0, values))
        grid[self.stages, self.microbatches] = values
        return self.limits.trim(grid)


def formulate(model: CostModel, limits: Limits) -> Formulation:
    """Write down the linear program that knows no cuts: bounds, order, data and every stage's cap."""
    stages, microbatches = np.nonzero(model.freezable)
    numbers = np.full(model.freezable.shape, -1)
    numbers[stages, microbatches] = np.arange(len(stages))
    nodes = model.nodes
    lower = np.where(model.is_above, model.lower_s, 0.0)
    caps = []
    for stage in range(model.num_stages):
        ratios = np.flatnonzero(stages == stage)
        if len(ratios):
            caps.append(Budget(ratios.tolist(), float(limits.sums[stage])))
    problem = Problem(
        graph=model.graph,
        upper_s=model.upper_s,
        span_s=np.where(model.is_freezable, model.upper_s - lower, 0.0),
        ratio=np.where(model.is_freezable, numbers[nodes.stage, nodes.microbatch], -1),
        transfer_s=model.transfer_s,
        lower=np.zeros(len(stages)),
        upper=np.ones(len(stages)),
        budgets=caps,
    )
    return Formulation(problem, model, limits, stages, microbatches, numbers)
