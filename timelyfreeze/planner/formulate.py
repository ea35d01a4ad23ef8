"""From a schedule and its costs to the linear program's data, without and with known cuts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from timelyfreeze.planner.live import live_floor
from timelyfreeze.planner.lp import Budget, Problem
from timelyfreeze.planner.model import CostModel, Floats, Ints
from timelyfreeze.schedule import Schedule
from timelyfreeze.schedule.graph import graph_of


@dataclass(frozen=True)
class Formulation:
    """A planning problem with the order of its ratios.

    Attributes:
        problem: the linear program that knows no cuts.
        model: the true cost model.
        max_ratio: the cap on every stage's mean ratio.
        stages, microbatches: of every ratio, in the order of the program's columns.
        numbers: ``[num_stages, num_microbatches]``, the ratio's number; -1 where there is none.
    """

    problem: Problem
    model: CostModel
    max_ratio: float
    stages: Ints
    microbatches: Ints
    numbers: Ints

    def to_grid(self, values: Floats) -> Floats:
        """Spread the program's ratios over ``[num_stages, num_microbatches]``, with what cannot be frozen at 0."""
        grid = np.zeros((self.model.num_stages, self.model.num_microbatches))
        # A basic solution is exact up to rounding; ratios within 1e-9 of a bound are that bound.
        values = np.where(values < 1e-9, 0.0, np.where(values > 1 - 1e-9, 1.0, values))
        grid[self.stages, self.microbatches] = values
        sums = grid.sum(axis=1)
        limits = self.max_ratio * self.model.freezable.sum(axis=1)
        over = sums > limits  # by the solver's tolerance at most
        grid[over] *= (limits[over] / sums[over])[:, None]
        return grid


def formulate(schedule: Schedule, model: CostModel, max_ratio: float) -> Formulation:
    """Write down the linear program that knows no cuts: bounds, order, data and every stage's cap."""
    stages, microbatches = np.nonzero(model.freezable)
    numbers = np.full(model.freezable.shape, -1)
    numbers[stages, microbatches] = np.arange(len(stages))
    nodes = model.nodes
    lower = np.where(nodes.stage > model.base, model.lower_s, 0.0)
    caps = []
    for stage in range(model.num_stages):
        ratios = np.flatnonzero(stages == stage)
        if len(ratios):
            caps.append(Budget(ratios.tolist(), max_ratio * len(ratios)))
    problem = Problem(
        graph=graph_of(schedule),
        upper_s=model.upper_s,
        span_s=np.where(model.is_freezable, model.upper_s - lower, 0.0),
        ratio=np.where(model.is_freezable, numbers[nodes.stage, nodes.microbatch], -1),
        transfer_s=model.transfer_s,
        lower=np.zeros(len(stages)),
        upper=np.ones(len(stages)),
        budgets=caps,
    )
    return Formulation(problem, model, max_ratio, stages, microbatches, numbers)


def fix_cuts(formulation: Formulation, ratios: Floats) -> Problem:
    """The program for given cuts: those that the ratios ``[num_stages, num_microbatches]`` make.

    Once the cuts are known the true cost is linear. Below a micro-batch's cut nothing runs and nothing is sent; in
    its cut stage the time goes to nothing with the ratio. The base stage's ratios stay as given, as do those below a
    cut; the others are free. The ratios given are a solution, so the optimum is at least as good. In every stage enough
    work of micro-batches that reach below it stays live (``live_floor``).
    """
    problem, model = formulation.problem, formulation.model
    nodes, stages = model.nodes, formulation.stages
    cuts = model.cuts(ratios)
    cut = cuts[nodes.microbatch]
    below, at_cut = nodes.is_backward & (nodes.stage < cut), nodes.is_backward & (nodes.stage == cut)
    ratio = np.where(at_cut, formulation.numbers[nodes.stage, nodes.microbatch], np.where(below, -1, problem.ratio))
    span = np.where(at_cut, problem.upper_s, problem.span_s)

    given = ratios[stages, formulation.microbatches]
    cut_of = cuts[formulation.microbatches]
    is_fixed = (stages == model.base) | (stages < cut_of)
    budgets = list(problem.budgets)
    for stage in range(model.base + 1, model.num_stages):
        above = np.flatnonzero((stages == stage) & (cut_of < stage))
        limit = len(above) - live_floor(formulation.max_ratio) * model.num_microbatches
        if len(above) and limit > given[above].sum():
            budgets.append(Budget(above.tolist(), limit))
    return replace(
        problem,
        upper_s=np.where(below, 0.0, problem.upper_s),
        span_s=np.where(ratio >= 0, span, 0.0),
        ratio=ratio,
        transfer_s=np.where(below, 0.0, problem.transfer_s),
        lower=np.where(is_fixed, given, 0.0),
        upper=np.where(is_fixed, given, 1.0),
        budgets=budgets,
    )
