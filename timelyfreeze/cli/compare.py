"""Schedules, modes and caps side by side, at equal live gradients a parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.plan_answer import PlainSteps, PlanAnswer, StepTime, answer
from timelyfreeze.cli.plan_case import PlanCase
from timelyfreeze.cli.plan_options import PlanRequest
from timelyfreeze.planner import MODES
from timelyfreeze.schedule import default_stages_per_rank, schedule_names

PLAIN = "plain"


@dataclass(frozen=True)
class Row:
    """One way to run a step.

    Attributes:
        schedule, stages_per_rank: in which order, with how many stages a rank.
        mode: ``"plain"``, or how the plan was made.
        cap: of the row's group; 0 where all micro-batches are live, None where live ones were asked for.
        step: what it takes and gives.
        plain_s: the plain step of the same schedule with as many micro-batches.
        equal_time_s: the plain step of the schedule that was asked for with as many live micro-batches a parameter.
        gain: speed against plain steps of its own schedule at equal gradients; 1 where it is plain itself.
    """

    schedule: str
    stages_per_rank: int
    mode: str
    cap: float | None
    step: StepTime
    plain_s: float
    equal_time_s: float | None
    gain: float

    @property
    def live(self) -> float:
        """Micro-batches whose gradients every parameter sees."""
        return float(self.step.live or 0.0)

    @property
    def time_per_live_s(self) -> float | None:
        """Step time over live micro-batches; None where some parameter sees none."""
        return self.step.makespan_s / self.live if self.live > 0 else None

    @property
    def speed(self) -> float:
        """Against the plain step of its own schedule with as many micro-batches."""
        return self.plain_s / self.step.makespan_s

    @property
    def speed_at_equal_gradients(self) -> float:
        """Against the plain step of the schedule asked for in which parameters see as many gradients; 0 if none is."""
        return 0.0 if self.equal_time_s is None else self.equal_time_s / self.step.makespan_s

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "schedule": self.schedule,
            "stages_per_rank": self.stages_per_rank,
            "mode": self.mode,
            "max_ratio": self.cap,
            "num_microbatches": self.step.num_microbatches,
            "live_microbatches": self.live,
            "makespan_s": self.step.makespan_s,
            "time_per_live_microbatch_s": self.time_per_live_s,
            "speed_against_plain": self.speed,
            "speed_at_equal_gradients": self.speed_at_equal_gradients,
            "gain_over_own_plain": self.gain,
            "bubble_ratio": self.step.bubble_ratio,
        }


@dataclass(frozen=True)
class Comparison:
    """All rows, grouped by cap, and the schedules that could not be tried with the reason.

    Attributes:
        reference: the schedule whose plain steps the others are measured against.
        num_ranks: of all of them.
    """

    reference: str
    num_ranks: int
    rows: list[Row]
    refused: dict[str, str]

    def groups(self) -> dict[float | None, list[Row]]:
        """Rows by cap."""
        groups: dict[float | None, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.cap, []).append(row)
        return groups

    def best(self, cap: float | None) -> Row:
        """The fastest row of a group at equal gradients; of equal ones the first, so a plain one."""
        return max(self.groups()[cap], key=lambda row: round(row.speed_at_equal_gradients, 6))

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "format": "timelyfreeze-plan-comparison",
            "version": 1,
            "reference": self.reference,
            "num_ranks": self.num_ranks,
            "rows": [row.to_json() for row in self.rows],
            "best": [self.best(cap).to_json() for cap in self.groups()],
            "refused": self.refused,
        }


def compare(case: PlanCase, request: PlanRequest, on_progress: Callable[[str], None] = lambda text: None) -> Comparison:
    """Plan every schedule that can have these ranks, in every mode, under every cap.

    Args:
        on_progress: told what is planned next.

    Raises:
        CommandError: no schedule can be planned like this.
    """
    rows: list[Row] = []
    refused: dict[str, str] = {}
    reference = PlainSteps(case)
    for name in sorted(schedule_names(), key=lambda name: name != case.schedule.name):
        try:
            own = _case_of(case, name)
            rows += _rows_of(own, request, reference, on_progress)
        except (ValueError, CommandError) as error:
            refused[name] = str(error)
    if not rows:
        raise CommandError(next(iter(refused.values())))
    order = list(dict.fromkeys(row.cap for row in rows))
    rows.sort(key=lambda row: (order.index(row.cap), row.mode != PLAIN))
    return Comparison(case.schedule.name, case.schedule.num_ranks, rows, refused)


def _case_of(case: PlanCase, name: str) -> PlanCase:
    """The same model and ranks in another schedule, with as many stages a rank as it needs."""
    refusal: ValueError | None = None
    for stages_per_rank in dict.fromkeys((case.stages_per_rank, default_stages_per_rank(name))):
        try:
            return case.sibling(case.schedule.num_microbatches, name=name, stages_per_rank=stages_per_rank)
        except ValueError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _rows_of(
    case: PlanCase, request: PlanRequest, reference: PlainSteps, on_progress: Callable[[str], None]
) -> list[Row]:
    """A schedule's plain step, and for every cap the smaller batch and the plans."""
    rows: list[Row] = []
    modes = MODES if request.mode is None else (request.mode,)
    caps = request.max_ratios if request.live_microbatches is None else (None,)
    for cap in caps:
        answers = []
        for mode in reversed(modes):
            on_progress(f"{case.schedule.name}, {mode}" + ("" if cap is None else f", cap {cap:g}"))
            one = replace(request, mode=mode, max_ratios=(cap,) if cap is not None else request.max_ratios)
            answers.append(answer(case, one))
        first = answers[0]
        if cap is None or not rows:
            rows.append(_row(case, PLAIN, None if cap is None else 0.0, first.plain, first, reference))
        if first.fewer is not None:
            rows.append(_row(case, PLAIN, cap, first.fewer, first, reference))
        rows += [_row(case, one.plan.mode, cap, one.planned, one, reference) for one in answers]
    return rows


def _row(
    case: PlanCase, mode: str, cap: float | None, step: StepTime, answer: PlanAnswer, reference: PlainSteps
) -> Row:
    plain_s = step.makespan_s if mode == PLAIN else answer.plan.unfrozen_makespan_s
    gain = 1.0 if mode == PLAIN else answer.speed_at_equal_gradients or 1.0
    assert step.live is not None
    equal_time_s = reference.time_s(step.live)
    return Row(case.schedule.name, case.stages_per_rank, mode, cap, step, plain_s, equal_time_s, gain)
