"""The sparse program against an independent dense one, solved by scipy."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import OptimizeResult, linprog

from tests.random_schedules import random_costs, random_schedule, scattered_costs
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner.formulate import formulate
from timelyfreeze.planner.lp import BASIC, build_lp, critical_path_basis
from timelyfreeze.planner.make import Planner
from timelyfreeze.planner.model import CostModel
from timelyfreeze.schedule import Kind, Schedule, create_schedule, data_dependencies


class DenseProgram:
    """Written down another way: starts and durations (not ratios) as variables, every edge, a dense matrix."""

    def __init__(self, schedule: Schedule, costs: ActionCosts, cap: float) -> None:
        actions = list(schedule.actions)
        number = {action: i for i, action in enumerate(actions)}
        num = len(actions)
        trains = {(a.stage, a.microbatch) for a in actions if a.kind in (Kind.B, Kind.W) and costs.upper_s[a] > 0}
        lowest = [
            min((stage for stage, at in trains if at == microbatch), default=schedule.num_stages)
            for microbatch in range(schedule.num_microbatches)
        ]  # below it no backward ever runs, and it needs no input gradient
        never = {a for a in actions if a.kind is not Kind.F and a.stage < lowest[a.microbatch]}
        self.scale = max(costs.upper_s.values()) or 1.0
        upper = np.array([0.0 if a in never else costs.upper_s[a] for a in actions]) / self.scale
        is_above = [a.stage > lowest[a.microbatch] for a in actions]
        lower = np.array([costs.lower_s[a] * above for a, above in zip(actions, is_above, strict=True)])
        lower = np.where([costs.is_freezable(a) for a in actions], lower, upper * self.scale)
        lower /= self.scale
        edges = [(a, b, False) for order in schedule.ranks for a, b in pairwise(order)]
        edges += [(e.before, e.after, e.transfer) for e in data_dependencies(schedule)]
        rows, limits = [], []
        for before, after, sent in edges:  # start[before] + duration[before] + delay <= start[after]
            pair = (before.stage, after.stage)
            transfer = costs.transfer_s
            delay = (transfer if isinstance(transfer, float) else transfer.get(pair, 0.0)) if sent else 0.0
            delay *= after not in never
            row = np.zeros(2 * num + 1)
            row[number[before]], row[num + number[before]], row[number[after]] = 1, 1, -1
            rows.append(row)
            limits.append(-delay / self.scale)
        for i in range(num):  # start + duration <= T
            row = np.zeros(2 * num + 1)
            row[i], row[num + i], row[2 * num] = 1, 1, -1
            rows.append(row)
            limits.append(0.0)
        self.frozen_cost = np.zeros(2 * num + 1)
        self.num_freezable = 0
        for stage in range(schedule.num_stages):
            mine = [i for i, a in enumerate(actions) if a.stage == stage and costs.is_freezable(a)]
            row = np.zeros(2 * num + 1)
            for i in mine:  # the ratio is (upper - duration) / (upper - lower)
                row[num + i] = -1 / (upper[i] - lower[i])
                self.frozen_cost[num + i] = row[num + i]
            constant = sum(upper[i] / (upper[i] - lower[i]) for i in mine)
            self.num_freezable += len(mine)
            rows.append(row)
            limits.append(cap * len(mine) - constant)
        self.constant = sum(upper[i] / (upper[i] - lower[i]) for i, a in enumerate(actions) if costs.is_freezable(a))
        self.matrix, self.limits = np.array(rows), np.array(limits)
        self.bounds = [(0, None)] * num + list(zip(lower, upper, strict=True)) + [(0, None)]

    def solve(self, cost: np.ndarray, longest: float | None = None) -> OptimizeResult:
        bounds = self.bounds if longest is None else [*self.bounds[:-1], (0, longest)]
        return linprog(cost, A_ub=self.matrix, b_ub=self.limits, bounds=bounds, method="highs")

    def shortest(self) -> float:
        """The least makespan, in seconds."""
        cost = np.zeros(len(self.bounds))
        cost[-1] = 1
        return float(self.solve(cost).fun) * self.scale

    def least_frozen(self, makespan_s: float) -> float:
        """The least sum of ratios that reaches it."""
        return float(self.solve(self.frozen_cost, makespan_s / self.scale * (1 + 1e-9)).fun) + self.constant


def sparse(schedule: Schedule, costs: ActionCosts, cap: float) -> tuple[np.ndarray, float]:
    formulation = formulate(schedule, CostModel(schedule, costs), cap)
    return Planner(schedule, max_ratio=cap)._minimize(formulation.problem, None)


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


def test_ratios_above_the_cap_by_the_solvers_tolerance_are_scaled_down() -> None:
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    formulation = formulate(schedule, CostModel(schedule, scattered_costs(schedule, seed=0)), 0.5)
    grid = formulation.to_grid(np.array([1.0, 1.0 - 1e-10, 1e-10, 0.0, 1.0, 0.5 + 1e-7, 0.25, 0.25]))
    assert grid[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert grid[1].sum() == pytest.approx(2.0, abs=1e-12)
    assert grid[1].tolist() == pytest.approx([1.0, 0.5, 0.25, 0.25], abs=1e-7)
    assert grid[1, 0] == 1.0


def test_start_is_a_basis_of_the_right_size() -> None:
    """As many basic columns and rows as there are rows, or the solver would throw the start away."""
    for seed in range(60):
        draw = random.Random(seed)
        schedule = random_schedule(draw)
        formulation = formulate(schedule, CostModel(schedule, random_costs(schedule, draw)), 0.5)
        columns, rows = critical_path_basis(formulation.problem)
        assert (columns == BASIC).sum() + (rows == BASIC).sum() == len(rows)


def test_size_of_the_program() -> None:
    """16 x 64: 2,048 starts, T and 1,024 ratios; 2,032 rows of order, 1,920 of data, one a rank for T, one a stage."""
    schedule = create_schedule("1f1b", num_ranks=16, num_microbatches=64)
    model = CostModel(schedule, scattered_costs(schedule, seed=0))
    lp = build_lp(formulate(schedule, model, 0.8).problem)
    assert len(lp.cost) == 2048 + 1 + 1024
    assert len(lp.row_lower) == 2032 + 1920 + 16 + 16
    assert lp.value.nbytes + lp.index.nbytes + lp.starts.nbytes < 200_000
    assert np.abs(lp.value).max() == 1.0
