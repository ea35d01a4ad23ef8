"""Cut-aware planning once more, as a mixed-integer program for another solver interface: the oracle of the search."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tests.dense_program import longest_s
from tests.plan_checks import caps_of
from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import PlanOptions
from timelyfreeze.schedule import Kind, Schedule, data_dependencies

Terms = dict[int, float]

# In a cut stage a ratio is 1 or this much below it.
NEARLY = 1e-4


class CutProgram:
    """Columns are numbered as they are asked for by name; rows are low <= terms <= high."""

    def __init__(self, schedule: Schedule, costs: ActionCosts, options: PlanOptions) -> None:
        self.schedule, self.costs, self.options = schedule, costs, options
        self.scale_s = longest_s(costs)
        self.columns: dict[object, int] = {}
        self.rows: list[tuple[Terms, float, float]] = []
        self.upper: dict[int, float] = {}
        self.binary: set[int] = set()
        self.kinds = {
            (stage, mb): self.kind(stage, mb)
            for stage in range(schedule.num_stages)
            for mb in range(schedule.num_microbatches)
        }
        top = max((stage for (stage, _), kind in self.kinds.items() if kind == "free"), default=-1)
        for (stage, mb), kind in self.kinds.items():
            self.train(stage, mb, kind, 1.0 - options.min_live_ratio if stage == top else 1.0)
        for stage, cap in enumerate(caps_of(options, schedule)):
            free = [mb for mb in range(schedule.num_microbatches) if self.kinds[stage, mb] == "free"]
            self.rows.append(({self.col("r", stage, mb): 1.0 for mb in free}, -np.inf, cap * len(free)))
            self.floor(stage, free, cap)
        self.order()

    def col(self, *name: object) -> int:
        return self.columns.setdefault(name, len(self.columns))

    def kind(self, stage: int, mb: int) -> str:
        weights = [
            action
            for action in self.schedule.actions
            if (action.stage, action.microbatch) == (stage, mb) and action.kind in (Kind.B, Kind.W)
        ]
        if any(self.costs.lower_s[action] < self.costs.upper_s[action] for action in weights):
            return "free"
        return "always" if any(self.costs.upper_s[action] > 0 for action in weights) else "never"

    def train(self, stage: int, mb: int, kind: str, most: float) -> None:
        """z: stages 0..stage train nothing for the micro-batch. y = r where the stages below train nothing, else 0."""
        z = self.col("z", stage, mb)
        self.binary.add(z)
        self.upper[z] = 0.0 if kind == "always" else 1.0
        below = None if stage == 0 else self.col("z", stage - 1, mb)
        if below is not None:
            self.rows.append(({z: 1.0, below: -1.0}, -np.inf, 0.0))
        if kind == "never":
            self.rows.append(({z: 1.0} if below is None else {z: 1.0, below: -1.0}, float(below is None), np.inf))
        if kind == "free":
            r, y = self.col("r", stage, mb), self.col("y", stage, mb)
            self.upper[r], self.upper[y] = most, 1.0
            self.rows += [({z: 1.0, r: -1.0}, -np.inf, 0.0), ({y: 1.0, r: -1.0}, -np.inf, 0.0)]
            if below is not None:
                self.rows.append(({y: 1.0, below: -1.0}, -np.inf, 0.0))
            # What is wholly frozen counts as cut, or all but 1 of it would be as good and starve the next stage less.
            terms = {r: 1.0, z: -1.0} if below is None else {r: 1.0, z: -1.0, below: 1.0}
            self.rows.append((terms, -np.inf, 1.0 - NEARLY + (below is not None)))

    def floor(self, stage: int, free: list[int], cap: float) -> None:
        """a: how live the bottom parameter is. In the cut stage: only where nothing is frozen (w = 0)."""
        exact = self.options.live_microbatches
        least = self.options.floor_ratio * (1.0 - cap) * self.schedule.num_microbatches if exact is None else exact
        least -= self.schedule.num_microbatches - len(free)
        if not free or least <= 0:
            return
        live = {mb: self.col("a", stage, mb) for mb in free}
        self.rows.append((dict.fromkeys(live.values(), 1.0), least, np.inf))
        for mb, a in live.items():
            r, w = self.col("r", stage, mb), self.col("w", stage, mb)
            self.binary.add(w)
            self.upper[w], self.upper[a] = 1.0, 1.0
            frozen = r if exact is None else self.col("z", stage, mb)
            self.rows += [({a: 1.0, frozen: 1.0}, -np.inf, 1.0), ({r: 1.0, w: -1.0}, -np.inf, 0.0)]
            below = {} if stage == 0 else {self.col("z", stage - 1, mb): 1.0}
            self.rows.append(({a: 1.0, w: 1.0} | below, -np.inf, 1.0 + bool(below)))

    def spared(self, action: object) -> Terms:
        """What freezing takes off an action's upper bound."""
        stage, kind, mb = action  # type: ignore[misc]
        if kind is Kind.F or self.kinds[stage, mb] == "always":
            return {}
        upper, lower = self.costs.upper_s[action], self.costs.lower_s[action]  # type: ignore[index]
        if self.kinds[stage, mb] == "never":
            return {self.col("z", stage, mb): upper}
        if kind is Kind.I:
            lower = upper
        return {self.col("r", stage, mb): upper - lower, self.col("y", stage, mb): lower}

    def order(self) -> None:
        makespan = self.col("T")
        self.times = {makespan, *map(self.col, self.schedule.actions)}
        pairs = [(a, b, 0.0) for order in self.schedule.ranks for a, b in pairwise(order)]
        transfers = self.costs.transfer_s
        for edge in data_dependencies(self.schedule):
            pair = edge.before.stage, edge.after.stage
            time = 0.0
            if edge.transfer:
                time = transfers.get(pair, 0.0) if isinstance(transfers, dict) else float(transfers)  # type: ignore[arg-type]
            pairs.append((edge.before, edge.after, time))
        for before, after, time in pairs:
            terms = {self.col(after): 1.0, self.col(before): -1.0} | self.spared(before)
            if time and after.kind is not Kind.F:
                z = self.col("z", after.stage, after.microbatch)
                terms[z] = terms.get(z, 0.0) + time
            self.add_time(terms, self.costs.upper_s[before] + time)
        for action in self.schedule.actions:
            terms = {makespan: 1.0, self.col(action): -1.0} | self.spared(action)
            self.add_time(terms, self.costs.upper_s[action])

    def add_time(self, terms: Terms, low: float) -> None:
        """A row in seconds; starts and the makespan are counted in units of the longest time."""
        scaled = {col: value if col in self.times else value / self.scale_s for col, value in terms.items()}
        self.rows.append((scaled, low / self.scale_s, np.inf))

    def solve(
        self, gap_ratio: float, max_nodes: int, cost: dict[int, float] | None = None, longest_s: float = np.inf
    ) -> tuple[float, float]:
        """The least cost that was found, and a proven lower bound of it. Default: the makespan in seconds."""
        num = len(self.columns)
        entries = [(row, col, value) for row, (terms, _, _) in enumerate(self.rows) for col, value in terms.items()]
        rows, cols, values = zip(*entries, strict=True)
        matrix = coo_array((values, (rows, cols)), shape=(len(self.rows), num))
        makespan = self.col("T")
        cost = {makespan: self.scale_s} if cost is None else cost
        high = np.array([self.upper.get(column, np.inf) for column in range(num)])
        high[makespan] = longest_s / self.scale_s
        for presolve in (True, False):  # with it HiGHS gives up on one in some thousands ("Solve error")
            solved = milp(
                np.array([cost.get(column, 0.0) for column in range(num)]),
                constraints=LinearConstraint(
                    matrix.tocsr(), [low for _, low, _ in self.rows], [high for _, _, high in self.rows]
                ),
                bounds=Bounds(np.zeros(num), high),
                integrality=np.array([float(column in self.binary) for column in range(num)]),
                options={"mip_rel_gap": gap_ratio, "node_limit": max_nodes, "presolve": presolve},
            )
            if solved.status <= 1:  # solved, or out of nodes
                break
        assert solved.status <= 1, solved.message
        if solved.x is None:  # no plan was found within the nodes
            return np.inf, 0.0
        return float(solved.fun), float(solved.mip_dual_bound)

    @property
    def price(self) -> dict[int, float]:
        """The price of every ratio's column."""
        weights = self.options.weights or {}
        return {
            self.col("r", stage, mb): weights.get(stage, 1.0)
            for (stage, mb), kind in self.kinds.items()
            if kind == "free"
        }


def independent_optimum(
    schedule: Schedule,
    costs: ActionCosts,
    options: PlanOptions,
    *,
    gap_ratio: float = 1e-3,
    max_nodes: int = 20_000,
) -> tuple[float, float]:
    """The least makespan that was found, within the gap or after so many nodes, and a proven lower bound of it."""
    return CutProgram(schedule, costs, options).solve(gap_ratio, max_nodes)


def independent_price(
    schedule: Schedule, costs: ActionCosts, options: PlanOptions, target_s: float
) -> tuple[float, float]:
    """The least price of freezing that reaches a makespan, found and proven, as ``independent_optimum``."""
    program = CutProgram(schedule, costs, options)
    return program.solve(1e-4, 2_000, program.price, target_s * (1 + 1e-7))
