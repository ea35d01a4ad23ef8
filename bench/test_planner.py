"""How long does planning take? The linear program's plan against one plain HiGHS solve, 1F1B.

The plain solve is what anybody would write: a column for every start, a row for every wait, passed to HiGHS with its
default options, and run. ``Planner`` solves the same program exactly twice (least time, then least freezing), decides
the cuts and predicts every start; building its program is in its time and not in the plain solve's.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import highspy
import numpy as np
import pytest

from bench.record import interleave, record
from tests.random_schedules import scattered_costs
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import Planner, PlanOptions, make_plan
from timelyfreeze.planner.formulate import formulate
from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.lp import Problem, SparseLp, row_nodes
from timelyfreeze.planner.model import CostModel
from timelyfreeze.schedule import Schedule, create_schedule


def textbook_lp(schedule: Schedule, costs: ActionCosts, max_ratio: float) -> SparseLp:
    """t_b - t_a + span_a r_a >= upper_a (+ transfer) for every wait, T after every rank's end, and the caps."""
    model = CostModel(schedule, costs)
    problem: Problem = formulate(model, Limits.of_options(model, PlanOptions(max_ratio, "lp"))).problem
    before, after = row_nodes(problem.graph)
    num, num_ratios, scale = len(problem.upper_s), len(problem.upper), float(problem.upper_s.max())
    rows = []
    for a, b in zip(before.tolist(), after.tolist(), strict=True):
        freezing = {num + 1 + int(problem.ratio[a]): problem.span_s[a] / scale} if problem.span_s[a] > 0 else {}
        rows.append({b: 1.0, a: -1.0, **freezing})
    rows += [dict.fromkeys((num + 1 + ratio for ratio in budget.ratios), 1.0) for budget in problem.budgets]
    limits = [budget.limit for budget in problem.budgets]
    return SparseLp(
        cost=np.eye(1, num + 1 + num_ratios, num)[0],
        col_lower=np.concatenate([np.zeros(num + 1), problem.lower]),
        col_upper=np.concatenate([np.full(num + 1, np.inf), problem.upper]),
        row_lower=np.concatenate([problem.upper_s[before] / scale, np.full(len(limits), -np.inf)]),
        row_upper=np.concatenate([np.full(len(before), np.inf), limits]),
        starts=np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32),
        index=np.array([column for row in rows for column in row], dtype=np.int32),
        value=np.array([value for row in rows for value in row.values()]),
        makespan=num,
        scale_s=scale,
    )


def plain_solve(lp: SparseLp) -> tuple[float, float]:
    """(seconds, optimum) of passing the program to a new HiGHS and running it."""
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(lp.cost), len(lp.row_lower)
    model.col_cost_, model.col_lower_, model.col_upper_ = lp.cost, lp.col_lower, lp.col_upper
    model.row_lower_, model.row_upper_ = lp.row_lower, lp.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = lp.starts, lp.index, lp.value
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    begin = perf_counter()
    highs.passModel(model)
    highs.run()
    return perf_counter() - begin, highs.getInfo().objective_function_value * lp.scale_s


def planned_s(schedule: Schedule, costs: ActionCosts, max_ratio: float) -> Callable[[], float]:
    def run() -> float:
        begin = perf_counter()
        make_plan(schedule, costs, max_ratio, "lp")
        return perf_counter() - begin

    return run


@pytest.mark.parametrize("max_ratio", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("scatter", [0.0, 0.05], ids=["equal stages", "scatter of 5 percent"])
@pytest.mark.parametrize(("ranks", "microbatches", "rounds"), [(16, 64, 15), (32, 128, 3)])
def test_linear_program_against_one_plain_solve(
    ranks: int, microbatches: int, rounds: int, scatter: float, max_ratio: float
) -> None:
    schedule = create_schedule("1f1b", num_ranks=ranks, num_microbatches=microbatches)
    costs = scattered_costs(schedule, seed=0, scatter=scatter)
    lp = textbook_lp(schedule, costs, max_ratio)
    plan = make_plan(schedule, costs, max_ratio, "lp")
    assert plan.objective_s == pytest.approx(plain_solve(lp)[1], rel=1e-6)
    against_plain = interleave(
        planned_s(schedule, costs, max_ratio), lambda: plain_solve(lp)[0], rounds=rounds, warmup=0
    )
    print(f"\n{ranks} x {microbatches}, scatter {scatter}, cap {max_ratio}: planned / plain HiGHS:", against_plain)
    print(f"unfrozen {plan.unfrozen_makespan_s:.1f}, program {plan.objective_s:.1f}, plan {plan.makespan_s:.1f}")
    record(
        "planner",
        ranks=ranks,
        microbatches=microbatches,
        scatter=scatter,
        max_ratio=max_ratio,
        against_plain_highs=against_plain,
    )


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 16), (16, 64)])
def test_how_soon_and_how_near_plans_with_cuts_are(ranks: int, microbatches: int) -> None:
    schedule = create_schedule("1f1b", num_ranks=ranks, num_microbatches=microbatches)
    costs = scattered_costs(schedule, seed=0)
    told: list[tuple[float, float]] = []
    begin = perf_counter()
    plan = Planner(schedule, PlanOptions(0.5)).solve(
        costs, on_better=lambda better: told.append((perf_counter() - begin, better.makespan_s))
    )
    total_s = perf_counter() - begin
    near_s = next(seconds for seconds, makespan_s in told if makespan_s <= plan.makespan_s * 1.01)
    assert plan.gap_ratio is not None
    print(
        f"\n{ranks} x {microbatches}: first plan after {told[0][0]:.3f} s, within 1 % of the best after {near_s:.2f} s,"
    )
    print(f"done after {total_s:.2f} s, {len(told)} plans, proven gap {plan.gap_ratio:.1%}")
    record(
        "cut_search",
        ranks=ranks,
        microbatches=microbatches,
        first_s=told[0][0],
        near_s=near_s,
        total_s=total_s,
        gap_ratio=plan.gap_ratio,
        makespan_over_plain=plan.makespan_s / plan.unfrozen_makespan_s,
    )


def test_planning_again_when_bounds_have_drifted() -> None:
    """A planner that is kept starts from its last basis: bounds 2 % off, cold against warm."""
    schedule = create_schedule("1f1b", num_ranks=16, num_microbatches=64)
    kept = Planner(schedule, PlanOptions(0.8, "lp"))
    drifted = [scattered_costs(schedule, seed=0, scatter=0.05 + 0.001 * step) for step in range(8)]
    step = 0

    def warm() -> float:
        nonlocal step
        step += 1
        begin = perf_counter()
        kept.solve(drifted[step % len(drifted)])
        return perf_counter() - begin

    def cold() -> float:
        return planned_s(schedule, drifted[step % len(drifted)], 0.8)()

    warm_over_cold = interleave(warm, cold, rounds=15)
    print("\nkept planner / new planner:", warm_over_cold)
    record("planner_warm", warm_over_cold=warm_over_cold)
