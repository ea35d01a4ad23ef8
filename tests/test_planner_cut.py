"""Cut-aware plans: the published table, an independent program, and what every such plan obeys."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.independent_cuts import independent_optimum
from tests.plan_checks import check_plan
from tests.random_cases import random_case
from tests.random_schedules import published_costs, random_costs, random_schedule, scattered_costs
from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import PlanError
from timelyfreeze.planner import (
    Plan,
    Planner,
    PlanOptions,
    choose_microbatches,
    fewer_microbatches,
    make_plan,
    planned_durations,
)
from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.model import CostModel
from timelyfreeze.planner.neighbours import rotated_cuts
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule

CAPS = (0.3, 0.5, 0.8)
TABLE = [
    # (F, u, l), stages, micro-batches, plain, and by cap: few, LP, cut-aware
    ((15, 43, 20), 2, 8, 522, [(406, 423.8, 397.3), (290, 387.0, 342.0), (174, 331.8, 266.0)]),
    ((15, 43, 20), 4, 8, 638, [(522, 493.8, 453.6), (406, 457.0, 390.5), (290, 401.8, 316.8)]),
    ((15, 43, 20), 4, 16, 1102, [(870, 902.6, 830.5), (638, 829.0, 725.8), (406, 718.6, 572.5)]),
    ((15, 43, 20), 8, 16, 1334, [(1102, 1042.6, 932.6), (870, 969.0, 813.5), (638, 858.6, 657.5)]),
    ((33, 64, 38), 2, 8, 873, [(679, 746.6, 689.6), (485, 705.0, 612.5), (291, 642.6, 490.9)]),
]


@pytest.mark.parametrize(
    ("times", "stages", "microbatches", "plain", "cap", "few", "linear", "cut"),
    [(*row[:4], cap, *figures) for row in TABLE for cap, figures in zip(CAPS, row[4], strict=True)],
)
def test_published_table(
    times: tuple[float, float, float],
    stages: int,
    microbatches: int,
    plain: float,
    cap: float,
    few: float,
    linear: float,
    cut: float,
) -> None:
    """Its plans may starve the bottom of a stage (floor_ratio=0); nothing else differs."""
    schedule = create_schedule("1f1b", num_ranks=stages, num_microbatches=microbatches)
    costs = published_costs(schedule, *times)
    smaller = create_schedule("1f1b", num_ranks=stages, num_microbatches=fewer_microbatches(microbatches, cap))
    plan = make_plan(schedule, costs, cap, floor_ratio=0.0)
    assert plan.unfrozen_makespan_s == plain
    assert make_plan(smaller, costs.adapted(smaller), 0.0).makespan_s == few
    assert make_plan(schedule, costs, cap, "lp").objective_s == pytest.approx(linear, rel=1e-3)
    assert plan.makespan_s <= cut * 1.005
    assert plan.objective_s <= plan.makespan_s


def test_where_the_floor_on_liveness_costs_something() -> None:
    """Of the table's plans only these two leave no micro-batch in which the bottom of stage 0 is live."""
    dearer = {}
    for times, stages, microbatches, _, figures in TABLE:
        schedule = create_schedule("1f1b", num_ranks=stages, num_microbatches=microbatches)
        for cap, (_, _, cut) in zip(CAPS, figures, strict=True):
            plan = make_plan(schedule, published_costs(schedule, *times), cap)
            check_plan(plan)
            if plan.makespan_s > cut * 1.005:
                dearer[times, stages, microbatches, cap] = round(plan.makespan_s, 1)
    assert dearer == {((15, 43, 20), 2, 8, 0.8): 268.3, ((33, 64, 38), 2, 8, 0.8): 501.5}


