"""Make plans: what to freeze so that a step ends soonest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import PlanError, problem, raise_all
from timelyfreeze.planner.choose import choose_ratios
from timelyfreeze.planner.cut_lp import FixedCuts, relaxation_bound
from timelyfreeze.planner.cut_search import DEFAULT_EFFORT, CutSearch, Found
from timelyfreeze.planner.formulate import formulate
from timelyfreeze.planner.highs import Basis, HighsSolver, StoppedError
from timelyfreeze.planner.limits import Limits
from timelyfreeze.planner.model import Bools, CostModel, Floats
from timelyfreeze.planner.options import PlanOptions
from timelyfreeze.planner.plan import Plan, plan_of_grid
from timelyfreeze.planner.solve_lp import minimize_lp
from timelyfreeze.planner.stream import cost_model
from timelyfreeze.schedule import Schedule

_ROUNDING = 1e-6  # of a makespan beside a target
_LEAST_BOUND_S = 1.0  # the bound gets so long even where the time is up

OnBetter = Callable[[Plan], None]


def make_plan(
    schedule: Schedule,
    costs: ActionCosts,
    max_ratio: float = 0.3,
    mode: str = "cut",
    *,
    goal: str = "makespan",
    stage_max_ratio: Mapping[int, float] | None = None,
    weights: Mapping[int, float] | None = None,
    target_makespan_s: float | None = None,
    live_microbatches: int | None = None,
    min_live_ratio: float = 0.25,
    floor_ratio: float = 0.5,
) -> Plan:
    """Plan what to freeze so that a step takes least time; among such plans, freeze least.

    Args:
        schedule: the order on every rank.
        costs: bounds of exactly this schedule's actions.
        max_ratio, mode, goal, stage_max_ratio, weights, target_makespan_s, live_microbatches, min_live_ratio,
            floor_ratio: see ``PlanOptions``. The same input gives the same plan.

    Raises:
        ValueError, TypeError: an argument is out of range, or the costs are not this schedule's.
        PlanError: ``target_makespan_s`` cannot be reached, and what stands against it; or a program was not solved.

    >>> from timelyfreeze.schedule import create_schedule
    >>> schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=8)
    >>> costs = ActionCosts.uniform(schedule, forward_s=15.0, backward_s=43.0, frozen_backward_s=20.0)
    >>> plan = make_plan(schedule, costs, max_ratio=0.5)
    >>> round(plan.unfrozen_makespan_s, 1), round(plan.makespan_s, 1), plan.cuts
    (522.0, 342.0, [1, 1, 0, 0, 0, 0, 0, 1])
    >>> round(make_plan(schedule, costs, max_ratio=0.5, mode="lp").objective_s, 1)
    387.0
    >>> stream = make_plan(schedule, costs, max_ratio=0.5, goal="period")
    >>> round(stream.unfrozen_makespan_s, 1), round(stream.makespan_s, 1), stream.objective_s <= stream.makespan_s
    (464.0, 350.0, True)
    """
    options = PlanOptions(
        max_ratio=max_ratio,
        mode=mode,
        goal=goal,
        stage_max_ratio=stage_max_ratio,
        weights=weights,
        target_makespan_s=target_makespan_s,
        live_microbatches=live_microbatches,
        min_live_ratio=min_live_ratio,
        floor_ratio=floor_ratio,
    )
    return Planner(schedule, options).solve(costs)


class Planner:
    """Makes plans for one schedule; the next one starts from where the last ended.

    Args:
        schedule: the order on every rank.
        options: what to achieve, and what may be given up for it.
        time_limit_s: after so long a search for cuts ends with the best plan found, and a linear program is given up.
        effort: how thoroughly cuts are searched for; see ``timelyfreeze.planner.cut_search``.

    Raises:
        ValueError: an option does not fit the schedule.

    Not thread-safe; ``BackgroundPlanner`` solves while training goes on.
    """

    def __init__(
        self,
        schedule: Schedule,
        options: PlanOptions | None = None,
        *,
        time_limit_s: float = 600.0,
        effort: int = DEFAULT_EFFORT,
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise TypeError(problem("schedule", expected="a Schedule", got=type(schedule).__name__))
        options = PlanOptions() if options is None else options
        if not time_limit_s > 0:
            raise_all(ValueError, [problem("time_limit_s", expected="seconds above 0", got=repr(time_limit_s))])
        options.caps(schedule.num_stages, schedule.num_microbatches)
        self.schedule = schedule
        self.options = options
        self._effort = effort
        self._time_limit_s = time_limit_s
        self._solver = HighsSolver(time_limit_s=time_limit_s)
        self._basis: tuple[Basis, Bools] | None = None  # with the freezable actions it belongs to
        self._last: Floats | None = None

    def solve(
        self,
        costs: ActionCosts,
        is_stopped: Callable[[], bool] = lambda: False,
        on_better: OnBetter = lambda _: None,
        options: PlanOptions | None = None,
    ) -> Plan:
        """Make a plan for new costs; after an error the planner can be used again.

        Args:
            options: from now on, instead of those so far.
            is_stopped: asked about twice a second, but not while the bound is worked on, from the thread that solves;
                True ends it with PlanError.
            on_better: in mode ``"cut"``, told of a first plan at once (its ``objective_s`` is 0: no bound is known yet)
                and of better ones as the search goes on.

        Raises:
            ValueError, PlanError: as ``make_plan`` does.
        """
        if not isinstance(costs, ActionCosts):
            raise TypeError(problem("costs", expected="ActionCosts", got=type(costs).__name__))
        costs.check(self.schedule)
        if options is not None and options != self.options:
            options.caps(self.schedule.num_stages, self.schedule.num_microbatches)
            self.options, self._last = options, None
        model = cost_model(self.schedule, costs, self.options.goal)
        limits = Limits.of_options(model, self.options)
        target_s = self.options.target_makespan_s or 0.0
        self._solver.is_stopped = is_stopped

        def as_plan(ratios: Floats, objective_s: float = 0.0) -> Plan:
            return plan_of_grid(model, self.schedule, costs, ratios, options=self.options, objective_s=objective_s)

        def tell(ratios: Floats, bound_s: float) -> None:
            plan = as_plan(ratios, bound_s)
            if self._reaches_target(plan):
                on_better(plan)

        try:
            if not model.freezable.any() or not limits.sums.any():
                ratios = np.zeros(model.freezable.shape)
                objective_s = float(model.makespans(ratios[None])[0])
            elif self.options.mode == "lp":
                ratios, objective_s = self._solve_lp(model, limits, target_s)
            else:
                ratios, objective_s = self._solve_cut(model, limits, target_s, is_stopped, tell)
        except StoppedError:
            raise PlanError(problem("planning was stopped before it ended")) from None
        plan = as_plan(ratios, objective_s)
        self._refuse_target(plan, limits)
        return plan

    def _solve_lp(self, model: CostModel, limits: Limits, target_s: float) -> tuple[Floats, float]:
        """Ratios ``[num_stages, num_microbatches]``, and the time in seconds that the linear program promises."""
        formulation = formulate(model, limits)
        start = None
        if self._basis is not None and np.array_equal(self._basis[1], model.freezable):
            start = self._basis[0]
        ratios, shortest_s, basis = minimize_lp(
            self._solver, formulation.problem, formulation.prices, start, target_s=target_s
        )
        self._basis = (basis, model.freezable)
        unfrozen_s = float(model.makespans(np.zeros((1, *model.freezable.shape)))[0])
        # The optimum lies between the two by definition; the solver's tolerance must not say otherwise.
        shortest_s = min(max(shortest_s, model.frozen_makespan()), unfrozen_s)
        promised_s = min(max(shortest_s, target_s), unfrozen_s)
        if self.options.goal == "period":
            return self._even_ratios(model, limits), promised_s
        ratios = formulation.to_grid(ratios)
        least = np.minimum(limits.sums, ratios.sum(axis=1))
        # Above the least makespan the caps do not bind: what is dealt out by whole micro-batches is the amount that the
        # program chose, or as little more as reaches the target.
        for share in (0.0, 0.25, 0.5, 0.75, 1.0) if target_s > shortest_s else (1.0,):
            allowed = replace(limits, sums=least + share * (limits.sums - least))
            chosen = choose_ratios(model, ratios, allowed, target_s=promised_s)
            if model.makespans(chosen[None])[0] <= target_s * (1 + _ROUNDING):
                break
        return chosen, promised_s

    def _even_ratios(self, model: CostModel, limits: Limits) -> Floats:
        """The linear program's ratios, as even over micro-batches as the bottom of each stage lets them be."""
        programs = FixedCuts(model, limits, self._solver)
        no_cuts = np.zeros(model.num_microbatches, dtype=np.intp)
        return CutSearch(model, limits, programs).solve_cuts(no_cuts)

    def _solve_cut(
        self,
        model: CostModel,
        limits: Limits,
        target_s: float,
        is_stopped: Callable[[], bool],
        on_better: Callable[[Floats, float], None],
    ) -> tuple[Floats, float]:
        """Ratios ``[num_stages, num_microbatches]``, and a lower bound of the makespan within the same limits."""
        ends_s = time.monotonic() + self._time_limit_s
        # With the linear program's plan among those it begins with, no plan with cuts is slower than that.
        plans = [self._solve_lp(model, limits, target_s)[0]]
        if self._last is not None and limits.allow(self._last) and not limits.starved(model, self._last).any():
            plans.append(self._last)
        on_better(min(plans, key=lambda ratios: float(model.makespans(ratios[None])[0])), 0.0)
        bound_s = relaxation_bound(model, limits, time_limit_s=max(ends_s - time.monotonic(), _LEAST_BOUND_S))
        programs = FixedCuts(model, limits, self._solver)

        def search(target_s: float, plans: list[Floats]) -> Found:
            return CutSearch(
                model,
                limits,
                programs,
                target_s=target_s,
                is_stopped=lambda: is_stopped() or time.monotonic() > ends_s,
                on_better=lambda found: on_better(found.ratios, min(bound_s, found.makespan_s)),
            ).run(self._effort, plans)

        found = search(target_s, plans)
        if target_s and found.makespan_s > target_s * (1 + _ROUNDING):
            # What the plan without a target reaches can be reached; the way to it may lead through other plans.
            fastest = search(0.0, [self._solve_lp(model, limits, 0.0)[0], *plans[1:]])
            found = search(target_s, [*plans, fastest.ratios])
        self._last = found.ratios
        return found.ratios, min(bound_s, found.makespan_s)

    def _reaches_target(self, plan: Plan) -> bool:
        target_s = self.options.target_makespan_s
        return target_s is None or plan.makespan_s <= target_s * (1 + _ROUNDING)

    def _refuse_target(self, plan: Plan, limits: Limits) -> None:
        """Raise PlanError where the plan that was found is slower than the target; says what stands against it."""
        if self._reaches_target(plan):
            return
        totals = [0.0] * self.schedule.num_stages
        for action, ratio in plan.ratios.items():
            totals[action.stage] += ratio
        binding = [
            f"the cap of stage {action.stage} binds first"
            for action in plan.ratios
            if totals[action.stage] >= limits.sums[action.stage] - _ROUNDING
        ]
        raise PlanError(
            problem(
                "target_makespan_s cannot be reached within the caps",
                expected=f"at least {plan.makespan_s:.6g} s, the best plan's (bound: {plan.objective_s:.6g} s)",
                got=f"{self.options.target_makespan_s:.6g} s",
                where=binding[0] if binding else "no cap binds: all else takes as long",
                hint="Raise the caps or the target.",
            )
        )
