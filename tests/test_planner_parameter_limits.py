"""Plans for stages whose parameters have caps of their own: what those leave to a plan is obeyed, and used."""

from __future__ import annotations

import json

import numpy as np
import pytest

from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import MODES, BackgroundPlanner, ParameterLimits, Plan, Planner, PlanOptions
from timelyfreeze.planner.cut_lp import relaxation_bound
from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.model import CostModel
from timelyfreeze.planner.true_cost import ratio_grid
from timelyfreeze.schedule import create_schedule

SCHEDULE = create_schedule("1f1b", num_ranks=3, num_microbatches=6)
COSTS = ActionCosts.uniform(SCHEDULE, forward_s=15.0, backward_s=43.0, frozen_backward_s=20.0)


def check_limits(plan: Plan) -> None:
    """What the caps of single parameters leave to a plan, from their definition."""
    model, num = CostModel(plan.schedule, plan.costs), plan.schedule.num_microbatches
    grid = ratio_grid(plan.schedule, plan.costs, plan.ratios)
    for stage, limits in (plan.options.parameter_limits or {}).items():
        row, cuts = grid[stage], np.array(plan.cuts)
        bottom_frozen = (cuts > stage) | ((cuts == stage) & (row > 0))
        assert (bottom_frozen & model.freezable[stage]).sum() <= limits.least * num + 1e-9, stage
        assert row.sum() <= limits.mean * num + 1e-9, stage
        if limits.least == 0 < limits.most:
            assert row.max() <= limits.mean / limits.most + 1e-9, stage


@pytest.mark.parametrize("mode", ["cut", "lp"])
@pytest.mark.parametrize("seed", range(25))
def test_plans_obey_the_limits_of_parameters(mode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, microbatches = int(rng.integers(1, 5)), int(rng.integers(2, 8))
    schedule = create_schedule("1f1b", num_ranks=ranks, num_microbatches=microbatches)
    costs = ActionCosts.uniform(schedule, forward_s=15.0, backward_s=43.0, frozen_backward_s=20.0)
    limits = {}
    for stage in range(ranks):
        least, mean, most = np.sort(rng.choice([0.0, 0.2, 0.3, 0.5, 0.7, 1.0], 3)).tolist()
        if rng.random() < 0.7:
            limits[stage] = ParameterLimits(least, mean, most, float(rng.choice([0.5, 1.0, 2.0])))
    plan = Planner(schedule, PlanOptions(0.5, mode, parameter_limits=limits), effort=100_000).solve(costs)
    check_limits(plan)
    assert plan.makespan_s <= plan.unfrozen_makespan_s
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    model = CostModel(schedule, costs)
    bound_s = relaxation_bound(model, Limits.of_options(model, plan.options), time_limit_s=60)
    assert bound_s <= plan.makespan_s


def test_a_stage_with_a_parameter_that_always_trains_freezes_the_rest() -> None:
    """Ratios above the cut go up to the share of the rest, and their mean to that of its caps."""
    limits = {1: ParameterLimits(0.0, 0.45, 0.5, 1.0), 2: ParameterLimits(0.0, 0.45, 0.5, 1.0)}
    plans = {mode: Planner(SCHEDULE, PlanOptions(0.5, mode, parameter_limits=limits)).solve(COSTS) for mode in MODES}
    unfrozen = Planner(SCHEDULE, PlanOptions(0.5, "lp", stage_max_ratio={1: 0.0, 2: 0.0})).solve(COSTS)
    assert plans["cut"].makespan_s < 0.99 * plans["lp"].makespan_s < 0.9 * unfrozen.makespan_s
    grid = ratio_grid(SCHEDULE, COSTS, plans["lp"].ratios)
    assert grid[1].max() == pytest.approx(0.9)
    assert ratio_grid(SCHEDULE, COSTS, plans["cut"].ratios)[2].mean() == pytest.approx(0.45)


def test_a_background_planner_takes_new_limits_with_new_costs() -> None:
    options = PlanOptions(0.5, "lp", parameter_limits={0: ParameterLimits(0.0, 0.3, 0.5, 1.0)})
    with BackgroundPlanner(SCHEDULE, PlanOptions(0.5, "lp")) as background:
        plans = []
        for each in (None, options, None):
            background.start(COSTS, each)
            assert background.wait(60)
            plans.append(background.take())
    first, second, third = plans
    assert first is not None
    assert second is not None
    assert first.options.parameter_limits is None
    assert second.options == options
    assert third is not None
    assert (third.options, third.cuts) == (options, second.cuts)
    check_limits(second)
    assert first.cuts != second.cuts
