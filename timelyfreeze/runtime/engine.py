"""The C++ pipeline, its worker threads, and the programs that run on it."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from timelyfreeze import _C
from timelyfreeze.compiled import is_compiled
from timelyfreeze.errors import StageError, problem
from timelyfreeze.runtime.microbatch import Microbatch
from timelyfreeze.runtime.rng import follow_action_generator
from timelyfreeze.runtime.ties import TiedParameters
from timelyfreeze.runtime.values import encode, encode_call, map_tensors, stage_entry
from timelyfreeze.schedule import Action, Kind, Schedule, data_dependencies

# One worker walks all the ranks where the last step's actions took less than this on average: then two threads that
# hand over to each other lose more than they win (bench/test_host_overhead.py finds the crossing).
INLINE_BELOW_S = 25e-6


class StepTimes:
    """When each action of a step began and ended, in seconds since the step began.

    The dictionaries are made when they are asked for: with many tiny actions, hashing them all would show.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        starts_s: Sequence[float],
        ends_s: Sequence[float],
        skipped: Sequence[int] = (),
    ) -> None:
        self._actions = actions
        self._starts_s = starts_s
        self._ends_s = ends_s
        self._skipped = skipped

    @property
    def start_s(self) -> dict[Action, float]:
        return dict(zip(self._actions, self._starts_s, strict=True))

    @property
    def end_s(self) -> dict[Action, float]:
        return dict(zip(self._actions, self._ends_s, strict=True))

    @property
    def durations_s(self) -> dict[Action, float]:
        pairs = zip(self._starts_s, self._ends_s, strict=True)
        return dict(zip(self._actions, (end - start for start, end in pairs), strict=True))

    @property
    def skipped(self) -> frozenset[Action]:
        """Backwards that did not run, since forward had recorded no graph: they lie below their micro-batch's cut."""
        return frozenset(self._actions[index] for index in self._skipped)

    @property
    def step_time_s(self) -> float:
        """The end of the last action."""
        return max(self._ends_s, default=0.0)

    @property
    def mean_action_s(self) -> float:
        """The mean time of an action."""
        return (sum(self._ends_s) - sum(self._starts_s)) / max(len(self._actions), 1)


@dataclass(frozen=True)
class _Compiled:
    """A program and the actions that its ids stand for."""

    program: _C.Program
    actions: list[Action]


@dataclass(frozen=True)
class EngineStep:
    """What the C++ runtime gave back: see ``StepReport`` in csrc/runtime/pipeline.h."""

    report: _C.StepReport
    times: StepTimes
    microbatches: list[Microbatch]