@pytest.mark.parametrize(
    ("stages", "live", "plain", "linear_m", "linear", "cut_m", "cut"),
    [(4, 4, 406, 5, 367.7, 6, 356.4), (8, 8, 870, 10, 786, 12, 745.2), (8, 4, 638, 6, 554, 8, 512.5)],
)
def test_the_same_gradients_sooner(
    stages: int, live: int, plain: float, linear_m: int, linear: float, cut_m: int, cut: float
) -> None:
    few = create_schedule("1f1b", num_ranks=stages, num_microbatches=live)
    costs = published_costs(few, 15, 43, 20)
    assert make_plan(few, costs, live_microbatches=live).makespan_s == plain
    more = create_schedule("1f1b", num_ranks=stages, num_microbatches=linear_m)
    by_program = make_plan(more, costs.adapted(more), mode="lp", live_microbatches=live)
    assert by_program.objective_s == pytest.approx(linear, rel=1e-3)
    plan = choose_microbatches("1f1b", costs, live_microbatches=live)
    check_plan(plan)
    assert plan.makespan_s <= cut * 1.005
    assert plan.schedule.num_microbatches == cut_m
    for stage in range(stages):
        frozen = sum(ratio for action, ratio in plan.ratios.items() if action.stage == stage)
        assert frozen <= cut_m - live + 1e-9


@pytest.mark.parametrize("seed", range(25))
def test_near_the_optimum_of_an_independent_program(seed: int) -> None:
    """At most 1 % slower than the mixed-integer program's best, and never below its proven bound."""
    draw = random.Random(seed)
    schedule = (
        random_schedule(draw)
        if seed % 2
        else create_schedule("1f1b", num_ranks=draw.choice((2, 3, 4)), num_microbatches=draw.choice((3, 5, 6)))
    )
    costs = random_costs(schedule, draw) if seed % 2 else scattered_costs(schedule, seed, scatter=0.2)
    cap = draw.choice(CAPS)
    plan = make_plan(schedule, costs, cap, floor_ratio=0.0)
    check_plan(plan)
    optimum, bound = independent_optimum(schedule, costs, plan.options)
    assert plan.makespan_s >= bound * (1 - 1e-6)
    assert plan.makespan_s <= optimum * 1.01
    assert plan.objective_s <= optimum * (1 + 1e-6)


@pytest.mark.parametrize("seed", [1181, 2478, 2149, 1529])
def test_near_the_optimum_where_one_exchange_is_not_enough(seed: int) -> None:
    """1 to 16 % slower with exchanges alone: three have to pass their cuts round; or in 1529, where a stage would
    starve, a micro-batch more is to be live in it so that others can be frozen further."""
    case = random_case(seed)
    plan = Planner(case.schedule, case.options).solve(case.costs)
    optimum, _ = independent_optimum(case.schedule, case.costs, case.options, gap_ratio=1e-4)
    assert plan.makespan_s == pytest.approx(optimum, rel=1e-3)


def test_three_microbatches_pass_their_cuts_round_both_ways() -> None:
    schedule = create_schedule("1f1b", num_ranks=3, num_microbatches=3)
    model = CostModel(schedule, published_costs(schedule, 1.0, 2.0, 1.0))
    limits = Limits.of_options(model, PlanOptions(0.9))
    cuts, sources = rotated_cuts(np.array([0, 1, 2]), model, limits)
    assert sorted(cuts.tolist()) == [[1, 2, 0], [2, 0, 1]]
    assert sources.tolist() == cuts.tolist()  # micro-batch i had cut i
    assert len(rotated_cuts(np.array([0, 1, 1]), model, limits)[0]) == 0


def test_never_slower_than_the_linear_program() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        schedule = random_schedule(draw)
        costs = random_costs(schedule, draw)
        cap = draw.random()
        plan = make_plan(schedule, costs, cap)
        check_plan(plan)
        assert plan.makespan_s <= make_plan(schedule, costs, cap, "lp").makespan_s * (1 + 1e-9)


def test_the_same_input_gives_the_same_plan() -> None:
    schedule = create_schedule("1f1b", num_ranks=4, num_microbatches=8)
    costs = scattered_costs(schedule, seed=1)
    assert make_plan(schedule, costs, 0.5).to_json() == make_plan(schedule, costs, 0.5).to_json()


