"""The saved form of a run's freezing: plain data, checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import PlanError, problem, raise_all
from timelyfreeze.freeze.config import FreezeConfig, check_fits
from timelyfreeze.freeze.parameters import ParameterWork
from timelyfreeze.freeze.phases import PhaseMachine, plan_id
from timelyfreeze.freeze.samples import BoundSamples, RecentSteps
from timelyfreeze.planner import Plan, PlanOptions
from timelyfreeze.schedule import Schedule

_FORMAT = "timelyfreeze-freezing"
_VERSION = 2


@dataclass(frozen=True)
class LoadedState:
    """A saved state, read and checked. Fields as in ``pack_state``."""

    step: int
    seed: int
    machine: PhaseMachine
    samples: BoundSamples
    recent: Mapping[str, Any]
    work: list[ParameterWork] | None
    signatures: tuple[str | None, str | None]
    freeze_ratio_sum: float
    costs: ActionCosts | None
    options: PlanOptions | None
    pending: Plan | None
    improving: bool


def pack_state(
    schedule: Schedule,
    *,
    step: int,
    seed: int,
    machine: PhaseMachine,
    samples: BoundSamples,
    recent: RecentSteps,
    work: list[ParameterWork] | None,
    signatures: tuple[str | None, str | None],
    freeze_ratio_sum: float,
    costs: ActionCosts | None,
    options: PlanOptions | None,
    pending: Plan | None,
    improving: bool,
) -> dict[str, Any]:
    """Put together what the next steps depend on.

    Args:
        signatures: of the trainable parameters, now and when bounds were last measured.
        costs, options, pending: what is being solved for, and the plan for it if it is there already.
        improving: whether a plan, or a better one, is being looked for.
    """
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "schedule": [[str(action) for action in order] for order in schedule.ranks],
        "step": step,
        "seed": seed,
        "machine": machine.to_json(),
        "samples": samples.to_json(),
        "recent": recent.to_json(),
        "work": None if work is None else [stage.to_json() for stage in work],
        "signatures": list(signatures),
        "freeze_ratio_sum": freeze_ratio_sum,
        "costs": None if costs is None else costs.to_json(),
        "options": None if options is None else options.to_json(),
        "pending": None if pending is None else pending.to_json(),
        "improving": improving,
    }


def unpack_state(state: Mapping[str, Any], schedule: Schedule, config: FreezeConfig) -> LoadedState:
    """Read what ``pack_state`` made; PlanError if it is something else, or does not fit schedule and config."""
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        raise PlanError(problem("not a saved freezing state", expected=f'a dictionary with "format": "{_FORMAT}"'))
    if state.get("version") != _VERSION:
        raise PlanError(problem("freezing state of another version", expected=_VERSION, got=repr(state.get("version"))))
    try:
        _check_schedule(state["schedule"], schedule)
        work = state["work"]
        loaded = LoadedState(
            step=int(state["step"]),
            seed=int(state["seed"]),
            machine=PhaseMachine.from_json(config, state["machine"]),
            samples=BoundSamples.from_json(state["samples"]),
            recent=state["recent"],
            work=None if work is None else [ParameterWork.from_json(stage) for stage in work],
            signatures=(state["signatures"][0], state["signatures"][1]),
            freeze_ratio_sum=float(state["freeze_ratio_sum"]),
            costs=None if state["costs"] is None else ActionCosts.from_json(state["costs"]),
            options=None if state["options"] is None else PlanOptions.from_json(state["options"]),
            pending=None if state["pending"] is None else Plan.from_json(state["pending"]),
            improving=bool(state["improving"]),
        )
        RecentSteps(schedule, config.replan_window_steps).load_json(loaded.recent)
    except KeyError as error:
        raise PlanError(problem("the freezing state lacks a field", expected=str(error))) from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise PlanError(f"damaged freezing state: {error}") from error
    _check_plan(loaded, schedule, config)
    return loaded


def _check_schedule(saved: Any, schedule: Schedule) -> None:
    now = [[str(action) for action in order] for order in schedule.ranks]
    if saved != now:
        differs = next((rank for rank, pair in enumerate(zip(saved, now, strict=False)) if pair[0] != pair[1]), None)
        where = f"{len(saved)} ranks against {len(now)}" if differs is None else f"rank {differs}"
        raise PlanError(
            problem(
                "the freezing state is of another schedule",
                expected=f"the pipeline's ({schedule.name})",
                where=where,
                hint="Create the pipeline with the schedule, stages and micro-batches that it was saved with.",
            )
        )


def _check_plan(loaded: LoadedState, schedule: Schedule, config: FreezeConfig) -> None:
    faults = []
    if config.fixed_plan is not None and plan_id(loaded.machine.plan) != plan_id(config.fixed_plan):
        faults.append(
            problem(
                "the freezing state has another plan",
                expected=f"the config's ({plan_id(config.fixed_plan)})",
                got=plan_id(loaded.machine.plan),
                hint="Pass the plan that it was saved with, or leave plan= out to go on with the saved one.",
            )
        )
    if loaded.work is not None and len(loaded.work) != schedule.num_stages:
        faults.append(problem("damaged freezing state: works", expected=schedule.num_stages, got=len(loaded.work)))
    raise_all(PlanError, faults)
    for plan in (loaded.machine.plan, loaded.machine.previous, loaded.pending):
        if plan is not None:
            check_fits(plan, schedule)
