"""Linear programs that know cuts: the best ratios for given cuts, and a lower bound over all cuts.

For micro-batch m let the cut c be the lowest stage that trains something. A backward of stage s lasts nothing below c,
u (1 - r) in it, and u - (u - l) r above it, with r its ratio and u, l its bounds. With the cuts given that is linear in
r. With z_s = 1 where stages 0..s train nothing (z_s <= z_(s-1), z_s <= r_s) it is u - (u - l) r - l y everywhere, where
y <= r and y <= z_(s-1): a mixed-integer program, whose relaxation bounds every plan from below.
"""

from __future__ import annotations

import numpy as np

from timelyfreeze.errors import PlanError
from timelyfreeze.planner.highs import HighsSolver, relaxed_optimum
from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.lp import Budget, Problem, SparseLp, row_nodes
from timelyfreeze.planner.model import CostModel, Floats, Ints
from timelyfreeze.planner.solve_lp import minimize_lp


class FixedCuts:
    """The linear program over ratios for given cuts.

    Args:
        model, limits: what is planned.
        solver: used for every solve.
    """

    def __init__(self, model: CostModel, limits: Limits, solver: HighsSolver) -> None:
        self._graph, self._model, self._limits, self._solver = model.graph, model, limits, solver
        self._stages, self._microbatches = np.nonzero(model.freezable)
        self._numbers = np.full(model.freezable.shape, -1)
        self._numbers[self._stages, self._microbatches] = np.arange(len(self._stages))
        self._by_stage = [np.flatnonzero(self._stages == stage) for stage in range(model.num_stages)]
        self._prices = limits.relative_prices[self._stages]
        # The lowest stage from each one up that trains, by micro-batch: a cut passes stages that have nothing to train.
        self._training = np.full((model.num_stages + 1, model.num_microbatches), model.num_stages)
        for stage in reversed(range(model.num_stages)):
            trains = model.freezable[stage] | model.always_trains[stage]
            self._training[stage] = np.where(trains, stage, self._training[stage + 1])

    def solve(self, cuts: Ints, most: Floats, *, target_s: float = 0.0, is_exact: bool = False) -> Floats | None:
        """The ratios ``[num_stages, num_microbatches]`` of the fastest plan with at least these cuts.

        Args:
            cuts: for every micro-batch, the lowest stage that may train.
            most: the largest ratio of every place at and above the cuts, ``[num_stages, num_microbatches]``.
            target_s: where the fastest plan is faster, the one that freezes least and takes no longer than this.
            is_exact: minimise the makespan first and the price of freezing then, instead of both at once.
                The plan that is chosen in the end is solved so.

        Returns:
            None where the limits do not allow such cuts, or the solver gave up on numbers of very different sizes.
        """
        problem = self._problem(cuts, most)
        if problem is None:
            return None
        try:
            solved = minimize_lp(self._solver, problem, self._prices, target_s=target_s, is_exact=is_exact)
        except PlanError:
            return None
        found = np.minimum(solved.ratios, problem.upper)
        grid = np.zeros(self._model.freezable.shape)
        # A basic solution is exact up to rounding; ratios within 1e-9 of a bound are that bound.
        grid[self._stages, self._microbatches] = np.where(found < 1e-9, 0.0, np.where(found > 1 - 1e-9, 1.0, found))
        is_open = np.zeros(grid.shape, dtype=np.bool_)
        is_open[self._stages, self._microbatches] = (problem.lower < 1.0) & (problem.upper > 0.0)
        return self._limits.trim(self._model.even_out(grid, is_open, self._lowest(cuts)))

    def _lowest(self, cuts: Ints) -> Ints:
        return self._training[cuts, np.arange(self._model.num_microbatches)]

    def _problem(self, cuts: Ints, most: Floats) -> Problem | None:
        model, limits, nodes = self._model, self._limits, self._model.nodes
        cuts = self._lowest(cuts)
        cut = cuts[nodes.microbatch]
        skipped = nodes.is_backward & (nodes.stage < cut)
        at_cut = nodes.is_backward & (nodes.stage == cut) & model.freezable[nodes.stage, nodes.microbatch]
        span = np.where(at_cut, model.upper_s, np.where(model.is_freezable, model.upper_s - model.lower_s, 0.0))
        span[skipped] = 0.0
        below = self._stages < cuts[self._microbatches]
        lower = below.astype(np.float64)
        upper = np.where(below, 1.0, most[self._stages, self._microbatches])
        # Above the cut a parameter is frozen with probability r; so many micro-batches may not be live for it.
        above = self._stages > cuts[self._microbatches]
        budgets = []
        for stage, ratios in enumerate(self._by_stage):
            if not len(ratios):
                continue
            if lower[ratios].sum() > limits.sums[stage] + 1e-9:
                return None
            budgets.append(Budget(ratios.tolist(), max(limits.sums[stage], lower[ratios].sum())))
            open_ratios = ratios[above[ratios]]
            if limits.is_exact[stage] or not len(open_ratios):
                continue
            in_cut = ratios[~below[ratios] & ~above[ratios]]
            room = len(open_ratios) + int((upper[in_cut] <= 0).sum()) - limits.live[stage]
            room += model.num_microbatches - len(ratios)
            if room < len(open_ratios):
                budgets.append(Budget(open_ratios.tolist(), max(room, 0.0)))
        return Problem(
            graph=self._graph,
            upper_s=np.where(skipped, 0.0, model.upper_s),
            span_s=span,
            ratio=np.where(span > 0, self._numbers[nodes.stage, nodes.microbatch], -1),
            transfer_s=np.where(skipped, 0.0, model.transfer_s),
            lower=lower,
            upper=upper,
            budgets=budgets,
        )


