"""What is to be shown: timelines, facts and training steps. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from timelyfreeze.errors import problem, raise_all
from timelyfreeze.planner import Plan, planned_durations
from timelyfreeze.schedule import Action, Kind, Schedule, simulate
from timelyfreeze.schedule.checks import Transfers, check_transfers, is_time, some


@dataclass(frozen=True)
class Track:
    """One timeline of a schedule: a plain step, a planned or a measured one.

    Attributes:
        name: what to call it, such as ``"plain"``.
        schedule: the order on every rank.
        start_s, end_s: of every action, seconds from the step's beginning; skipped actions may be left out.
        ratios: freeze ratios in [0, 1] of the actions that have one (kind B or W).
        cuts: for every micro-batch, the lowest stage that still trains something; None where it is not known.
        skipped: backward actions that did not run.
        measured_s: measured durations, to be shown beside those of this track.
        transfer_s: seconds from one rank to another, as ``simulate`` takes them; ``critical_path`` reads them.

    Raises:
        ValueError: times are missing, negative, not finite or end before they start, ratios are not in [0, 1], or
            something belongs to no action of the schedule. Every fault is in the message.

    >>> schedule = Schedule([["0F0", "0B0"]])
    >>> start_s = {Action.parse("0F0"): 0.0, Action.parse("0B0"): 1.0}
    >>> end_s = {Action.parse("0F0"): 1.0, Action.parse("0B0"): 3.0}
    >>> Track("plain", schedule, start_s, end_s, {}, None, frozenset()).makespan_s
    3.0
    """

    name: str
    schedule: Schedule
    start_s: Mapping[Action, float]
    end_s: Mapping[Action, float]
    ratios: Mapping[Action, float]
    cuts: Sequence[int] | None
    skipped: frozenset[Action]
    measured_s: Mapping[Action, float] | None = None
    transfer_s: Transfers = 0.0

    def __post_init__(self) -> None:
        raise_all(ValueError, _faults(self))
        check_transfers(self.transfer_s, self.schedule.num_stages)

    @property
    def makespan_s(self) -> float:
        """End of the last action."""
        return max(self.end_s.values())

    @property
    def bubble_ratio(self) -> float:
        """The share of the ranks' time in which they do nothing, in [0, 1]."""
        busy_s = sum(end - self.start_s[action] for action, end in self.end_s.items() if action not in self.skipped)
        total_s = self.makespan_s * self.schedule.num_ranks
        return min(max(1.0 - busy_s / total_s, 0.0), 1.0) if total_s > 0 else 0.0

    def stage_ratios(self) -> list[float | None]:
        """Mean freeze ratio of every stage; None where none of its actions has one."""
        by_stage: list[list[float]] = [[] for _ in range(self.schedule.num_stages)]
        for action, ratio in self.ratios.items():
            by_stage[action.stage].append(ratio)
        return [sum(ratios) / len(ratios) if ratios else None for ratios in by_stage]


@dataclass(frozen=True)
class StepPoint:
    """One training step of one run.

    Attributes:
        run: the run's name; points of a run belong together.
        step: its number.
        loss, validation_loss: as training reports them.
        phase: the pipeline's phase in this step, such as ``"steady"``; may be empty.
        step_time_s: seconds of the whole step.
        freeze_ratio: mean share of the weight-gradient work that was left out, in [0, 1].

    >>> StepPoint("plain", 1, 2.5, "steady", 0.64, None, 0.0).loss
    2.5
    """

    run: str
    step: int
    loss: float | None
    phase: str
    step_time_s: float | None
    validation_loss: float | None
    freeze_ratio: float | None


@dataclass(frozen=True)
class View:
    """All that one page shows.

    Attributes:
        title: its heading.
        facts: (name, value) pairs, shown in this order.
        tracks: timelines, drawn above each other on one time axis.
        steps: training steps of any number of runs.

    >>> View("A plan", [("cap", "0.3")], []).steps
    []
    """

    title: str
    facts: list[tuple[str, str]]
    tracks: list[Track]
    steps: list[StepPoint] = field(default_factory=list)


def tracks_of_plan(plan: Plan) -> list[Track]:
    """The step without freezing and the step as planned, both simulated under the true cost model.

    With the goal "period" they are one batch of a stream on its way; the others' actions are left out.

    >>> from timelyfreeze.cost import ActionCosts
    >>> from timelyfreeze.planner import make_plan
    >>> from timelyfreeze.schedule import create_schedule
    >>> schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=2)
    >>> costs = ActionCosts.uniform(schedule, forward_s=1.0, backward_s=2.0, frozen_backward_s=1.0)
    >>> [(track.name, track.makespan_s) for track in tracks_of_plan(make_plan(schedule, costs, 0.0))]
    [('plain', 9.0), ('planned', 9.0)]
    """
    tracks = []
    for name, ratios in (("plain", {}), ("planned", plan.ratios)):
        planned = planned_durations(plan.schedule, plan.costs, ratios)
        if plan.options.goal == "period":
            one = Plan.of_ratios(plan.schedule, plan.costs, ratios, objective_s=0.0, goal="period", max_ratio=1.0)
            start_s, name = one.start_s, f"{name}, one batch"
            end_s = {action: start + planned.durations_s[action] for action, start in start_s.items()}
        else:
            line = simulate(plan.schedule, planned.durations_s, plan.costs.transfer_s, planned.skipped)
            start_s, end_s = line.start_s, line.end_s
        cuts = planned.cuts if ratios else None
        tracks.append(
            Track(
                name,
                plan.schedule,
                start_s,
                end_s,
                ratios,
                cuts,
                planned.skipped,
                transfer_s=plan.costs.transfer_s,
            )
        )
    return tracks


def _faults(track: Track) -> list[str]:
    actions = track.schedule.actions
    known = set(actions)
    faults = []

    def refuse(what: str, expected: str, got: list[str]) -> None:
        if got:
            faults.append(problem(what, expected=expected, got=some(got), where=f"track {track.name!r}"))

    fields: dict[str, Mapping[Action, float]] = {"start_s": track.start_s, "end_s": track.end_s}
    for name, times in (fields | {"measured_s": track.measured_s or {}}).items():
        refuse(name, "finite seconds, at least 0", [f"{a}: {t!r}" for a, t in times.items() if not is_time(t)])
        refuse(name, "actions of the schedule", [str(action) for action in times if action not in known])
    for name, times in fields.items():
        missing = [str(action) for action in actions if action not in times and action not in track.skipped]
        refuse(name, "every action that is not skipped", [f"none of {text}" for text in missing])
    refuse("start_s and end_s", "the same actions", [str(a) for a in track.start_s.keys() ^ track.end_s.keys()])
    backwards = [] if faults else [str(a) for a, end in track.end_s.items() if end < track.start_s[a]]
    refuse("end_s", "no action to end before it starts", backwards)
    odd = [f"{a}: {r!r}" for a, r in track.ratios.items() if a not in known or not is_time(r) or r > 1]
    refuse("ratios", "numbers in [0, 1] of actions of the schedule", odd)
    refuse("skipped", "backward actions of the schedule", [str(a) for a in track.skipped - known])
    refuse("skipped", "backward actions of the schedule", [str(a) for a in track.skipped & known if a.kind is Kind.F])
    num_microbatches, num_stages = track.schedule.num_microbatches, track.schedule.num_stages
    if track.cuts is not None and (
        len(track.cuts) != num_microbatches or not all(0 <= cut <= num_stages for cut in track.cuts)
    ):
        refuse("cuts", f"{num_microbatches} stages, each in 0..{num_stages}", [repr(list(track.cuts))])
    return faults
