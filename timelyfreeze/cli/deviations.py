"""Measured durations beside planned ones: by stage and kind of action, and the actions that are farthest off."""

from __future__ import annotations

from dataclasses import dataclass

from timelyfreeze.cli.measured import MeasuredRun
from timelyfreeze.planner import Plan, planned_durations
from timelyfreeze.schedule import Action, Kind

_NUM_LARGEST = 5


@dataclass(frozen=True)
class Deviation:
    """What something was planned to take, and took.

    Attributes:
        name: an action, or a stage and kind.
        num_actions: that it stands for; those that were skipped do not count.
        planned_s, measured_s: seconds of all of them.
    """

    name: str
    num_actions: int
    planned_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """Measured less planned."""
        return self.measured_s - self.planned_s


@dataclass(frozen=True)
class Deviations:
    """One measured step beside its plan.

    Attributes:
        step: the whole pipeline's.
        groups: by stage and kind.
        largest: the single actions that are farthest off, worst first.
    """

    step: Deviation
    groups: list[Deviation]
    largest: list[Deviation]


def measured_durations(run: MeasuredRun) -> dict[Action, float]:
    """Seconds of every action that ran."""
    return {a: end_s - run.start_s[a] for a, end_s in run.end_s.items() if a not in run.skipped}


def find_deviations(run: MeasuredRun, plan: Plan) -> Deviations | None:
    """Compare a step with the plan that it followed; None where it followed none, or one of another schedule."""
    if not run.ratios or run.schedule != plan.schedule:
        return None
    planned = planned_durations(plan.schedule, plan.costs, plan.ratios)
    measured = measured_durations(run)
    single = [
        Deviation(str(action), 1, planned.durations_s[action], measured[action])
        for action in plan.schedule.actions
        if action in measured and action not in planned.skipped
    ]
    groups: dict[tuple[int, Kind], list[Deviation]] = {}
    for one in single:
        action = Action.parse(one.name)
        groups.setdefault((action.stage, action.kind), []).append(one)
    sums = [
        Deviation(f"{stage}{kind}", len(ones), sum(one.planned_s for one in ones), sum(one.measured_s for one in ones))
        for (stage, kind), ones in sorted(groups.items(), key=lambda item: (item[0][0], list(Kind).index(item[0][1])))
    ]
    whole = Deviation("step", len(single), plan.makespan_s, max(run.end_s.values()))
    return Deviations(whole, sums, sorted(single, key=lambda one: -abs(one.difference_s))[:_NUM_LARGEST])