def test_ties_go_to_the_least_freezing() -> None:
    """Stage 1 waits for stage 0 all the time; freezing it too would not end the step any sooner.

    rank 0 | 0F0 0F1 ...     0B0 0B1    (slow)
    rank 1 |     1F0 1B0 1F1 1B1        (takes next to nothing)
    """
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    costs = ActionCosts.uniform(
        schedule, forward_s=[10.0, 0.01], backward_s=[20.0, 0.02], frozen_backward_s=[0.0, 0.01]
    )
    plan = make_plan(schedule, costs, 0.5)
    assert plan.makespan_s < 90
    assert sum(ratio for action, ratio in plan.ratios.items() if action.stage == 1) < 0.5


def test_stage_caps_hold_and_cuts_pass_no_stage_that_must_train() -> None:
    schedule = create_schedule("1f1b", num_ranks=4, num_microbatches=8)
    costs = published_costs(schedule, 15, 43, 20)
    plan = make_plan(schedule, costs, 0.5, stage_max_ratio={1: 0.0, 3: 0.25})
    check_plan(plan)
    assert all(plan.ratios[Action(1, Kind.B, mb)] == 0 for mb in range(8))
    assert max(plan.cuts) == 1
    assert plan.makespan_s > make_plan(schedule, costs, 0.5).makespan_s
    for options in ({}, {"mode": "lp"}):
        limited = make_plan(schedule, costs, 0.5, stage_max_ratio={1: 0.0, 3: 0.25}, **options)
        assert sum(limited.ratios[Action(3, Kind.B, mb)] for mb in range(8)) <= 2 + 1e-9


@pytest.mark.parametrize("mode", ["cut", "lp"])
def test_a_dear_stage_is_frozen_less_where_the_makespan_allows(mode: str) -> None:
    """To a target that is easily reached, what is frozen lies where it costs least."""
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=8)
    costs = published_costs(schedule, 15, 43, 20)

    def frozen(weights: dict[int, float]) -> list[float]:
        plan = make_plan(schedule, costs, 0.8, mode, target_makespan_s=480.0, weights=weights)
        return [sum(r for a, r in plan.ratios.items() if a.stage == stage) for stage in range(2)]

    assert frozen({0: 0.1, 1: 10.0})[1] < frozen({0: 10.0, 1: 0.1})[1] - 0.1


@pytest.mark.parametrize("target_s", [380.0, 420.0, 500.0, 600.0, 700.0])
def test_the_least_freezing_that_reaches_a_time(target_s: float) -> None:
    schedule = create_schedule("1f1b", num_ranks=4, num_microbatches=8)
    costs = published_costs(schedule, 15, 43, 20)
    plan = make_plan(schedule, costs, 0.8, target_makespan_s=target_s)
    check_plan(plan)
    assert plan.makespan_s <= max(target_s, 0) * (1 + 1e-6)
    full = make_plan(schedule, costs, 0.8)
    assert sum(plan.ratios.values()) < sum(full.ratios.values())
    if target_s >= plan.unfrozen_makespan_s:
        assert sum(plan.ratios.values()) == 0


def test_a_target_out_of_reach_names_what_stands_against_it() -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=8)
    costs = published_costs(schedule, 15, 43, 20)
    for mode, least in (("cut", "397.3"), ("lp", "429.5")):
        with pytest.raises(PlanError, match=rf"cannot be reached within the caps: expected at least {least}.*stage"):
            make_plan(schedule, costs, 0.3, mode, target_makespan_s=300.0)


