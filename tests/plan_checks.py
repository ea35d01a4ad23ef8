"""What holds for every plan, whatever it was made for and with."""

from __future__ import annotations

import numpy as np

from timelyfreeze.planner import Plan, PlanOptions, planned_durations
from timelyfreeze.planner.live import least_live_shares
from timelyfreeze.planner.model import CostModel
from timelyfreeze.planner.true_cost import ratio_grid
from timelyfreeze.schedule import Kind, Schedule, simulate


def caps_of(options: PlanOptions, schedule: Schedule) -> list[float]:
    """The largest mean ratio of every stage, as the options' documentation says."""
    if options.live_microbatches is not None:
        return [1.0 - options.live_microbatches / schedule.num_microbatches] * schedule.num_stages
    exceptions = options.stage_max_ratio or {}
    return [exceptions.get(stage, options.max_ratio) for stage in range(schedule.num_stages)]


def check_plan(plan: Plan) -> None:
    """Every cap and limit of its options is obeyed, no parameter starves, and its times follow from its ratios."""
    schedule, costs, options = plan.schedule, plan.costs, plan.options
    num = schedule.num_microbatches
    assert set(plan.ratios) == {action for action in schedule.actions if costs.is_freezable(action)}
    grid = ratio_grid(schedule, costs, plan.ratios)  # refuses what is not in [0, 1]
    caps = np.array(caps_of(options, schedule))
    model = CostModel(schedule, costs)
    assert (grid.sum(axis=1) <= caps * model.freezable.sum(axis=1) + 1e-9).all()
    if plan.ratios:
        top = max(action.stage for action in plan.ratios)
        assert grid[top].max() <= 1.0 - options.min_live_ratio + 1e-9
    if options.live_microbatches is None:
        assert (least_live_shares(model, grid) >= options.floor_ratio * (1 - caps) - 1e-9).all()
    else:  # of the micro-batches that are not wholly frozen in a stage, masks leave k live for the bottom as well
        stages = np.arange(schedule.num_stages)[:, None]
        bottom_frozen = ((stages < plan.cuts) | ((stages == plan.cuts) & (grid > 0))) & model.freezable
        assert (num - bottom_frozen.sum(axis=1) >= options.live_microbatches).all()
    _check_times(plan)
    assert Plan.from_json(plan.to_json()) == plan


def price(plan: Plan) -> float:
    """What its freezing costs by the weights of its options."""
    weights = plan.options.weights or {}
    return sum(ratio * weights.get(action.stage, 1.0) for action, ratio in plan.ratios.items())


def _check_times(plan: Plan) -> None:
    schedule, costs = plan.schedule, plan.costs
    planned = planned_durations(schedule, costs, plan.ratios)
    timeline = simulate(schedule, planned.durations_s, costs.transfer_s, planned.skipped)
    assert (plan.cuts, plan.start_s, plan.makespan_s) == (planned.cuts, timeline.start_s, timeline.makespan_s)
    assert planned.skipped == {
        a for a in schedule.actions if a.kind is not Kind.F and a.stage < plan.cuts[a.microbatch]
    }
    forwards = {a: costs.upper_s[a] if a.kind is Kind.F else 0.0 for a in schedule.actions}
    backwards = [action for action in schedule.actions if action.kind is not Kind.F]
    shortest = simulate(schedule, forwards, costs.transfer_s, backwards).makespan_s
    assert shortest * (1 - 1e-12) <= plan.makespan_s <= plan.unfrozen_makespan_s * (1 + 1e-12)
    if plan.mode == "cut":
        assert 0.0 <= plan.objective_s <= plan.makespan_s
    else:
        assert plan.frozen_makespan_s <= plan.objective_s <= plan.unfrozen_makespan_s
