"""The sparse program against an independent dense one, solved by scipy."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.dense_program import DenseProgram
from tests.random_schedules import random_costs, random_schedule, scattered_costs
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner.formulate import Formulation, formulate
from timelyfreeze.planner.highs import HighsSolver
from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.lp import build_lp
from timelyfreeze.planner.model import CostModel
from timelyfreeze.planner.options import PlanOptions
from timelyfreeze.planner.solve_lp import minimize_lp
from timelyfreeze.schedule import Kind, Schedule, create_schedule


def formulation_of(schedule: Schedule, model: CostModel, cap: float) -> Formulation:
    return formulate(model, Limits.of_options(model, PlanOptions(cap, "lp")))


def sparse(schedule: Schedule, costs: ActionCosts, cap: float) -> tuple[np.ndarray, float]:
    formulation = formulation_of(schedule, CostModel(schedule, costs), cap)
    solver = HighsSolver(time_limit_s=60.0)
    ratios, makespan_s, _ = minimize_lp(solver, formulation.problem, formulation.prices)
    return ratios, makespan_s


def test_equal_to_the_dense_program_on_200_random_schedules_and_bounds() -> None:
    num_bound = 0
    for seed in range(200):
        draw = random.Random(seed)
        schedule = random_schedule(draw)
        costs = random_costs(schedule, draw)
        cap = draw.choice([0.0, 0.3, 0.5, 0.8, 1.0, draw.random()])
        dense = DenseProgram(schedule, costs, cap)
        ratios, makespan_s = sparse(schedule, costs, cap)
        expected = dense.shortest()
        assert makespan_s == pytest.approx(expected, rel=1e-6, abs=1e-9 * dense.scale), seed
        # The second solve keeps that makespan and freezes least. Its own tolerance is looser: a ratio of an action
        # that lasts next to nothing can stand for any time.
        least = dense.least_frozen(max(expected, makespan_s))
        assert float(ratios.sum()) == pytest.approx(least, rel=1e-4, abs=1e-4), seed
        num_bound += cap > 0 and dense.num_freezable > 0
    assert num_bound > 100


@pytest.mark.parametrize(
    ("stages", "microbatches", "seed", "scatter"), [(6, 12, 0, 0.2), (8, 24, 0, 0.05), (8, 24, 2, 0.05)]
)
def test_least_time_first_then_least_freezing(stages: int, microbatches: int, seed: int, scatter: float) -> None:
    """Cases in which weighing both at once, as the first solve does, gives another makespan or more freezing."""
    schedule = create_schedule("1f1b", num_ranks=stages, num_microbatches=microbatches)
    costs = scattered_costs(schedule, seed, scatter)
    ratios, makespan_s = sparse(schedule, costs, 0.5)
    dense = DenseProgram(schedule, costs, 0.5)
    assert makespan_s == pytest.approx(dense.shortest(), rel=1e-9)
    assert float(ratios.sum()) == pytest.approx(dense.least_frozen(makespan_s), abs=5e-3)


@pytest.mark.parametrize("factor", [1e2, 1e5, 1e8, 1e11, 1e14])
def test_transfers_of_any_length(factor: float) -> None:
    """With times in units of the longest action alone, 1 in 7 random cases had no solution from 1e3 on."""
    for seed in range(40):
        draw = random.Random(seed)
        schedule = random_schedule(draw)
        costs = random_costs(schedule, draw)
        costs = replace(costs, transfer_s=factor * max(costs.upper_s.values()))
        model = CostModel(schedule, costs)
        ratios, makespan_s = sparse(schedule, costs, 0.5)
        assert ((ratios >= -1e-6) & (ratios <= 1 + 1e-6)).all()
        longest_s = float(model.makespans(np.zeros((1, *model.freezable.shape)))[0])
        assert model.frozen_makespan() * (1 - 1e-9) <= makespan_s <= longest_s * (1 + 1e-9)


def test_a_target_is_used_up_where_freezing_gains_next_to_nothing() -> None:
    """Beside such gains the weight of the price hides the makespan, so that only the exact solves can find the plan."""
    schedule = Schedule([["0F0", "1F0", "1B0", "0B0"]])
    upper = dict.fromkeys(schedule.actions, 1.0)
    costs = ActionCosts(upper, {action: 1 - 1e-6 for action in schedule.actions if action.kind is Kind.B})
    formulation = formulation_of(schedule, CostModel(schedule, costs), 1.0)
    # Stage 0 has ratio r0 for its whole second, since it needs no input gradient: without it, the step takes 3 s.
    problem = replace(formulation.problem, upper=np.array([0.0, 1.0]))
    found = minimize_lp(HighsSolver(time_limit_s=60.0), problem, formulation.prices, target_s=4 - 0.25e-6)
    assert found.ratios.tolist() == pytest.approx([0.0, 0.25], abs=0.01)


def test_ratios_above_the_cap_by_the_solvers_tolerance_are_scaled_down() -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    formulation = formulation_of(schedule, CostModel(schedule, scattered_costs(schedule, seed=0)), 0.5)
    grid = formulation.to_grid(np.array([1.0, 1.0 - 1e-10, 1e-10, 0.0, 1.0, 0.5 + 1e-7, 0.25, 0.25]))
    assert grid[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert grid[1].sum() == pytest.approx(2.0, abs=1e-12)
    assert grid[1].tolist() == pytest.approx([1.0, 0.5, 0.25, 0.25], abs=1e-7)
    assert grid[1, 0] == 1.0


def test_size_of_the_program() -> None:
    """16 x 64: 960 starts that are no sums of others for 2,048 actions, T and 1,024 ratios; two rows a start."""
    schedule = create_schedule("1f1b", num_ranks=16, num_microbatches=64)
    model = CostModel(schedule, scattered_costs(schedule, seed=0))
    lp = build_lp(formulation_of(schedule, model, 0.8).problem)
    assert len(lp.cost) == 960 + 1 + 1024
    assert len(lp.row_lower) == 2 * 960 + 16 + 16
    assert lp.value.nbytes + lp.index.nbytes + lp.starts.nbytes < 200_000
    assert np.abs(lp.value).max() == 1.0
