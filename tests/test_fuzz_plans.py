"""Random planning problems: what every plan obeys, other programs' optima, and the real runtime under each plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.dense_program import DenseProgram
from tests.independent_cuts import independent_optimum, independent_price
from tests.plan_checks import caps_of, check_plan, price
from tests.random_cases import FIRST_NAMED, Case, random_case
from tests.random_schedules import random_costs
from tests.stub_stages import run_plan
from timelyfreeze.errors import PlanError
from timelyfreeze.planner import Plan, Planner
from timelyfreeze.planner.cut_lp import relaxation_bound
from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.model import CostModel
from timelyfreeze.schedule import Kind

NUM_IN_BLOCK = 25
NUM_BLOCKS = 220
FIRST_NAMED_BLOCK = FIRST_NAMED // NUM_IN_BLOCK
SHORT_BLOCKS = {0, 1, 2, 3, FIRST_NAMED_BLOCK, FIRST_NAMED_BLOCK + 1, FIRST_NAMED_BLOCK + 2}
# Of 5,500 plans some 30 are over 0.1 % slower than the mixed-integer program's best, nearly all because it freezes all
# but 1e-4 of a stage, so that it does not count as cut and starves nothing in the next one (the worst, with one
# micro-batch, by 30 %), or because it does not know that masks have to be even where micro-batches are to be live.
WORST_GAP_RATIO = 0.31
MOST_WITH_A_GAP = 2  # in one block
# Of plans for a target two of 1,400 freeze over 2 % more than the least that the mixed-integer program found.
MOST_DEAR = 1

BLOCKS = [
    pytest.param(block, marks=() if block in SHORT_BLOCKS else pytest.mark.long, id=f"from-{block * NUM_IN_BLOCK}")
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
        bound = relaxation_bound(model, Limits.of_options(model, case.options), time_limit_s=60.0)
        assert bound > 0 or dense.shortest() == 0
        assert bound <= min(plan.makespan_s, by_program.makespan_s, optimum) * (1 + 1e-6) + 1e-9 * dense.scale
        assert plan.objective_s >= min(bound, plan.makespan_s) * (1 - 1e-6)
        if 0 < optimum < np.inf:
            gaps.append(plan.makespan_s / optimum - 1)

    on_every_case(block, check)
    assert max(gaps) < WORST_GAP_RATIO
    assert sum(gap > 1e-3 for gap in gaps) <= MOST_WITH_A_GAP


@pytest.mark.parametrize("block", BLOCKS)
def test_targets_are_reached_with_the_least_freezing_or_refused(block: int) -> None:
    dear = []

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
            least, _ = independent_price(case.schedule, case.costs, case.options, target_s)
            if price(plan) > 1.02 * least + 0.01:
                dear.append((seed, price(plan), least))
        if target_s >= fastest.unfrozen_makespan_s:
            assert price(plan) == 0

    on_every_case(block, check)
    assert len(dear) <= MOST_DEAR


@pytest.mark.parametrize("block", BLOCKS)
def test_planning_again_for_other_costs_obeys_everything(block: int) -> None:
    """The second solve starts from the first one's basis and plan. A third of the cases, since each is solved anew."""

    def check(seed: int, case: Case) -> None:
        if seed % 3:
            return
        draw = random.Random(-seed)
        costs = random_costs(case.schedule, draw)
        if draw.random() < 0.5:  # as training measures them: a little longer or shorter
            slower = {action: time * draw.uniform(1.0, 1.3) for action, time in case.costs.upper_s.items()}
            costs = replace(case.costs, upper_s=slower)
        for mode in ("lp", "cut"):
            planner = Planner(case.schedule, replace(case.options, mode=mode))
            planner.solve(case.costs)
            again, fresh = planner.solve(costs), solve(replace(case, costs=costs), mode)
            check_plan(again)
            assert mode == "cut" or again.objective_s == pytest.approx(fresh.objective_s, rel=1e-6)

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
