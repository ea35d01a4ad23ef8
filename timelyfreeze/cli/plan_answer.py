"""What ``timelyfreeze plan`` finds: the plan, and the plain steps that it has to be compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, floor, isclose
from typing import Any

from timelyfreeze.cli.plan_case import PlanCase
from timelyfreeze.cli.plan_options import PlanRequest, option_errors
from timelyfreeze.planner import Plan, choose_microbatches, fewer_microbatches, make_plan, planned_durations
from timelyfreeze.schedule import Action, Timeline, simulate

_LEAST_LIVE = 1e-6  # what rounding leaves of no micro-batch at all


@dataclass(frozen=True)
class StepTime:
    """One way to run a step.

    Attributes:
        name: what it is called.
        num_microbatches: of the step.
        live: micro-batches whose gradients every parameter sees, at least; None where the step is only a bound.
        makespan_s: how long it takes.
        bubble_ratio: share of the ranks' time in which they do nothing; None where it is not known.
    """

    name: str
    num_microbatches: int
    live: float | None
    makespan_s: float
    bubble_ratio: float | None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.name,
            "num_microbatches": self.num_microbatches,
            "live_microbatches": self.live,
            "makespan_s": self.makespan_s,
            "bubble_ratio": self.bubble_ratio,
        }


@dataclass
class PlainSteps:
    """Steps without freezing, of one schedule with various numbers of micro-batches."""

    case: PlanCase
    _known: dict[int, Timeline | None] = field(default_factory=dict)

    def timeline(self, num_microbatches: int) -> Timeline | None:
        """The step with so many micro-batches; None where the schedule cannot have them."""
        if num_microbatches not in self._known:
            try:
                case = self.case.sibling(num_microbatches)
            except ValueError:
                self._known[num_microbatches] = None
            else:
                planned = planned_durations(case.schedule, case.costs, {})
                self._known[num_microbatches] = simulate(
                    case.schedule, planned.durations_s, case.costs.transfer_s, planned.skipped
                )
        return self._known[num_microbatches]

    def step(self, num_microbatches: int, name: str) -> StepTime | None:
        """The smallest step of at least so many micro-batches, at most the case's own number; None if there is none."""
        for number in range(num_microbatches, self.case.schedule.num_microbatches + 1):
            timeline = self.timeline(number)
            if timeline is not None:
                return StepTime(name, number, number, timeline.makespan_s, timeline.bubble_ratio)
        return None

    def time_s(self, live: float) -> float | None:
        """Time of a step in which every parameter sees ``live`` micro-batches, between whole ones on a straight line.

        A schedule that cannot have so few takes what its smallest step takes; no step has none.
        """
        if live < _LEAST_LIVE:
            return None
        numbers = range(1, self.case.schedule.num_microbatches + 1)
        below = next((n for n in reversed(numbers) if n <= floor(live + 1e-9) and self.timeline(n) is not None), None)
        above = next((n for n in numbers if n >= ceil(live - 1e-9) and self.timeline(n) is not None), below)
        if above is None:
            return None
        high = self._makespan_s(above)
        if below is None or below == above:
            return high
        low = self._makespan_s(below)
        return low + (high - low) * (live - below) / (above - below)

    def _makespan_s(self, num_microbatches: int) -> float:
        timeline = self.timeline(num_microbatches)
        assert timeline is not None
        return timeline.makespan_s


@dataclass(frozen=True)
class PlanAnswer:
    """A plan beside what it is compared with.

    Attributes:
        plan: of ``plan.schedule``, which has more micro-batches than ``plain`` where live ones were asked for.
        plain: the step without freezing.
        planned: the step of the plan.
        fewer: the plain step with so few micro-batches that each parameter sees as many gradients; None where there is
            no smaller step.
        frozen: every backward at its frozen time, input gradients all computed; a plan with cuts can be faster.
        equal_time_s: a plain step with as many live micro-batches as the plan's; None where that is not known.
    """

    plan: Plan
    plain: StepTime
    planned: StepTime
    fewer: StepTime | None
    frozen: StepTime
    equal_time_s: float | None

    @property
    def speed_at_equal_gradients(self) -> float | None:
        """How much faster the planned step is than a plain one in which parameters see as many gradients."""
        return None if self.equal_time_s is None else self.equal_time_s / self.planned.makespan_s

    @property
    def steps(self) -> list[StepTime]:
        """All of them, in the order in which they are shown."""
        return [step for step in (self.plain, self.fewer, self.planned, self.frozen) if step is not None]

    def to_json(self) -> dict[str, Any]:
        """As plain data; ``plan`` is in the form of a plan's own file."""
        return {
            "format": "timelyfreeze-plan-answer",
            "version": 1,
            "steps": [step.to_json() for step in self.steps],
            "bound_s": self.plan.objective_s,
            "speed_at_equal_gradients": self.speed_at_equal_gradients,
            "stages": [
                {"stage": stage, "mean_ratio": ratio, "live_microbatches": self.plan.schedule.num_microbatches - total}
                for stage, (ratio, total) in enumerate(stage_ratios(self.plan))
            ],
            "plan": self.plan.to_json(),
        }


