"""Views that the tests of the drawings share."""

from __future__ import annotations

import math
from dataclasses import replace

from timelyfreeze.cost import ActionCosts
from timelyfreeze.planner import Plan, planned_durations
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule, simulate
from timelyfreeze.viz import StepPoint, Track, View, tracks_of_plan

# What would break out of every place where a text could land: HTML, an attribute, a script, JSON, TeX.
HOSTILE = '</script><img src=x onerror="window.hacked=1">\'\\ $x_1$ &amp; {{data}}'
LLAMA_S = (0.015, 0.043, 0.020)  # forward, backward, frozen backward of a stage


def cut_plan(num_ranks: int, num_microbatches: int, transfer_s: float = 0.0) -> Plan:
    """Every fourth micro-batch is cut at stage 1, every fourth in the middle; there, a quarter is frozen."""
    schedule = create_schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    forward_s, backward_s, frozen_s = LLAMA_S
    costs = ActionCosts.uniform(
        schedule, forward_s=forward_s, backward_s=backward_s, frozen_backward_s=frozen_s, transfer_s=transfer_s
    )
    ratios = {}
    for action in schedule.actions:
        cut = (0, 1, num_ranks // 2, 0)[action.microbatch % 4]
        if action.kind is Kind.B:
            ratios[action] = 1.0 if action.stage < cut else 0.25 if action.stage == cut > 0 else 0.0
    plan = Plan.of_ratios(schedule, costs, ratios, mode="lp", max_ratio=1.0, objective_s=0.0)
    return replace(plan, objective_s=plan.makespan_s)


def measured_track(plan: Plan, name: str = "measured") -> Track:
    """As if every action had taken 20 % longer than planned."""
    planned = planned_durations(plan.schedule, plan.costs, plan.ratios)
    durations_s = {action: 1.2 * time for action, time in planned.durations_s.items()}
    line = simulate(plan.schedule, durations_s, plan.costs.transfer_s, planned.skipped)
    return Track(name, plan.schedule, line.start_s, line.end_s, plan.ratios, planned.cuts, planned.skipped)


def training_steps(names: tuple[str, str] = ("plain", "timelyfreeze")) -> list[StepPoint]:
    phases = [("warmup", 20), ("measure_upper", 40), ("ramp", 80), ("steady", 10_000)]
    points = []
    for run in names:
        for step in range(1, 201):
            phase = next(name for name, last in phases if step <= last) if run == names[1] else "steady"
            loss = 5.5 * math.exp(-step / 60) + 1.5
            validation_loss = loss + 0.1 if step % 50 == 0 else None
            points.append(StepPoint(run, step, loss, phase, 0.6, validation_loss, 0.3 if run == names[1] else 0.0))
    points[7] = replace(points[7], loss=math.nan)  # a diverged step is a gap
    return points


def full_view(title: str = "A run") -> View:
    """Plain, planned and measured tracks with cuts, and two runs."""
    plan = cut_plan(4, 8, transfer_s=0.001)
    plain, planned = tracks_of_plan(plan)
    measured_s = {action: 1.2 * (planned.end_s[action] - planned.start_s[action]) for action in planned.start_s}
    tracks = [plain, replace(planned, measured_s=measured_s), measured_track(plan)]
    return View(title, [("Schedule", "1f1b"), ("Cap", "0.3")], tracks, training_steps())


def split_track() -> Track:
    """Two stages with split backwards; micro-batch 1 is cut at stage 1."""
    schedule = Schedule(
        [
            ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"],
            ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"],
        ]
    )
    skipped = frozenset(Action.parse(text) for text in ("0I1", "0W1"))
    line = simulate(schedule, dict.fromkeys(schedule.actions, 1.0), 0.0, skipped)
    ratios = {action: 0.5 for action in schedule.actions if action.kind is Kind.W}
    return Track("split", schedule, line.start_s, line.end_s, ratios, [0, 1], skipped)


def looped_track() -> Track:
    """Two stages on one rank, with split backwards above; every action takes a second."""
    schedule = Schedule([["0F0", "1F0", "1I0", "0B0", "1W0"]])
    line = simulate(schedule, dict.fromkeys(schedule.actions, 1.0))
    return Track("looped", schedule, line.start_s, line.end_s, {}, None, frozenset())