class Engine:
    """A model's stages on their ranks, each rank with a worker thread that lives until ``close``.

    Args:
        stages: the stage modules, in order.
        schedule: what the ranks do in a training step.
        devices: one a rank.
        loss_fn: ``(output, target)`` -> loss, or None where the last stage takes the target itself. Parameters of a
            module train with the last stage, in every micro-batch.
        max_pending_bytes: what the weight gradients that wait for their W on one rank may keep from being freed, inputs
            and output gradients of their layers; what goes beyond is computed in I. None: no limit.

    Raises:
        ValueError: the schedule splits the backward of a compiled stage.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        schedule: Schedule,
        devices: Sequence[torch.device],
        loss_fn: Callable[..., Any] | None,
        *,
        max_pending_bytes: int | None = None,
    ) -> None:
        _refuse_compiled(stages, schedule)
        self.schedule = schedule
        self._max_pending_bytes = max_pending_bytes
        self.stages = list(stages)
        self.devices = list(devices)
        self._loss_fn = loss_fn
        self._programs: dict[tuple[bool, int], _Compiled] = {}
        self._mean_action_s = float("inf")
        self.ties = TiedParameters(self.stages, [self.devices[rank] for rank in schedule.stage_to_rank])
        self._loss_parameters = _own_parameters(loss_fn, self.stages)
        last = len(self.stages) - 1
        compiled_stages = []
        for index, stage in enumerate(self.stages):
            takes_target = index == last and loss_fn is None
            entry = stage if index == 0 else stage_entry(stage, takes_target=takes_target)
            parameters = self.ties.stage_parameters[index] + (self._loss_parameters if index == last else [])
            compiled_stages.append(_C.Stage(entry, encode, parameters))
        self._pipeline = _C.Pipeline(compiled_stages, schedule.stage_to_rank, [str(device) for device in self.devices])
        follow_action_generator()
        if any(device.type == "cpu" for device in self.devices):
            _C.keep_large_blocks()
        self._threads = [
            threading.Thread(target=self._pipeline.work, args=(rank,), name=f"timelyfreeze-rank-{rank}", daemon=True)
            for rank in range(len(self.devices))
        ]
        for thread in self._threads:
            thread.start()
        # Runs at exit too: a daemon thread that wakes when the interpreter is gone would be killed inside C++.
        self._finalizer = weakref.finalize(self, _close, self._pipeline, self._threads)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Let the workers go; waits for them. Calling it twice is harmless."""
        self._finalizer()

    def holds(self) -> bool:
        """Whether the stages still have the parameters that this engine was built for."""
        with_owners = self.ties.owners
        for stage, used in zip(self.stages, self.ties.stage_parameters, strict=True):
            now = list(stage.parameters())
            if len(now) != len(used) or any(with_owners.get(id(u), u) is not n for u, n in zip(used, now, strict=True)):
                return False
        own = _own_parameters(self._loss_fn, self.stages)
        return len(own) == len(self._loss_parameters) and all(map(operator.is_, own, self._loss_parameters))

    def run(
        self,
        microbatches: list[Microbatch],
        *,
        train: bool,
        step: int,
        seed: int,
        timeout_s: float,
        has_target: bool,
        return_outputs: bool = False,
        check_finite: bool = True,
        grad_scale: torch.Tensor | None = None,
        masks: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None,
    ) -> EngineStep:
        """Run one program. After training, call ``commit`` or ``abort``.

        Args:
            masks: uint8 tensors, one a stage: which parameters are live ``[microbatches, parameters]``, and for which
                micro-batches an input gradient is computed even if nobody needs it ``[microbatches]``.

        Raises:
            StageError: user code failed; its exception is the cause. Gradients are as before.
            KeyboardInterrupt, TimeoutError: the step was stopped from outside.
        """
        compiled = self._program(train, len(microbatches))
        request = _C.StepRequest(compiled.program, [encode_call(m.args, m.kwargs) for m in microbatches])
        request.train = train
        request.step = step
        request.seed = seed
        request.timeout_s = timeout_s
        request.return_outputs = return_outputs
        request.check_finite = check_finite
        request.max_pending_bytes = self._max_pending_bytes
        request.grad_scale = grad_scale
        request.run_inline = self._mean_action_s < INLINE_BELOW_S
        if has_target:
            request.targets = self._targets(microbatches)
            request.loss_fn = self._loss_fn
            num_samples = sum(m.num_samples for m in microbatches)
            request.weights = [m.num_samples / num_samples for m in microbatches]
        if masks is not None:
            live, request.needs_input_grad = masks
            always = live[-1].new_ones(len(live[-1]), len(self._loss_parameters))
            request.live = [*live[:-1], torch.cat([live[-1], always], dim=1)]
        with self.ties.installed():
            report = self._pipeline.run(request)
        if report.error is not None:
            self._raise(report, compiled, step)
        times = StepTimes(compiled.actions, report.start_s, report.end_s, report.skipped)
        if train and all(device.type == "cpu" for device in self.devices):
            self._mean_action_s = times.mean_action_s
        return EngineStep(report, times, microbatches)

    def trainable(self) -> list[np.ndarray[Any, np.dtype[np.bool_]]]:
        """The user's ``requires_grad`` flags, one array a stage, in the order of its parameters."""
        owners = self.ties.owners
        return [
            np.array([owners.get(id(parameter), parameter).requires_grad for parameter in used], dtype=bool)
            for used in self.ties.stage_parameters
        ]

    def commit(self, scale: float, factors: list[list[float]] | None = None) -> None:
        """Add the step's gradients to the parameters' ``.grad``.

        Args:
            scale: multiplies every gradient for which there is no factor of its own.
            factors: one list a stage, in the order of its parameters.
        """
        factors = factors or [[scale] * len(used) for used in self.ties.stage_parameters]
        self._pipeline.commit([*factors[:-1], factors[-1] + [scale] * len(self._loss_parameters)])
        self.ties.merge_gradients()

    def abort(self) -> None:
        """Forget the step's gradients."""
        self._pipeline.abort()

    def _targets(self, microbatches: list[Microbatch]) -> list[Any]:
        device = self.devices[self.schedule.stage_to_rank[-1]]
        if device.type == "cpu":
            return [m.target for m in microbatches]
        return [map_tensors(m.target, lambda t: t.to(device, non_blocking=True)) for m in microbatches]

    def _program(self, train: bool, num_microbatches: int) -> _Compiled:
        key = (train, num_microbatches)
        if key not in self._programs:
            self._programs[key] = _compile(self.schedule, forward_only=not train, num_microbatches=num_microbatches)
        return self._programs[key]

    def _raise(self, report: _C.StepReport, compiled: _Compiled, step: int) -> None:
        error = report.error
        assert error is not None
        if report.failed is None:
            raise error
        action = compiled.actions[report.failed]
        rank = self.schedule.stage_to_rank[action.stage]
        raise StageError(
            problem(
                f"stage {action.stage} failed in action {action}: {type(error).__name__}: {error}",
                where=f"rank {rank}, micro-batch {action.microbatch}, step {step}",
                hint="Gradients are as they were before the step; mend the cause shown above and call step() again.",
            ),
            rank=rank,
            stage=action.stage,
            action=str(action),
            step=step,
        ) from error


