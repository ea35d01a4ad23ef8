"""The sparse program against an independent dense one, solved by scipy."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import OptimizeResult, linprog

from tests.random_schedules import random_costs, random_schedule, scattered_costs
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner.formulate import fix_cuts, formulate
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
        trained = [a.stage for a in actions if a.kind in (Kind.B, Kind.W) and costs.upper_s[a] > 0]
        lowest = min(trained, default=schedule.num_stages)
        self.scale = max(costs.upper_s.values()) or 1.0
        upper = np.array([costs.upper_s[a] for a in actions]) / self.scale
        lower = np.array(
            [(costs.lower_s[a] * (a.stage > lowest)) if costs.is_freezable(a) else costs.upper_s[a] for a in actions]
        )
        lower /= self.scale
        edges = [(a, b, False) for order in schedule.ranks for a, b in pairwise(order)]
        edges += [tuple(edge) for edge in data_dependencies(schedule)]
        rows, limits = [], []
        for before, after, sent in edges:  # start[before] + duration[before] + delay <= start[after]
            pair = (before.stage, after.stage)
            transfer = costs.transfer_s
            delay = (transfer if isinstance(transfer, float) else transfer.get(pair, 0.0)) if sent else 0.0
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
    return Planner(schedule, max_ratio=cap)._minimize(formulation.problem, np.ones(len(formulation.stages)))


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


def test_known_cuts_are_a_program_that_the_given_ratios_solve() -> None:
    """With the cuts of some ratios fixed, the optimum is at least as good as those ratios under the true cost."""
    for seed in range(60):
        draw = random.Random(seed)
        schedule = random_schedule(draw)
        costs = random_costs(schedule, draw)
        model = CostModel(schedule, costs)
        if not model.freezable.any():
            continue
        shares = np.random.default_rng(seed)
        grid = np.where(model.freezable, shares.choice([0.0, 1.0, 0.4], size=model.freezable.shape), 0.0)
        cap = float(max(0.1, (grid.sum(axis=1) / np.maximum(model.freezable.sum(axis=1), 1)).max()))
        formulation = formulate(schedule, model, cap)
        ratios, makespan_s = Planner(schedule, max_ratio=cap)._minimize(
            fix_cuts(formulation, grid), np.ones(len(formulation.stages))
        )
        before = model.makespans(grid[None])[0]
        after = model.makespans(formulation.to_grid(ratios)[None])[0]
        assert makespan_s <= before * (1 + 1e-6) + 1e-12, seed
        assert after <= makespan_s * (1 + 1e-6) + 1e-12, seed


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
