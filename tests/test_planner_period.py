"""Plans for pipelines without a flush: the least time from batch to batch."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import Plan, PlanOptions, make_plan, planned_durations
from timelyfreeze.schedule import Action, Kind, create_schedule
from timelyfreeze.schedule.asynchronous import simulate_stream

FREE = {"min_live_ratio": 0.0, "floor_ratio": 0.0}


def planned(forward_s, backward_s, frozen_s, cap, *, num_microbatches=4, mode="lp", **options) -> Plan:
    schedule = create_schedule("1f1b", num_ranks=len(forward_s), num_microbatches=num_microbatches)
    costs = ActionCosts.uniform(
        schedule,
        forward_s=forward_s,
        backward_s=backward_s,
        frozen_backward_s=frozen_s,
        transfer_s=options.pop("t", 0.0),
    )
    return make_plan(schedule, costs, cap, mode, goal="period", **options)


def stage_ratios(plan: Plan) -> list[float]:
    rows = np.zeros((plan.schedule.num_stages, plan.schedule.num_microbatches))
    for action, ratio in plan.ratios.items():
        rows[action.stage, action.microbatch] = ratio
    return rows.mean(axis=1).tolist()


def simulated_period_s(plan: Plan, num_batches: int = 120) -> float:
    """By the simulation of streams, which knows nothing of plans."""
    schedule = plan.schedule
    durations = planned_durations(schedule, plan.costs, plan.ratios).durations_s
    forward_s, backward_s = (
        [
            [durations[Action(stage, kind, m)] for m in range(schedule.num_microbatches)]
            for stage in range(schedule.num_stages)
        ]
        for kind in (Kind.F, Kind.B)
    )
    return simulate_stream(forward_s, backward_s, num_batches * schedule.num_microbatches).period_s


def random_times(seed: int):
    draw = random.Random(seed)
    num = draw.randint(2, 4)
    forward = [draw.uniform(0.5, 2.0) for _ in range(num)]
    backward = [draw.uniform(1.0, 4.0) for _ in range(num)]
    return forward, backward, [time * draw.uniform(0.2, 0.9) for time in backward]


def test_only_the_heavy_stage_freezes_as_far_as_its_cap() -> None:
    """Stage 1 takes 6; at a ratio of 0.5 its backward of 4 takes 3. Stage 0 takes 3: nothing is to be gained there."""
    plan = planned([1.0, 2.0], [2.0, 4.0], [1.0, 2.0], 0.5)
    assert plan.period_s == pytest.approx(5.0)
    assert plan.objective_s == pytest.approx(20.0)
    assert plan.unfrozen_makespan_s == pytest.approx(24.0)
    assert stage_ratios(plan) == pytest.approx([0.0, 0.5])


def test_a_stage_freezes_no_more_than_balance_needs() -> None:
    """Stage 2 takes 5 at a ratio of 1/4, which is what stage 1, which can give up nothing, takes anyway."""
    options = {"stage_max_ratio": {1: 0.0}}
    plan = planned([1.0, 2.0, 2.0], [1.0, 3.0, 4.0], [1.0, 1.0, 0.0], 0.8, **options)
    assert plan.period_s == pytest.approx(5.0)
    assert stage_ratios(plan) == pytest.approx([0.0, 0.0, 0.25])


def test_the_first_stage_has_no_input_gradient_to_compute() -> None:
    """Its backward shrinks to nothing: 2 + 4 (1 - 0.5). Some micro-batches train all of it, so that nothing starves."""
    plan = planned([2.0, 1.0], [4.0, 2.0], [2.0, 1.0], 0.5)
    assert plan.period_s == pytest.approx(4.0)
    assert stage_ratios(plan) == pytest.approx([0.5, 0.0])
    assert min(ratio for action, ratio in plan.ratios.items() if action.stage == 0) == 0.0


def test_cuts_spare_a_heavy_stage_its_input_gradients() -> None:
    """Half the micro-batches have no backward below the last stage: (2 + 4 + 2) / 2 instead of 2 + 3."""
    times = ([1.0, 1.0, 2.0, 1.0], [2.0, 2.0, 4.0, 2.0], [1.0, 1.0, 2.0, 1.0], 0.5)
    plain, cut = (planned(*times, num_microbatches=8, mode=mode) for mode in ("lp", "cut"))
    assert plain.period_s == pytest.approx(5.0)
    assert cut.period_s < 0.95 * plain.period_s
    assert cut.objective_s == pytest.approx(8 * 4.0)
    assert max(cut.cuts) == 3
    assert simulated_period_s(cut) == pytest.approx(cut.period_s, rel=0.01)


@pytest.mark.parametrize("seed", range(25))
def test_the_optimum_is_that_of_every_stage_alone(seed: int) -> None:
    """Without cuts nothing couples the stages but the largest of them, so that each one's least time is a formula."""
    forward, backward, frozen = random_times(seed)
    cap = random.Random(seed).choice([0.0, 0.3, 0.5, 0.8])
    plan = planned(forward, backward, frozen, cap, **FREE)
    floors = [0.0, *frozen[1:]]
    times = zip(forward, backward, floors, strict=True)
    least = max(f + b - (b - low) * cap for f, b, low in times)
    assert plan.objective_s / 4 == pytest.approx(least)
    # Among the plans that take as long, each stage freezes what brings it down to that, and no more.
    needed = [max(0.0, (f + b - least) / (b - low)) for f, b, low in zip(forward, backward, floors, strict=True)]
    assert stage_ratios(plan) == pytest.approx(needed, abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("mode", ["lp", "cut"])
def test_plans_agree_with_the_simulation_and_with_their_bound(seed: int, mode: str) -> None:
    forward, backward, frozen = random_times(seed)
    plan = planned(forward, backward, frozen, 0.5, num_microbatches=6, mode=mode)
    assert plan.objective_s <= plan.makespan_s * (1 + 1e-9)
    assert plan.makespan_s <= plan.unfrozen_makespan_s * (1 + 1e-9)
    assert simulated_period_s(plan) == pytest.approx(plan.period_s, rel=0.01)
    assert max(stage_ratios(plan)) <= 0.5 + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_a_larger_cap_never_makes_the_optimum_longer(seed: int) -> None:
    times = random_times(seed)
    for mode in ("lp", "cut"):
        bounds = [planned(*times, cap, mode=mode).objective_s for cap in (0.0, 0.2, 0.4, 0.6, 0.8)]
        assert all(after <= before * (1 + 1e-5) for before, after in itertools.pairwise(bounds))


def test_cuts_that_the_search_finds_are_near_the_best_of_all() -> None:
    """Two stages, three micro-batches, whole ones frozen below: every choice of cuts and a grid of ratios above.

    The linear programs know what each stage takes, not what it waits for: the search ends 4 % above the best.
    """
    forward, backward, frozen = [1.0, 2.0], [3.0, 4.0], [1.0, 3.0]
    plan = planned(
        forward, backward, frozen, 2 / 3, num_microbatches=3, mode="cut", floor_ratio=0.0, min_live_ratio=0.0
    )
    best = float("inf")
    steps = [0.0, 0.25, 0.5, 0.75, 0.99]
    for below in itertools.product([0.0, 1.0], repeat=3):
        for above in itertools.product(steps, repeat=3):
            if sum(below) <= 2 and sum(above) <= 2:
                ratios = {Action(0, Kind.B, m): r for m, r in enumerate(below)}
                ratios |= {Action(1, Kind.B, m): r for m, r in enumerate(above)}
                tried = Plan.of_ratios(
                    plan.schedule, plan.costs, ratios, objective_s=0.0, max_ratio=2 / 3, goal="period"
                )
                best = min(best, tried.makespan_s)
    assert plan.objective_s <= best
    assert plan.makespan_s <= best * 1.05


def test_transfers_count_as_far_as_a_stage_waits_for_them() -> None:
    """Two equal stages of 3: a round trip of 2 through the other stage's 3 takes 8 for two micro-batches."""
    near, far = (planned([1.0, 1.0], [2.0, 2.0], [1.0, 1.0], 0.0, t=t) for t in (0.0, 1.0))
    assert near.period_s == pytest.approx(3.0)
    assert far.period_s == pytest.approx(4.0)
    assert far.objective_s <= far.makespan_s


def test_a_saved_plan_is_the_same_and_keeps_its_goal() -> None:
    plan = planned([1.0, 2.0], [2.0, 4.0], [1.0, 2.0], 0.5)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.options.goal == "period"


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv"])
def test_schedules_that_no_stream_runs_are_refused(name: str) -> None:
    schedule = create_schedule(name, num_ranks=2, num_microbatches=4)
    costs = ActionCosts.uniform(schedule, forward_s=1.0, backward_s=2.0, frozen_backward_s=1.0)
    with pytest.raises(ValueError, match='goal "period": expected one stage a rank'):
        make_plan(schedule, costs, 0.5, goal="period")


def test_unknown_goals_and_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown goal"):
        PlanOptions(goal="speed")
    with pytest.raises(ValueError, match="exclude each other"):
        PlanOptions(goal="period", target_makespan_s=1.0)
