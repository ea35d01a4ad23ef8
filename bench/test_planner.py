"""How long does planning take? 1F1B with 16 stages x 64 micro-batches: make_plan against one plain HiGHS solve.

The plain solve is what anybody would write: the same sparse program, passed to HiGHS with its default options, and run.
make_plan does two exact solves (least time, then least freezing), decides the cuts, and predicts every start. Building
the program is in its time and not in the plain solve's.
"""

from __future__ import annotations

from time import perf_counter

import highspy
import pytest

from bench.record import interleave, record
from tests.random_schedules import scattered_costs
from timelyfreeze.planner import Planner, make_plan
from timelyfreeze.planner.formulate import formulate
from timelyfreeze.planner.lp import SparseLp, build_lp
from timelyfreeze.planner.model import CostModel
from timelyfreeze.schedule import create_schedule


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


@pytest.mark.parametrize("max_ratio", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("scatter", [0.0, 0.05], ids=["equal stages", "scatter of 5 percent"])
def test_make_plan_against_one_plain_solve(scatter: float, max_ratio: float) -> None:
    schedule = create_schedule("1f1b", num_ranks=16, num_microbatches=64)
    costs = scattered_costs(schedule, seed=0, scatter=scatter)
    lp = build_lp(formulate(schedule, CostModel(schedule, costs), max_ratio).problem)
    plan = make_plan(schedule, costs, max_ratio)
    assert plan.objective_s == pytest.approx(plain_solve(lp)[1], rel=1e-9)

    def planned() -> float:
        begin = perf_counter()
        make_plan(schedule, costs, max_ratio)
        return perf_counter() - begin

    against_plain = interleave(planned, lambda: plain_solve(lp)[0], rounds=15)
    print(f"\nscatter {scatter}, cap {max_ratio}: make_plan / plain HiGHS:", against_plain)
    print(f"unfrozen {plan.unfrozen_makespan_s:.1f}, program {plan.objective_s:.1f}, plan {plan.makespan_s:.1f}")
    record("planner", scatter=scatter, max_ratio=max_ratio, against_plain_highs=against_plain)


def test_planning_again_when_bounds_have_drifted() -> None:
    """A planner that is kept starts from its last basis: bounds 2 % off, cold against warm."""
    schedule = create_schedule("1f1b", num_ranks=16, num_microbatches=64)
    kept = Planner(schedule, max_ratio=0.8)
    drifted = [scattered_costs(schedule, seed=0, scatter=0.05 + 0.001 * step) for step in range(8)]
    step = 0

    def warm() -> float:
        nonlocal step
        step += 1
        begin = perf_counter()
        kept.solve(drifted[step % len(drifted)])
        return perf_counter() - begin

    def cold() -> float:
        begin = perf_counter()
        make_plan(schedule, drifted[step % len(drifted)], 0.8)
        return perf_counter() - begin

    warm_over_cold = interleave(warm, cold, rounds=15)
    print("\nkept planner / new planner:", warm_over_cold)
    record("planner_warm", warm_over_cold=warm_over_cold)