def test_options_that_do_not_fit_the_schedule() -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    costs = published_costs(schedule, 15, 43, 20)
    with pytest.raises(ValueError, match="a stage of stage_max_ratio: expected 0 to 1, got 2"):
        make_plan(schedule, costs, stage_max_ratio={2: 0.5})
    with pytest.raises(ValueError, match="live_microbatches of at most 4, got 5"):
        make_plan(schedule, costs, live_microbatches=5)
    with pytest.raises(ValueError, match=r"(?s)min_live_ratio.*weights\[0\].*live_microbatches"):
        make_plan(schedule, costs, min_live_ratio=-1, weights={0: -1.0}, live_microbatches=0)
    with pytest.raises(ValueError, match="exclude each other"):
        make_plan(schedule, costs, live_microbatches=2, stage_max_ratio={0: 0.5})


def test_better_plans_are_told_as_they_are_found() -> None:
    schedule = create_schedule("1f1b", num_ranks=8, num_microbatches=16)
    told: list[Plan] = []
    plan = Planner(schedule, PlanOptions(0.5)).solve(published_costs(schedule, 15, 43, 20), on_better=told.append)
    times = [better.makespan_s for better in told]
    assert len(told) > 3
    assert times == sorted(times, reverse=True)
    assert times[-1] == plan.makespan_s


def test_only_plans_that_reach_the_target_are_told() -> None:
    schedule = create_schedule("1f1b", num_ranks=4, num_microbatches=8)
    told: list[Plan] = []
    planner = Planner(schedule, PlanOptions(0.5, target_makespan_s=400.0))
    planner.solve(published_costs(schedule, 15, 43, 20), on_better=told.append)
    assert told
    assert max(plan.makespan_s for plan in told) <= 400.0 * (1 + 1e-6)


def test_planning_again_begins_with_the_last_plan() -> None:
    """With no effort left to search, only what it begins with is known."""
    schedule = create_schedule("1f1b", num_ranks=8, num_microbatches=16)
    costs = published_costs(schedule, 15, 43, 20)
    best = make_plan(schedule, costs, 0.5)
    planner = Planner(schedule, PlanOptions(0.5), effort=0)
    first = planner.solve(costs)
    assert first.makespan_s > best.makespan_s * 1.01
    thorough = Planner(schedule, PlanOptions(0.5))
    thorough.solve(costs)
    thorough._effort = 0
    assert thorough.solve(costs).makespan_s == pytest.approx(best.makespan_s, rel=1e-9)


def test_a_search_that_is_stopped_raises_and_the_planner_goes_on() -> None:
    schedule = create_schedule("1f1b", num_ranks=4, num_microbatches=8)
    costs = published_costs(schedule, 15, 43, 20)
    planner = Planner(schedule, PlanOptions(0.5))
    with pytest.raises(PlanError, match="stopped"):
        planner.solve(costs, lambda: True)
    assert planner.solve(costs).makespan_s == make_plan(schedule, costs, 0.5).makespan_s


def split(schedule: Schedule) -> Schedule:
    """Every B as an I directly followed by its W."""
    return Schedule(
        [
            [
                part
                for action in order
                for part in (
                    [action] if action.kind is Kind.F else [action._replace(kind=Kind.I), action._replace(kind=Kind.W)]
                )
            ]
            for order in schedule.ranks
        ],
        name="split",
    )


def test_split_backwards_are_planned_as_whole_ones() -> None:
    """Below a cut neither I nor W runs, so splitting each backward in place changes nothing but the data's way up."""
    whole = create_schedule("1f1b", num_ranks=2, num_microbatches=8)
    halves = split(whole)
    costs = ActionCosts.uniform(halves, forward_s=15.0, backward_s=43.0, frozen_backward_s=20.0)
    plan = make_plan(halves, costs, 0.5)
    check_plan(plan)
    assert plan.makespan_s <= make_plan(whole, published_costs(whole, 15, 43, 20), 0.5).makespan_s * 1.005
    planned = planned_durations(halves, plan.costs, plan.ratios)
    for mb, cut in enumerate(plan.cuts):
        for stage in range(cut):
            assert {Action(stage, Kind.I, mb), Action(stage, Kind.W, mb)} <= planned.skipped
