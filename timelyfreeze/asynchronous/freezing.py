"""Freezing in a pipeline without a flush: which masks a batch gets, and what its actions took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from timelyfreeze.acceleration.switch import AccelerationSwitch
from timelyfreeze.errors import problem, raise_all
from timelyfreeze.freeze import FreezeConfig, StepMasks
from timelyfreeze.freeze.groups import check_patterns
from timelyfreeze.freeze.parameters import Bools
from timelyfreeze.freeze.phases import RAMP, STEADY
from timelyfreeze.freeze.reporting import planned_stage_times_s
from timelyfreeze.freeze.session import FreezeSession, as_tensors
from timelyfreeze.planner import Plan
from timelyfreeze.runtime.engine import Engine
from timelyfreeze.schedule import Action, Kind, Schedule

Times = Iterable[tuple[int, str, int, float, float]]  # stage, kind, micro-batch, start, end
Masks = tuple[list[torch.Tensor], list[torch.Tensor]]


@dataclass
class _Batch:
    """A batch of which some action may still run.

    Attributes:
        first: its first micro-batch, counted from the first of all.
        num_microbatches: of it.
        durations_s: of its actions that have ended.
        end_s: of the last of them, in the first stage.
    """

    first: int
    num_microbatches: int
    masks: StepMasks
    durations_s: dict[Action, float] = field(default_factory=dict)
    end_s: float = 0.0


class StreamFreezing:
    """The freezing of one ``AsyncPipeline``: a batch is to it what a step is to a pipeline that flushes.

    Batches overlap: a batch's masks are drawn when it is handed over, and its durations come in when its last backward
    has run. Plans are for the goal "period".

    Args:
        config: the user's choices.
        schedule: 1F1B over the stages, whose actions a batch has.
        seed: masks draw from (seed, batch, stage, micro-batch).
        names: of the model's parameters.
        accumulation: an update's time is shared out over so many forwards.

    Raises:
        ValueError: the config rescales gradients, or averages them over live micro-batches; or does not fit the stages.
        PlanError: its plan does not fit them.
    """

    def __init__(
        self, config: FreezeConfig, schedule: Schedule, seed: int, names: Sequence[str], accumulation: int
    ) -> None:
        _refuse(config)
        check_patterns(config.options, names)
        self._session = FreezeSession(replace(config, goal="period"), schedule, seed, overlapping=True)
        self.controller = self._session.controller
        self._schedule = schedule
        self._accumulation = accumulation
        self._trainable: list[Bools | None] = []
        self._renew = False
        self._batches: deque[_Batch] = deque()
        self._update_s = [0.0] * schedule.num_stages
        window = config.replan_window_steps
        self._periods_s: deque[float] = deque(maxlen=window)
        self._ratios: deque[np.ndarray[Any, np.dtype[np.float64]]] = deque(maxlen=window)
        self._last_end_s: float | None = None

    @property
    def plan(self) -> Plan | None:
        """In force, or being ramped up to."""
        return self.controller.plan

    def open(self, engine: Engine) -> None:
        """A stream begins: no mask is in force, so that the user's flags can be read."""
        self._renew = self._session.attach(engine.stages)
        self._trainable = engine.trainable()
        self._last_end_s = None

    def begin_batch(self, first: int, num_microbatches: int) -> StepMasks:
        """The masks of the next batch.

        Args:
            first: the number of its first micro-batch, counted from the first of all.
        """
        before = self.plan
        masks = self._session.begin_step(self._trainable, num_microbatches, renew=self._renew)
        self._renew = False
        if self.plan is not before:
            self._periods_s.clear()
            self._ratios.clear()
        self._batches.append(_Batch(first, num_microbatches, masks))
        return masks

    def as_tensors(self, masks: StepMasks, num_loss_parameters: int) -> Masks:
        """As the runtime takes them; parameters of the loss train always."""
        live, forced = as_tensors(masks)
        live[-1] = torch.cat([live[-1], live[-1].new_ones(len(live[-1]), num_loss_parameters)], dim=1)
        return live, forced

    @contextmanager
    def profiling(self, model: nn.Module, acceleration: AccelerationSwitch) -> Iterator[bool]:
        """Around the handing over of a batch; yields whether its forwards are to run inside.

        Those of a first batch show the parameters' work, of plain modules, whose calls can be watched.
        """
        if not self.controller.needs_work:
            yield False
            return
        with acceleration.paused(), self._session.profiling(model):
            yield True
        works = self._session.take_works()
        self.controller.set_work([works[stage] for stage in sorted(works)])

    def take(self, times: Times) -> None:
        """Take in what actions took, in any order."""
        for stage, kind, microbatch, start_s, end_s in times:
            if kind == "U":
                self._update_s[stage] = (end_s - start_s) / self._accumulation
                continue
            batch = self._batch_of(microbatch)
            if batch is None:
                continue
            action = Action(stage, Kind(kind), microbatch - batch.first)
            # A stage's thread updates as well: freezing cannot shorten it, no more than a forward.
            batch.durations_s[action] = end_s - start_s + (self._update_s[stage] if kind == "F" else 0.0)
            if stage == 0:
                batch.end_s = max(batch.end_s, end_s)
        num_actions = 2 * self._schedule.num_stages
        while self._batches and len(self._batches[0].durations_s) == num_actions * self._batches[0].num_microbatches:
            self._end_batch(self._batches.popleft())

    def abort(self) -> None:
        """What is in flight is lost, and not counted."""
        self._batches.clear()
        self.controller.abort_step()

    def report(self) -> dict[str, Any]:
        """As ``FreezingPipeline.report`` has it, and, in seconds a micro-batch, the periods; ratios by stage."""
        plan = self.plan
        report = self.controller.report()
        if plan is not None:
            num = plan.schedule.num_microbatches
            report |= {
                "predicted_period_s": plan.makespan_s / num,
                "unfrozen_period_s": plan.unfrozen_makespan_s / num,
                "least_period_s": plan.objective_s / num,
                "planned_stage_s": (planned_stage_times_s(plan) / num).tolist(),
                "planned_stage_ratios": planned_stage_ratios(plan),
            }
        report["measured_period_s"] = median(self._periods_s) if self._periods_s else None
        report["stage_ratios"] = np.mean(self._ratios, axis=0).tolist() if self._ratios else None
        return report

    def close(self) -> None:
        self.controller.close()

    def _batch_of(self, microbatch: int) -> _Batch | None:
        found = (b for b in self._batches if b.first <= microbatch < b.first + b.num_microbatches)
        return next(found, None)

    def _end_batch(self, batch: _Batch) -> None:
        is_steady = batch.masks.phase == STEADY and batch.num_microbatches == self._schedule.num_microbatches
        if is_steady and self._last_end_s is not None:
            self._periods_s.append((batch.end_s - self._last_end_s) / batch.num_microbatches)
        if batch.masks.phase in (RAMP, STEADY) and batch.masks.stage_freeze_ratios is not None:
            self._ratios.append(batch.masks.stage_freeze_ratios)
        self._last_end_s = batch.end_s
        self._session.end_step(batch.durations_s, {}, {})


def planned_stage_ratios(plan: Plan) -> list[float]:
    """Every stage's mean freeze ratio."""
    sums = [0.0] * plan.schedule.num_stages
    for action, ratio in plan.ratios.items():
        sums[action.stage] += ratio
    return [total / plan.schedule.num_microbatches for total in sums]


def _refuse(config: FreezeConfig) -> None:
    faults = [
        problem(
            f"freeze={name}",
            expected="gradients divided by all micro-batches of an update",
            got="AsyncPipeline",
            hint="Leave it out, or use FreezingPipeline.",
        )
        for name, is_set in (("rescale", config.rescale), ("live_microbatches", config.averages_live))
        if is_set
    ]
    raise_all(ValueError, faults)