def relaxation_bound(model: CostModel, limits: Limits, *, time_limit_s: float) -> float:
    """Seconds that no plan within the limits can be faster than, whatever its cuts: the relaxed program's optimum.

    Two rows make it tighter than the plain relaxation: at most ``floor(cap M)`` micro-batches train nothing in a stage,
    and y <= most z_(s-1), since r never passes its limit (on 1F1B 4 x 8 at cap 0.8 the bound rises from 251 to 281 ms,
    where the best plan takes 316.8).

    Returns:
        0 where the optimum was not found in time: no plan is faster than that either.
    """
    program = _Relaxation(model, limits)
    optimum = relaxed_optimum(program.build(), time_limit_s)
    # Below the optimum by more than the solver's tolerance, so that it stays a bound.
    return 0.0 if optimum is None else optimum * program.scale_s * (1 - 1e-6)


class _Relaxation:
    """The relaxed program's rows, gathered as triples. Columns: starts, makespan, then r, z and y by place."""

    def __init__(self, model: CostModel, limits: Limits) -> None:
        self._model, self._limits = model, limits
        self._before, self._after = row_nodes(model.graph)
        num, places = len(model.upper_s), model.freezable.size
        self.makespan = num
        self.scale_s = float(max(model.upper_s.max(), model.transfer_s.max())) or 1.0
        self._columns = num + 1 + np.arange(3 * places).reshape(3, *model.freezable.shape)
        self._rows: list[tuple[Ints, Floats]] = []
        self._limits_of_rows: list[tuple[float, float]] = []
        self._delay = self._delays()

    def build(self) -> SparseLp:
        model, num = self._model, self.makespan
        self._add_order()
        upper = np.zeros((3, *model.freezable.shape))
        upper[0] = self._limits.most_or_whole
        for microbatch in range(model.num_microbatches):
            self._add_microbatch(microbatch, upper)
        for stage in range(model.num_stages):
            for kind, limit in ((0, self._limits.sums[stage]), (1, float(self._limits.most_full[stage]))):
                self._add(self._columns[kind, stage], np.ones(model.num_microbatches), -np.inf, limit)
        widths = [len(index) for index, _ in self._rows]
        cost = np.zeros(num + 1 + upper.size)
        cost[num] = 1.0
        bounds = np.array(self._limits_of_rows)
        return SparseLp(
            cost=cost,
            col_lower=np.zeros(len(cost)),
            col_upper=np.concatenate([np.full(num + 1, np.inf), upper.reshape(-1)]),
            row_lower=bounds[:, 0],
            row_upper=bounds[:, 1],
            starts=np.concatenate([[0], np.cumsum(widths)]).astype(np.int32),
            index=np.concatenate([index for index, _ in self._rows]).astype(np.int32),
            value=np.concatenate([value for _, value in self._rows]),
            makespan=num,
            scale_s=self.scale_s,
        )

    def _add(self, index: Ints, value: Floats, low: float, high: float) -> None:
        self._rows.append((index, value))
        self._limits_of_rows.append((low, high))

    def _delays(self) -> Floats:
        num_ranks = self._model.graph.rank[-1] + 1
        first_data = len(self._model.upper_s) - num_ranks
        delay = np.zeros(len(self._before))
        readers = self._after[first_data:-num_ranks]
        delay[first_data:-num_ranks] = self._model.transfer_s[readers]
        return delay

    def _skips(self) -> Ints:
        """For every place the column z that is 1 where no stage up to it trains anything; -1 where some always does."""
        model = self._model
        columns = np.full(model.freezable.shape, -1)
        for microbatch in range(model.num_microbatches):
            last = -1
            for stage in range(model.num_stages):
                if model.always_trains[stage, microbatch]:
                    break
                if model.freezable[stage, microbatch]:
                    last = self._columns[1, stage, microbatch]
                columns[stage, microbatch] = last
        return columns

    def _add_order(self) -> None:
        """t_b - t_a + (u - l) r + l y >= u, and a transfer that is spared where its reader is skipped."""
        model, nodes = self._model, self._model.nodes
        r, _, y = self._columns
        stage, microbatch, skips = nodes.stage, nodes.microbatch, self._skips()
        for before, after, delay in zip(self._before.tolist(), self._after.tolist(), self._delay, strict=True):
            place, upper = (stage[before], microbatch[before]), model.upper_s[before] / self.scale_s
            terms = {after: 1.0, before: -1.0}
            if nodes.is_backward[before] and model.freezable[place]:
                span = (model.upper_s[before] - model.lower_s[before]) / self.scale_s
                if not model.is_above[before]:
                    span = upper
                terms |= {r[place]: span, y[place]: upper - span}
            elif nodes.is_backward[before] and skips[place] >= 0:  # its stage has nothing to train: it passes on only
                terms[skips[place]] = upper
            if delay > 0 and nodes.is_backward[after]:
                skip = skips[stage[after], microbatch[after]]
                if skip >= 0:
                    terms[skip] = terms.get(skip, 0.0) + delay / self.scale_s
            low = (model.upper_s[before] + delay) / self.scale_s
            kept = {column: value for column, value in terms.items() if value}
            self._add(np.array(list(kept)), np.array(list(kept.values())), low, np.inf)

    def _add_microbatch(self, microbatch: int, upper: Floats) -> None:
        """z_s <= z_(s-1), z_s <= r_s, y_s <= r_s, y_s <= most z_(s-1), where there are such; sets their bounds."""
        r, z, y = self._columns[:, :, microbatch]
        most, ones = self._limits.most_or_whole[:, microbatch], np.array([1.0, -1.0])
        last = -1  # the stage below that trains something, unless it is frozen
        for stage in range(self._model.num_stages):
            if not self._model.freezable[stage, microbatch]:
                if self._model.always_trains[stage, microbatch]:
                    return
                continue
            upper[1, stage, microbatch] = 1.0 if most[stage] >= 1.0 else 0.0
            self._add(np.array([r[stage], z[stage]]), ones, 0.0, np.inf)
            if last >= 0:
                upper[2, stage, microbatch] = most[stage]
                self._add(np.array([r[stage], y[stage]]), ones, 0.0, np.inf)
                self._add(np.array([z[last], y[stage]]), np.array([most[stage], -1.0]), 0.0, np.inf)
                self._add(np.array([z[last], z[stage]]), ones, 0.0, np.inf)
            last = stage
