"""A plan: what to freeze where, and what that is predicted to take."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import compress
from os import PathLike
from typing import Any

import numpy as np

from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import PlanError, ScheduleError, problem, raise_all
from timelyfreeze.files import load_json, write_atomically
from timelyfreeze.planner.model import CostModel, Floats
from timelyfreeze.planner.options import PlanOptions
from timelyfreeze.planner.stream import cost_model
from timelyfreeze.planner.true_cost import ratio_grid
from timelyfreeze.schedule import Action, Schedule
from timelyfreeze.schedule.graph import graph_of

_FORMAT = "timelyfreeze-plan"
_VERSION = 2
_SAME = 1e-7  # makespans this close, relatively, are equal: the solver's own tolerance
_TIMES = ("makespan_s", "objective_s", "unfrozen_makespan_s", "frozen_makespan_s")


@dataclass(frozen=True)
class Plan:
    """Freeze ratios of a schedule with their predicted times. Times are seconds.

    Attributes:
        schedule, costs: what it was made for.
        options: how it was made, with the caps that it obeys.
        ratios: of every freezable action (kind B or W, lower < upper bound), in [0, 1].
        cuts: for every micro-batch, the lowest stage that still trains something (``num_stages`` if none does).
        start_s: predicted start of every action.
        makespan_s: predicted step time: the simulation under the true cost model, which knows the cuts. With the goal
            ``"period"`` this and the times below are from batch to batch in a pipeline without a flush, and ``start_s``
            counts on each rank from its own first action.
        objective_s: mode ``"lp"``: the optimum of the linear program, which knows none. Mode ``"cut"``: a proven lower
            bound of the makespan of every plan within the same caps.
        unfrozen_makespan_s: with nothing frozen.
        frozen_makespan_s: with every freezable action at its lower bound (0 in the lowest stage that trains).

    >>> from timelyfreeze.schedule import create_schedule
    >>> schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    >>> lower = {Action.parse(text): 0.0 for text in ("0B0", "0B1")}
    >>> costs = ActionCosts({action: 1.0 for action in schedule.actions}, lower)
    >>> half = {Action.parse("0B0"): 0.5}
    >>> plan = Plan.of_ratios(schedule, costs, half, max_ratio=0.5, objective_s=6.0)
    >>> plan.unfrozen_makespan_s, plan.makespan_s, Plan.from_json(plan.to_json()) == plan
    (6.0, 6.0, True)
    """

    schedule: Schedule
    costs: ActionCosts
    options: PlanOptions
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
        objective_s: float,
        **options: Any,
    ) -> Plan:
        """Predict what the ratios take; actions that are left out are not frozen.

        Args:
            options: fields of ``PlanOptions``.

        Raises:
            ValueError: a ratio is not in [0, 1] or belongs to an action that cannot be frozen, or the costs are not
                this schedule's.
        """
        costs.check(schedule)
        grid = ratio_grid(schedule, costs, ratios)
        chosen = PlanOptions(**options)
        model = cost_model(schedule, costs, chosen.goal)
        return plan_of_grid(model, schedule, costs, grid, options=chosen, objective_s=objective_s)

    @property
    def mode(self) -> str:
        """How it was made: ``"cut"`` or ``"lp"``."""
        return self.options.mode

    @property
    def period_s(self) -> float:
        """Mean seconds a micro-batch."""
        return self.makespan_s / self.schedule.num_microbatches

    @property
    def max_ratio(self) -> float:
        """The largest cap on a stage's mean ratio."""
        return max(self.options.caps(self.schedule.num_stages, self.schedule.num_microbatches))

    @property
    def stage_max_ratio(self) -> dict[int, float]:
        """Caps of single stages."""
        return dict(self.options.stage_max_ratio or {})

    @property
    def live_microbatches(self) -> int | None:
        """How many micro-batches' gradients every parameter sees in a step, if that was asked for."""
        return self.options.live_microbatches

    @property
    def gap_ratio(self) -> float | None:
        """By how much another plan could be faster at most: makespan_s / objective_s - 1; None without a bound."""
        return self.makespan_s / self.objective_s - 1.0 if self.objective_s > 0 else None

    @property
    def freezing(self) -> float:
        """The price of its ratios: their sum, each weighed by its stage's price."""
        prices = self.options.weights or {}
        return sum(prices.get(action.stage, 1.0) * ratio for action, ratio in self.ratios.items())

    def beats(self, other: Plan) -> bool:
        """Whether it is faster, down to its target; or as fast and freezes less."""
        target_s = self.options.target_makespan_s or 0.0
        mine, theirs = max(self.makespan_s, target_s), max(other.makespan_s, target_s)
        if abs(mine - theirs) > _SAME * theirs:
            return mine < theirs
        return self.freezing < other.freezing - 1e-6

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, to be read by people too; floats keep every bit."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "options": self.options.to_json(),
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
            options, cuts = PlanOptions.from_json(data["options"]), list(data["cuts"])
            again = cls.of_ratios(schedule, costs, ratios, objective_s=objective, **vars(options))
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
        return load_json(path, cls.from_json)


def plan_of_grid(
    model: CostModel,
    schedule: Schedule,
    costs: ActionCosts,
    grid: Floats,
    *,
    options: PlanOptions,
    objective_s: float,
) -> Plan:
    """The plan of a valid grid of ratios ``[num_stages, num_microbatches]``."""
    actions = graph_of(schedule).actions
    starts, _ = model.timeline(grid)
    freezable = model.is_freezable
    values = grid[model.nodes.stage[freezable], model.nodes.microbatch[freezable]]
    return Plan(
        schedule=schedule,
        costs=costs,
        options=options,
        ratios=dict(zip(compress(actions, freezable.tolist()), values.tolist(), strict=True)),
        cuts=model.cuts(grid).tolist(),
        start_s=dict(zip(actions, starts.tolist(), strict=True)),
        makespan_s=float(model.makespans(grid[None])[0]),
        objective_s=objective_s,
        unfrozen_makespan_s=float(model.makespans(np.zeros_like(grid)[None])[0]),
        frozen_makespan_s=model.frozen_makespan(),
    )


def _check_consistent(plan: Plan, again: Plan) -> None:
    """Raise PlanError where what a plan says does not follow from its schedule, costs and ratios."""
    faults = []
    if plan.ratios.keys() != again.ratios.keys():
        lacking = [str(action) for action in again.ratios if action not in plan.ratios]
        faults.append(problem("ratios lack freezable actions", got=", ".join(lacking[:5])))
    for stage, cap in enumerate(plan.options.caps(plan.schedule.num_stages, plan.schedule.num_microbatches)):
        values = [ratio for action, ratio in plan.ratios.items() if action.stage == stage]
        if values and sum(values) > cap * len(values) + 1e-6:
            mean = sum(values) / len(values)
            faults.append(problem("mean ratio", expected=f"at most {cap}", got=mean, where=f"stage {stage}"))
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
    least, most = plan.frozen_makespan_s, plan.unfrozen_makespan_s
    if plan.mode == "cut" or plan.options.goal == "period":
        least, most = 0.0, plan.makespan_s
    if not least * (1 - 1e-9) <= plan.objective_s <= most * (1 + 1e-9):
        faults.append(problem("objective_s", expected=f"between {least} and {most}", got=plan.objective_s))
    raise_all(PlanError, faults)


def _is_close(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12)
