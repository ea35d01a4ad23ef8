"""The linear program once more, written down another way for another solver: the oracle of the sparse one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.optimize import OptimizeResult, linprog

from timelyfreeze.cost import ActionCosts
from timelyfreeze.schedule import Kind, Schedule, data_dependencies


def longest_s(costs: ActionCosts) -> float:
    """The longest action or transfer in seconds: the unit of a program's times."""
    transfers = costs.transfer_s
    return max(*costs.upper_s.values(), *(transfers.values() if isinstance(transfers, dict) else [transfers])) or 1.0


class DenseProgram:
    """Starts and durations (not ratios) as variables, every edge, a dense matrix.

    Args:
        cap: on every stage's mean ratio; one number or one a stage.
    """

    def __init__(self, schedule: Schedule, costs: ActionCosts, cap: float | Sequence[float]) -> None:
        caps = list(cap) if isinstance(cap, Sequence) else [cap] * schedule.num_stages
        actions = list(schedule.actions)
        number = {action: i for i, action in enumerate(actions)}
        num = len(actions)
        trains = {(a.stage, a.microbatch) for a in actions if a.kind in (Kind.B, Kind.W) and costs.upper_s[a] > 0}
        lowest = [
            min((stage for stage, at in trains if at == microbatch), default=schedule.num_stages)
            for microbatch in range(schedule.num_microbatches)
        ]  # below it no backward ever runs, and it needs no input gradient
        never = {a for a in actions if a.kind is not Kind.F and a.stage < lowest[a.microbatch]}
        self.scale = longest_s(costs)
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
            limits.append(caps[stage] * len(mine) - constant)
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
