"""What a run has planned and measured, as plain data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.cost import Measured
from timelyfreeze.freeze.phases import PhaseMachine, plan_id
from timelyfreeze.freeze.samples import BoundSamples, RecentSteps
from timelyfreeze.planner import Plan, planned_durations
from timelyfreeze.schedule import Action


def build_report(
    machine: PhaseMachine, samples: BoundSamples, recent: RecentSteps, *, step: int, mean_freeze_ratio: float
) -> dict[str, Any]:
    """Everything a person wants to know about freezing, as JSON values; times are seconds.

    ``actions`` tells for every action the bounds measured (``upper``, ``lower``), its planned ratio and duration, and
    what it took in the last steady steps (``steady``); what is not known is left out.
    """
    plan = machine.plan
    measured = samples.medians()
    actions: dict[str, dict[str, Any]] = {}
    if plan is not None:
        for action, time_s in planned_durations_s(plan).items():
            actions[str(action)] = {"planned_s": time_s, "ratio": plan.ratios.get(action, 0.0)}
    for name, medians in (*measured.items(), ("steady", recent.medians())):
        for action, found in medians.items():
            actions.setdefault(str(action), {})[name] = _plain(found)
    return {
        "phase": machine.phase,
        "step": step,
        "plan": None if plan is None else _plan_summary(plan),
        "announced_switch_step": machine.switch_step,
        "failure": machine.failure,
        "mean_freeze_ratio": mean_freeze_ratio,
        "actions": actions,
        "events": [dict(event) for event in machine.events],
    }


def planned_durations_s(plan: Plan) -> dict[Action, float]:
    """How long the plan expects every action to take; 0 where it is skipped."""
    return dict(planned_durations(plan.schedule, plan.costs, plan.ratios).durations_s)


def planned_stage_times_s(plan: Plan) -> NDArray[np.float64]:
    """How long the plan expects each stage's actions to take together, ``[num_stages]``."""
    times = np.zeros(plan.schedule.num_stages)
    for action, time_s in planned_durations_s(plan).items():
        times[action.stage] += time_s
    return times


def _plan_summary(plan: Plan) -> dict[str, Any]:
    return {
        "id": plan_id(plan),
        "mode": plan.mode,
        "max_ratio": plan.max_ratio,
        "live_microbatches": plan.live_microbatches,
        "makespan_s": plan.makespan_s,
        "objective_s": plan.objective_s,
        "gap_ratio": plan.gap_ratio,
        "unfrozen_makespan_s": plan.unfrozen_makespan_s,
        "frozen_makespan_s": plan.frozen_makespan_s,
        "cuts": list(plan.cuts),
    }


def _plain(measured: Measured) -> dict[str, float | int]:
    return {
        "median_s": measured.median_s,
        "spread_s": measured.spread_s,
        "num_samples": measured.num_samples,
    }
