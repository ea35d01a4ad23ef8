"""A plan: what to freeze where, and what that is predicted to take."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import compress
from os import PathLike, fspath
from typing import Any

import numpy as np

from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import PlanError, ScheduleError, problem, raise_all
from timelyfreeze.files import read_json, write_atomically
from timelyfreeze.planner.model import CostModel, Floats
from timelyfreeze.planner.true_cost import ratio_grid
from timelyfreeze.schedule import Action, Schedule
from timelyfreeze.schedule.graph import graph_of

_FORMAT = "timelyfreeze-plan"
_VERSION = 1
_TIMES = ("makespan_s", "objective_s", "unfrozen_makespan_s", "frozen_makespan_s")


@dataclass(frozen=True)
class Plan:
    """Freeze ratios of a schedule with their predicted times. Times are seconds.

    Attributes:
        schedule, costs: what it was made for.
        mode: how it was made (``"lp"``).
        max_ratio: the cap that every stage's mean ratio obeys.
        ratios: of every freezable action (kind B or W, lower < upper bound), in [0, 1].
        cuts: for every micro-batch, the lowest stage that still trains something (``num_stages`` if none does).
        start_s: predicted start of every action.
        makespan_s: predicted step time: the simulation under the true cost model, which knows the cuts.
        objective_s: the optimum of the linear program, which knows none: never below ``frozen_makespan_s`` nor above
            ``unfrozen_makespan_s``.
        unfrozen_makespan_s: with nothing frozen.
        frozen_makespan_s: with every freezable action at its lower bound (0 in the lowest stage that trains).

    >>> from timelyfreeze.schedule import create_schedule
    >>> schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    >>> lower = {Action.parse(text): 0.0 for text in ("0B0", "0B1")}
    >>> costs = ActionCosts({action: 1.0 for action in schedule.actions}, lower)
    >>> half = {Action.parse("0B0"): 0.5}
    >>> plan = Plan.of_ratios(schedule, costs, half, mode="by hand", max_ratio=0.5, objective_s=6.0)
    >>> plan.unfrozen_makespan_s, plan.makespan_s, Plan.from_json(plan.to_json()) == plan
    (6.0, 6.0, True)
    """

    schedule: Schedule
    costs: ActionCosts
    mode: str
    max_ratio: float
    ratios: dict[Action, float]
    cuts: list[int]
    start_s: dict[Action, float]
    makespan_s: float
    objective_s: float
    unfrozen_makespan_s: float
    frozen_makespan_s: float

    @classmethod
    def of_ratios(
        cls,
        schedule: Schedule,
        costs: ActionCosts,
        ratios: Mapping[Action, float],
        *,
        mode: str,
        max_ratio: float,
        objective_s: float,
    ) -> Plan:
        """Predict what the ratios take; actions that are left out are not frozen.

        Raises:
            ValueError: a ratio is not in [0, 1] or belongs to an action that cannot be frozen, or the costs are not
                this schedule's.
        """
        costs.check(schedule)
        grid = ratio_grid(schedule, costs, ratios)
        return plan_of_grid(
            CostModel(schedule, costs),
            schedule,
            costs,
            grid,
            mode=mode,
            max_ratio=max_ratio,
            objective_s=objective_s,
        )

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, to be read by people too; floats keep every bit."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "mode": self.mode,
            "max_ratio": self.max_ratio,
            **{name: getattr(self, name) for name in _TIMES},
            "schedule": {
                "name": self.schedule.name,
                "ranks": [" ".join(str(action) for action in order) for order in self.schedule.ranks],
            },
            "cuts": self.cuts,
            "ratios": {str(action): ratio for action, ratio in self.ratios.items()},
            "start_s": {str(action): start for action, start in self.start_s.items()},
            "costs": self.costs.to_json(),
        }

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """Read what ``to_json`` made.

        Raises:
            PlanError: it is something else, or its numbers contradict each other.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise PlanError(problem("not a plan", expected=f'an object with "format": "{_FORMAT}"'))
        if data.get("version") != _VERSION:
            raise PlanError(problem("a plan of another version", expected=_VERSION, got=repr(data.get("version"))))
        try:
            schedule = Schedule(
                [str(order).split() for order in data["schedule"]["ranks"]], name=data["schedule"]["name"]
            )
            costs = ActionCosts.from_json(data["costs"])
            ratios = {Action.parse(text): float(ratio) for text, ratio in data["ratios"].items()}
            starts = {Action.parse(text): float(start) for text, start in data["start_s"].items()}
            makespan, objective, unfrozen, frozen = (float(data[name]) for name in _TIMES)
            max_ratio, mode, cuts = float(data["max_ratio"]), str(data["mode"]), list(data["cuts"])
            again = cls.of_ratios(schedule, costs, ratios, mode=mode, max_ratio=max_ratio, objective_s=objective)
        except KeyError as error:
            raise PlanError(problem("the plan lacks a field", expected=str(error))) from error
        except (AttributeError, OverflowError, TypeError, ValueError, ScheduleError) as error:
            raise PlanError(f"damaged plan: {error}") from error
        plan = replace(
            again,
            ratios=ratios,
            cuts=cuts,
            start_s=starts,
            makespan_s=makespan,
            unfrozen_makespan_s=unfrozen,
            frozen_makespan_s=frozen,
        )
        _check_consistent(plan, again)
        return plan

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_atomically(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Read a file that ``save`` wrote.

        Raises:
            PlanError: it holds something else; names the file and what is wrong.
            OSError: it cannot be read.
        """
        data = read_json(path)
        try:
            return cls.from_json(data)
        except PlanError as error:
            raise PlanError(f"{fspath(path)}: {error}") from error


def plan_of_grid(
    model: CostModel,
    schedule: Schedule,
    costs: ActionCosts,
    grid: Floats,
    *,
    mode: str,
    max_ratio: float,
    objective_s: float,
) -> Plan:
    """The plan of a valid grid of ratios ``[num_stages, num_microbatches]``."""
    actions = graph_of(schedule).actions
    starts, ends = model.timeline(grid)
    freezable = model.is_freezable
    values = grid[model.nodes.stage[freezable], model.nodes.microbatch[freezable]]
    return Plan(
        schedule=schedule,
        costs=costs,
        mode=mode,
        max_ratio=max_ratio,
        ratios=dict(zip(compress(actions, freezable.tolist()), values.tolist(), strict=True)),
        cuts=model.cuts(grid).tolist(),
        start_s=dict(zip(actions, starts.tolist(), strict=True)),
        makespan_s=float(ends.max()),
        objective_s=objective_s,
        unfrozen_makespan_s=float(model.makespans(np.zeros_like(grid)[None])[0]),
        frozen_makespan_s=model.frozen_makespan(),
    )


def _check_consistent(plan: Plan, again: Plan) -> None:
    """Raise PlanError where what a plan says does not follow from its schedule, costs and ratios."""
    faults = []
    if not 0 <= plan.max_ratio <= 1:
        faults.append(problem("max_ratio", expected="a number in [0, 1]", got=plan.max_ratio))
    if plan.ratios.keys() != again.ratios.keys():
        lacking = [str(action) for action in again.ratios if action not in plan.ratios]
        faults.append(problem("ratios lack freezable actions", got=", ".join(lacking[:5])))
    for stage in range(plan.schedule.num_stages):
        values = [ratio for action, ratio in plan.ratios.items() if action.stage == stage]
        if values and sum(values) > plan.max_ratio * len(values) + 1e-6:
            mean = sum(values) / len(values)
            faults.append(problem("mean ratio", expected=f"at most {plan.max_ratio}", got=mean, where=f"stage {stage}"))
    if plan.cuts != again.cuts:
        faults.append(problem("cuts do not follow from the ratios", expected=again.cuts, got=plan.cuts))
    if plan.start_s.keys() != again.start_s.keys():
        faults.append(problem("start_s", expected="exactly the actions of the schedule"))
    else:
        late = [a for a, start in plan.start_s.items() if not _is_close(start, again.start_s[a])]
        if late:
            expected, got = again.start_s[late[0]], plan.start_s[late[0]]
            faults.append(
                problem("start_s does not follow from the ratios", expected=expected, got=got, where=str(late[0]))
            )
    for name in _TIMES:
        expected, got = getattr(again, name), getattr(plan, name)
        if not _is_close(got, expected):
            faults.append(problem(f"{name} does not follow from the ratios", expected=expected, got=got))
    if not plan.frozen_makespan_s * (1 - 1e-9) <= plan.objective_s <= plan.unfrozen_makespan_s * (1 + 1e-9):
        bounds = f"between {plan.frozen_makespan_s} and {plan.unfrozen_makespan_s}"
        faults.append(problem("objective_s", expected=bounds, got=plan.objective_s))
    raise_all(PlanError, faults)


def _is_close(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12)
