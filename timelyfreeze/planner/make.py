"""Make plans: the linear program, then what cuts make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import PlanError, problem, raise_all
from timelyfreeze.planner.choose import choose_ratios
from timelyfreeze.planner.formulate import formulate
from timelyfreeze.planner.highs import Basis, HighsSolver, StoppedError
from timelyfreeze.planner.lp import Problem, Statuses, build_lp, critical_path_basis
from timelyfreeze.planner.model import Bools, CostModel, Floats
from timelyfreeze.planner.plan import Plan, plan_of_grid
from timelyfreeze.schedule import Schedule

MODES = ("lp",)
# The first solve weighs the sum of ratios this little beside the makespan. It ends at or next to the vertex that the
# two exact solves look for, and is itself faster than minimising the makespan alone, whose optimum is hugely
# degenerate (16 x 64 with 5 % scatter, all solves together: 169 for 211 ms at cap 0.8, 221 for 296 ms at 0.5).
_WEIGHT = 1e-3


def make_plan(schedule: Schedule, costs: ActionCosts, max_ratio: float = 0.8, mode: str = "lp") -> Plan:
    """Plan what to freeze so that a step takes least time; among such plans, freeze least.

    Args:
        schedule: the order on every rank.
        costs: bounds of exactly this schedule's actions.
        max_ratio: cap on every stage's mean freeze ratio, in [0, 1].
        mode: how to plan. ``"lp"``: TimelyFreeze's linear program (arXiv 2602.05754), then the lowest stage's ratios
            dealt out by whole micro-batches, which are cut there, and at least ``MIN_LIVE_RATIO`` of the highest
            stage left live in every micro-batch. The same input gives the same plan.

    Raises:
        ValueError: an argument is out of range, or the costs are not this schedule's.
        PlanError: the linear program was not solved.

    >>> from timelyfreeze.schedule import Action, Kind, create_schedule
    >>> schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=8)
    >>> upper = {action: 15.0 if action.kind is Kind.F else 43.0 for action in schedule.actions}
    >>> lower = {action: 20.0 * action.stage for action in schedule.actions if action.kind is Kind.B}
    >>> plan = make_plan(schedule, ActionCosts(upper, lower), max_ratio=0.5)
    >>> round(plan.unfrozen_makespan_s, 1), round(plan.objective_s, 1), plan.makespan_s <= plan.objective_s
    (522.0, 387.0, True)
    """
    return Planner(schedule, max_ratio=max_ratio, mode=mode).solve(costs)


class Planner:
    """Makes plans for one schedule. The second one starts from where the first ended, and takes about half the time.

    Args:
        schedule, max_ratio, mode: as for ``make_plan``.
        time_limit_s: give up on a linear program after so long.

    Not thread-safe; ``BackgroundPlanner`` solves while training goes on.
    """

    def __init__(
        self, schedule: Schedule, *, max_ratio: float = 0.8, mode: str = "lp", time_limit_s: float = 600.0
    ) -> None:
        faults = []
        if not isinstance(schedule, Schedule):
            raise TypeError(problem("schedule", expected="a Schedule", got=type(schedule).__name__))
        if not isinstance(max_ratio, (int, float)) or not 0 <= max_ratio <= 1:
            faults.append(problem("max_ratio", expected="a number in [0, 1]", got=repr(max_ratio)))
        if mode not in MODES:
            faults.append(problem("mode", expected=f"one of {', '.join(MODES)}", got=repr(mode)))
        if not time_limit_s > 0:
            faults.append(problem("time_limit_s", expected="seconds above 0", got=repr(time_limit_s)))
        raise_all(ValueError, faults)
        self.schedule = schedule
        self.max_ratio = float(max_ratio)
        self.mode = mode
        self._solver = HighsSolver(time_limit_s=time_limit_s)
        self._basis: tuple[Basis, Bools] | None = None  # with the freezable actions it belongs to

    def solve(self, costs: ActionCosts, is_stopped: Callable[[], bool] = lambda: False) -> Plan:
        """Make a plan for new costs; after an error the planner can be used again.

        Args:
            is_stopped: asked about twice a second, from the thread that solves; True ends it with PlanError.

        Raises:
            ValueError, PlanError: as ``make_plan`` does.
        """
        if not isinstance(costs, ActionCosts):
            raise TypeError(problem("costs", expected="ActionCosts", got=type(costs).__name__))
        costs.check(self.schedule)
        model = CostModel(self.schedule, costs)
        self._solver.is_stopped = is_stopped
        try:
            grid, objective_s = self._solve(model)
        except StoppedError:
            raise PlanError(problem("planning was stopped before it ended")) from None
        plan = plan_of_grid(
            model, self.schedule, costs, grid, mode=self.mode, max_ratio=self.max_ratio, objective_s=objective_s
        )
        # The optimum lies between the two by definition; the solver's tolerance must not say otherwise.
        bounded = min(max(objective_s, plan.frozen_makespan_s), plan.unfrozen_makespan_s)
        return replace(plan, objective_s=bounded)

    def _solve(self, model: CostModel) -> tuple[Floats, float]:
        """Ratios ``[num_stages, num_microbatches]``, and the linear program's optimum in seconds."""
        if not model.freezable.any() or self.max_ratio == 0:
            nothing = np.zeros(model.freezable.shape)
            return nothing, float(model.makespans(nothing[None])[0])
        formulation = formulate(self.schedule, model, self.max_ratio)
        start = None
        if self._basis is not None and np.array_equal(self._basis[1], model.freezable):
            start = self._basis[0]
        values, objective_s = self._minimize(formulation.problem, start)
        self._basis = (self._solver.basis(), model.freezable)

        ratios = choose_ratios(
            model,
            formulation.to_grid(values),
            max_ratio=self.max_ratio,
            target_s=objective_s,
        )
        return ratios, objective_s

    def _minimize(self, problem: Problem, start: Statuses | Basis | None) -> tuple[Floats, float]:
        """Minimise the makespan and then, at that makespan, the sum of ratios: (ratios, makespan in s)."""
        solver, lp = self._solver, build_lp(problem)
        makespan, ratios = lp.makespan, slice(lp.makespan + 1, None)
        time_only, ratios_only = lp.cost, np.zeros(len(lp.cost))
        ratios_only[ratios] = 1.0
        solver.load(replace(lp, cost=time_only + _WEIGHT * ratios_only), start or critical_path_basis(problem))
        solver.minimize()
        solver.set_costs(time_only)
        shortest = float(solver.minimize(from_feasible=True)[makespan])
        solver.set_costs(ratios_only)
        solver.set_upper(makespan, shortest * (1 + 1e-12))  # room for rounding; ratios move by 1e-10 at most
        return solver.minimize(from_feasible=True)[ratios], shortest * lp.scale_s
