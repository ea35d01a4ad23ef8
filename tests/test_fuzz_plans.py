"""Random planning problems: what every plan obeys, other programs' optima, and the real runtime under each plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.dense_program import DenseProgram
from tests.independent_cuts import independent_optimum
from tests.plan_checks import caps_of, check_plan, price
from tests.random_cases import Case, random_case
from tests.stub_stages import run_plan
from timelyfreeze.errors import PlanError
from timelyfreeze.planner import Plan, Planner
from timelyfreeze.planner.cut_lp import relaxation_bound
from timelyfreeze.planner.highs import HighsSolver
from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.model import CostModel
from timelyfreeze.schedule import Kind

NUM_IN_BLOCK = 25
NUM_BLOCKS = 200
NUM_SHORT_BLOCKS = 6
WORST_GAP = 0.25

BLOCKS = [
    pytest.param(block, marks=() if block < NUM_SHORT_BLOCKS else pytest.mark.long, id=f"from-{block * NUM_IN_BLOCK}")
    for block in range(NUM_BLOCKS)
]


def on_every_case(block: int, check: Callable[[int, Case], None]) -> None:
    """Check a block of cases; what fails says for which seed."""
    for seed in range(block * NUM_IN_BLOCK, (block + 1) * NUM_IN_BLOCK):
        try:
            check(seed, random_case(seed))
        except Exception as error:
            raise AssertionError(f"random_case({seed}): {type(error).__name__}: {error}") from error


def solve(case: Case, mode: str, **options: object) -> Plan:
    plan = Planner(case.schedule, replace(case.options, mode=mode, **options)).solve(case.costs)
    check_plan(plan)
    return plan


@pytest.mark.parametrize("block", BLOCKS)
def test_plans_against_independent_programs(block: int) -> None:
    gaps = []

    def check(seed: int, case: Case) -> None:
        by_program, plan = solve(case, "lp"), solve(case, "cut")
        dense = DenseProgram(case.schedule, case.costs, caps_of(case.options, case.schedule))
        assert by_program.objective_s == pytest.approx(dense.shortest(), rel=1e-6, abs=1e-9 * dense.scale)

        optimum, proven = independent_optimum(case.schedule, case.costs, case.options, gap_ratio=1e-4, max_nodes=2_000)
        assert plan.makespan_s <= by_program.makespan_s * (1 + 1e-6)
        assert plan.makespan_s >= proven * (1 - 2e-4)
        model = CostModel(case.schedule, case.costs)
        bound = relaxation_bound(
            case.schedule, model, Limits.of_options(model, case.options), HighsSolver(time_limit_s=60.0)
        )
        assert bound <= min(plan.makespan_s, by_program.makespan_s, optimum) * (1 + 1e-6) + 1e-9 * dense.scale
        assert plan.objective_s >= min(bound, plan.makespan_s) * (1 - 1e-6)
        if 0 < optimum < np.inf:
            gaps.append(plan.makespan_s / optimum - 1)

    on_every_case(block, check)
    assert max(gaps) < WORST_GAP
    assert np.mean(np.array(gaps) < 1e-3) > 0.9


@pytest.mark.parametrize("block", BLOCKS)
def test_targets_are_reached_with_less_freezing_or_refused(block: int) -> None:
    def check(seed: int, case: Case) -> None:
        if case.target_share is None:
            return
        fastest = solve(case, "cut")
        target_s = fastest.makespan_s + case.target_share * (fastest.unfrozen_makespan_s - fastest.makespan_s)
        if target_s <= 0:
            return
        try:
            plan = solve(case, "cut", target_makespan_s=target_s)
        except PlanError:
            assert target_s < fastest.makespan_s * (1 - 1e-6), "the fastest plan reaches it"
            return
        assert plan.makespan_s <= target_s * (1 + 1e-6)
        if target_s >= fastest.makespan_s:
            assert price(plan) <= price(fastest) * (1 + 1e-6) + 1e-6
        if target_s >= fastest.unfrozen_makespan_s:
            assert price(plan) == 0

    on_every_case(block, check)


@pytest.mark.parametrize("block", BLOCKS)
def test_planning_again_for_other_costs_obeys_everything(block: int) -> None:
    """The second solve starts from the first one's basis and plan. A third of the cases, since each is solved anew."""

    def check(seed: int, case: Case) -> None:
        if seed % 3:
            return
        factor = random.Random(-seed).uniform
        costs = replace(
            case.costs,
            upper_s={action: time * factor(1.0, 1.3) for action, time in case.costs.upper_s.items()},
        )
        for mode in ("lp", "cut"):
            planner = Planner(case.schedule, replace(case.options, mode=mode))
            planner.solve(case.costs)
            again = planner.solve(costs)
            check_plan(again)
            if mode == "lp":
                fresh = Planner(case.schedule, replace(case.options, mode=mode)).solve(costs)
                assert again.objective_s == pytest.approx(fresh.objective_s, rel=1e-6)

    on_every_case(block, check)


@pytest.mark.parametrize("block", BLOCKS)
def test_stub_stages_run_every_plan(
    block: int,
    drawn: list,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[type-arg]
) -> None:
    """On a thread a rank, or where that is what their times ask for, on one thread that walks all the ranks."""

    def check(seed: int, case: Case) -> None:
        if any(action.kind is Kind.W for action in case.schedule.actions):
            return
        for mode in ("cut", "lp"):
            monkeypatch.setattr("timelyfreeze.runtime.engine.INLINE_BELOW_S", float("inf") if seed % 4 == 0 else 0.0)
            run_plan(solve(case, mode), drawn)
            drawn.clear()

    on_every_case(block, check)