def answer(case: PlanCase, request: PlanRequest) -> PlanAnswer:
    """Make the plan that was asked for, and what it is compared with.

    Raises:
        CommandError: what was asked for cannot be had; names the first bound that stands in the way.
    """
    with option_errors("planning"):
        plan = _plan(case, request)
    if plan.options.goal == "period":
        return _stream_answer(plan)
    steps = PlainSteps(case)
    own = case.schedule.num_microbatches
    plain = steps.step(own, "plain")
    assert plain is not None  # the schedule is there
    planned = planned_step(plan)
    assert planned.live is not None
    fewer = None
    if request.live_microbatches is None and case.is_named:
        # A plan that reaches its target, or its optimum, below the cap leaves more live than the cap does.
        number = max(fewer_microbatches(own, max(plan_caps(plan))), ceil(planned.live - 1e-6))
        fewer = steps.step(number, "fewer")
        fewer = fewer if fewer is not None and fewer.num_microbatches < own else None
    return PlanAnswer(plan, plain, planned, fewer, _frozen(plan), steps.time_s(planned.live) if case.is_named else None)


def _stream_answer(plan: Plan) -> PlanAnswer:
    """Without a flush: times from batch to batch, to which smaller batches are in proportion."""
    num = plan.schedule.num_microbatches
    live = num - max(total for _, total in stage_ratios(plan))

    def step(name: str, live: float | None, makespan_s: float, ratios: Mapping[Action, float] | None) -> StepTime:
        idle = None
        if ratios is not None:
            durations_s = planned_durations(plan.schedule, plan.costs, ratios).durations_s
            idle = 1.0 - sum(durations_s.values()) / (makespan_s * plan.schedule.num_ranks)
        return StepTime(name, num, live, makespan_s, idle)

    plain = step("plain", num, plan.unfrozen_makespan_s, {})
    planned = step("planned", live, plan.makespan_s, plan.ratios)
    frozen = step("all frozen", None, plan.frozen_makespan_s, None)
    return PlanAnswer(plan, plain, planned, None, frozen, plain.makespan_s * live / num if live > _LEAST_LIVE else None)


def _plan(case: PlanCase, request: PlanRequest) -> Plan:
    mode = request.mode or "cut"
    if request.live_microbatches is not None:
        return choose_microbatches(
            case.schedule.name,
            case.costs,
            live_microbatches=request.live_microbatches,
            num_ranks=case.schedule.num_ranks,
            max_microbatches=request.num_microbatches,
            mode=mode,
            min_live_ratio=request.min_live_ratio,
        )
    return make_plan(
        case.schedule,
        case.costs,
        request.max_ratios[0],
        mode,
        stage_max_ratio=request.stage_max_ratio or None,
        weights=request.weights or None,
        target_makespan_s=None if request.target_ms is None else request.target_ms / 1e3,
        min_live_ratio=request.min_live_ratio,
        goal=request.goal,
    )


def plan_caps(plan: Plan) -> list[float]:
    """The cap on every stage's mean ratio."""
    return plan.options.caps(plan.schedule.num_stages, plan.schedule.num_microbatches)


def stage_ratios(plan: Plan) -> list[tuple[float, float]]:
    """Mean and sum of every stage's ratios; 0 where nothing can be frozen."""
    by_stage: list[list[float]] = [[] for _ in range(plan.schedule.num_stages)]
    for action, ratio in plan.ratios.items():
        by_stage[action.stage].append(ratio)
    return [(sum(ratios) / len(ratios) if ratios else 0.0, sum(ratios)) for ratios in by_stage]


def planned_step(plan: Plan) -> StepTime:
    """The step of a plan, as it is predicted."""
    planned = planned_durations(plan.schedule, plan.costs, plan.ratios)
    timeline = simulate(plan.schedule, planned.durations_s, plan.costs.transfer_s, planned.skipped)
    live = plan.schedule.num_microbatches - max(total for _, total in stage_ratios(plan))
    return StepTime("planned", plan.schedule.num_microbatches, live, timeline.makespan_s, timeline.bubble_ratio)


def _frozen(plan: Plan) -> StepTime:
    """Every backward at its lower bound: nothing trains."""
    timeline = simulate(plan.schedule, plan.costs.lower_s, plan.costs.transfer_s)
    # Where the user froze the bottom stages the lowest that trains needs no input gradient either, as the plan knows.
    is_same = isclose(timeline.makespan_s, plan.frozen_makespan_s, rel_tol=1e-6)
    bubble_ratio = timeline.bubble_ratio if is_same else None
    return StepTime("all frozen", plan.schedule.num_microbatches, None, plan.frozen_makespan_s, bubble_ratio)
