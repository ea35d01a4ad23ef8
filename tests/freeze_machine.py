"""A stand-in for a pipeline whose actions take what the cost model says, so that controllers can be run without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from timelyfreeze.cost import ActionCosts
from timelyfreeze.freeze import FreezeConfig, FreezeController, ParameterWork, StepMasks
from timelyfreeze.planner import Plan, PlanOptions, make_plan
from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule, simulate


def make_works(num_stages: int, num_parameters: int = 12, seed: int = 0) -> list[ParameterWork]:
    """Works that differ by a factor of ten or so; used from the first to the last."""
    rng = np.random.default_rng(seed)
    names = [f"p{i}" for i in range(num_parameters)]
    return [
        ParameterWork(names, rng.lognormal(0, 0.7, num_parameters), np.arange(num_parameters))
        for _ in range(num_stages)
    ]


def all_live(works: Sequence[ParameterWork]) -> list[np.ndarray]:
    return [np.ones(len(work.names), dtype=bool) for work in works]


class InstantPlanner:
    """Has its plan at once, or fails, or keeps the caller waiting; then gives what stands in ``better``, one a call."""

    def __init__(self, schedule: Schedule, max_ratio: float = 0.8) -> None:
        self.schedule, self.max_ratio = schedule, max_ratio
        self.costs: ActionCosts | None = None
        self.options: PlanOptions | None = None
        self.waiting = False
        self.error: Exception | None = None
        self.better: list[Plan | None] = []
        self.num_started = 0
        self.is_closed = False

    @property
    def is_busy(self) -> bool:
        return bool(self.better) or self.costs is not None

    def start(self, costs: ActionCosts, options: PlanOptions | None = None) -> None:
        self.costs, self.options = costs, options
        self.num_started += 1

    def take(self) -> Plan | None:
        if self.waiting:
            return None
        if self.costs is None:
            return self.better.pop(0) if self.better else None
        costs, self.costs = self.costs, None
        if self.error is not None:
            raise self.error
        return make_plan(self.schedule, costs, max_ratio=self.max_ratio, mode="lp")

    def cancel(self) -> None:
        self.costs = None
        self.better.clear()

    def close(self) -> None:
        self.is_closed = True


class Machine:
    """Runs steps of a controller. Forwards take 1 s; backwards 3 s, or 1.2 s with the stage's own weights frozen."""

    def __init__(
        self, controller: FreezeController, works: Sequence[ParameterWork], sizes: Sequence[float] = ()
    ) -> None:
        self.controller = controller
        self.works = works
        self.schedule = controller.schedule
        self.trainable = all_live(works)
        self.sizes = list(sizes) or [1.0] * self.schedule.num_microbatches
        self.slowdown = 1.0
        self.masks: list[StepMasks] = []
        self.phases: list[str] = []
        self.step_times_s: list[float] = []

    def durations_s(self, masks: StepMasks) -> dict[Action, float]:
        times = {}
        for stage, kind, microbatch in self.schedule.actions:
            size = self.sizes[microbatch] * self.slowdown
            if kind is Kind.F:
                times[Action(stage, kind, microbatch)] = size
                continue
            flags = self.trainable[stage]
            work = self.works[stage].work_s * flags
            live = masks.live[stage][microbatch]
            frozen = 1.0 - (work * live).sum() / max(work.sum(), 1e-9)
            if masks.needs_input_grad[stage, microbatch]:
                times[Action(stage, kind, microbatch)] = size * (1.2 + 1.8 * (1.0 - frozen) * flags.any())
            elif live.any():
                times[Action(stage, kind, microbatch)] = size * 3.0 * (1.0 - frozen)
        return times

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            masks = self.controller.begin_step(self.trainable)
            assert masks.phase == self.controller.phase
            times = self.durations_s(masks)
            self.masks.append(masks)
            self.phases.append(masks.phase)
            skipped = [action for action in self.schedule.actions if action not in times]
            complete = dict.fromkeys(skipped, 0.0) | times
            self.step_times_s.append(simulate(self.schedule, complete, 0.0, skipped).makespan_s)
            self.controller.end_step(times)

    def run_until(self, phase: str, most: int = 300) -> None:
        for _ in range(most):
            if self.controller.phase == phase:
                return
            self.run(1)
        raise AssertionError(f"no {phase} within {most} steps")


def events_of(controller: FreezeController, *names: str) -> list[dict[str, object]]:
    """The controller's events of these kinds, without the kinds' names."""
    found = controller.report()["events"]
    return [{k: v for k, v in event.items() if k != "event"} for event in found if event["event"] in names]


SCHEDULE = create_schedule("1f1b", num_ranks=2, num_microbatches=8)


def make_machine(
    schedule: Schedule = SCHEDULE, *, seed: int = 0, sizes: tuple[float, ...] = (), **config: object
) -> tuple[Machine, InstantPlanner]:
    settings = FreezeConfig(**{"max_ratio": 0.8} | config)  # type: ignore[arg-type]
    planner = InstantPlanner(schedule, settings.max_ratio)
    works = make_works(schedule.num_stages)
    controller = FreezeController(settings, schedule, seed, works, planner=planner)
    return Machine(controller, works, sizes), planner


def hand_made(schedule: Schedule, ratio: float | list[float], max_ratio: float = 0.8) -> Plan:
    ratios = ratio if isinstance(ratio, list) else [ratio] * schedule.num_microbatches
    backward = [a for a in schedule.actions if a.kind is Kind.B]
    costs = ActionCosts(
        {a: 1.0 if a.kind is Kind.F else 3.0 for a in schedule.actions}, {a: 1.2 if a.stage else 0.0 for a in backward}
    )
    planned = {a: ratios[a.microbatch] for a in backward}
    plan = Plan.of_ratios(schedule, costs, planned, mode="lp", max_ratio=max_ratio, objective_s=0.0)
    return replace(plan, objective_s=plan.unfrozen_makespan_s)


def runs(phases: list[str]) -> list[tuple[str, int]]:
    return [(phase, len(list(steps))) for phase, steps in groupby(phases)]