def _refuse_compiled(stages: Sequence[nn.Module], schedule: Schedule) -> None:
    """A compiled stage's backward is one piece: its weight gradients cannot wait for W."""
    split = {action.stage for action in schedule.actions if action.kind is Kind.I}
    compiled = [index for index in sorted(split) if any(map(is_compiled, stages[index].modules()))]
    if compiled:
        raise ValueError(
            problem(
                f"schedule {schedule.name!r} splits the backward of compiled stages",
                expected="stages that are not compiled, or a schedule of full backwards",
                got=f"compiled modules in stages {', '.join(map(str, compiled))}",
                hint="Use schedule='interleaved_1f1b' or '1f1b', or do not compile these stages.",
            )
        )


def _own_parameters(loss_fn: Callable[..., Any] | None, stages: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a loss that no stage has."""
    if not isinstance(loss_fn, nn.Module):
        return []
    parameters = list(loss_fn.parameters())
    known = {id(parameter) for stage in stages for parameter in stage.parameters()} if parameters else set()
    return [parameter for parameter in parameters if id(parameter) not in known]


def _compile(schedule: Schedule, *, forward_only: bool, num_microbatches: int) -> _Compiled:
    """The schedule as a program, without the micro-batches that a smaller batch lacks."""

    def wanted(action: Action) -> bool:
        return action.microbatch < num_microbatches and (action.kind is Kind.F or not forward_only)

    ranks = [[action for action in order if wanted(action)] for order in schedule.ranks]
    actions = [action for order in ranks for action in order]
    ids = {action: index for index, action in enumerate(actions)}
    edges = [
        (ids[edge.before], ids[edge.after])
        for edge in data_dependencies(schedule)
        if wanted(edge.before) and wanted(edge.after)
    ]
    program = _C.Program([[(a.stage, a.kind.value, a.microbatch) for a in order] for order in ranks], edges)
    return _Compiled(program, actions)


def _close(pipeline: _C.Pipeline, threads: list[threading.Thread]) -> None:
    pipeline.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=5.0)
