"""The C++ pipeline, its worker threads, and the programs that run on it."""

from __future__ import annotations

import itertools
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
from timelyfreeze.errors import StageError, TransportError, problem
from timelyfreeze.runtime.arguments import refuse_wrapped
from timelyfreeze.runtime.microbatch import Microbatch
from timelyfreeze.runtime.rng import follow_action_generator
from timelyfreeze.runtime.ties import TiedParameters
from timelyfreeze.runtime.values import encode, encode_call, map_tensors, own_part, stage_entry
from timelyfreeze.schedule import Action, Kind, Schedule, data_dependencies

# One worker walks all the ranks where the last step's actions took less than this on average: then two threads that
# hand over to each other lose more than they win (bench/test_host_overhead.py finds the crossing).
INLINE_BELOW_S = 25e-6


class StepTimes:
    """When each action of a step began and ended, in seconds since the step began.

    Attributes:
        actions: of the step.
        starts_s, ends_s: in their order.
        skipped_ids: places in it of what did not run.
        origin_s: when the step began, on a clock that all ranks share.

    The dictionaries are made when they are asked for: with many tiny actions, hashing them all would show.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        starts_s: Sequence[float],
        ends_s: Sequence[float],
        skipped_ids: Sequence[int] = (),
        origin_s: float = 0.0,
    ) -> None:
        self.actions = actions
        self.starts_s = starts_s
        self.ends_s = ends_s
        self.skipped_ids = skipped_ids
        self.origin_s = origin_s

    @property
    def start_s(self) -> dict[Action, float]:
        return dict(zip(self.actions, self.starts_s, strict=True))

    @property
    def end_s(self) -> dict[Action, float]:
        return dict(zip(self.actions, self.ends_s, strict=True))

    @property
    def durations_s(self) -> dict[Action, float]:
        pairs = zip(self.starts_s, self.ends_s, strict=True)
        return dict(zip(self.actions, (end - start for start, end in pairs), strict=True))

    @property
    def skipped(self) -> frozenset[Action]:
        """Backwards that did not run, since forward had recorded no graph: they lie below their micro-batch's cut."""
        return frozenset(self.actions[index] for index in self.skipped_ids)

    @property
    def step_time_s(self) -> float:
        """The end of the last action."""
        return max(self.ends_s, default=0.0)

    @property
    def mean_action_s(self) -> float:
        """The mean time of an action."""
        return (sum(self.ends_s) - sum(self.starts_s)) / max(len(self.actions), 1)


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
    shares: list[float]

    @property
    def transfers_s(self) -> dict[tuple[int, int], list[float]]:
        """How long what came from other processes was on its way, by (from stage, to stage)."""
        found: dict[tuple[int, int], list[float]] = {}
        for index, seconds in self.report.transits_s:
            action = self.times.actions[index]
            above = action.stage + (1 if action.kind is Kind.F else -1)
            found.setdefault((action.stage, above), []).append(seconds)
        return found


class Engine:
    """A model's stages on their ranks, each rank with a worker thread that lives until ``close``.

    Args:
        stages: the stage modules, in order; None: the stage is on another rank, which is another process.
        schedule: what the ranks do in a training step.
        devices: one a rank.
        loss_fn: ``(output, target)`` -> loss, or None where the last stage takes the target itself. Parameters of a
            module train with the last stage, in every micro-batch.
        own_rank: the rank that this process is; None: all ranks are threads of it.
        max_pending_bytes: what the weight gradients that wait for their W on one rank may keep from being freed, inputs
            and output gradients of their layers; what goes beyond is computed in I. None: no limit.

    Raises:
        ValueError: the schedule splits the backward of a compiled stage.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | None],
        schedule: Schedule,
        devices: Sequence[torch.device],
        loss_fn: Callable[..., Any] | None,
        *,
        own_rank: int | None = None,
        max_pending_bytes: int | None = None,
    ) -> None:
        refuse_wrapped(stages, allow_sharded=own_rank is not None)
        _refuse_compiled(stages, schedule)
        self.schedule = schedule
        self._max_pending_bytes = max_pending_bytes
        self.stages = list(stages)
        self.devices = list(devices)
        self.own_rank = own_rank
        self._loss_fn = loss_fn
        self._programs: dict[tuple[bool, int], _Compiled] = {}
        self._mean_action_s = float("inf")
        self.ties = TiedParameters(self.stages, [self.devices[rank] for rank in schedule.stage_to_rank])
        last = len(self.stages) - 1
        self.loss_parameters = self._find_loss_parameters()
        compiled_stages: list[_C.Stage | None] = []
        for index, stage in enumerate(self.stages):
            if stage is None:
                compiled_stages.append(None)
                continue
            takes_target = index == last and loss_fn is None
            entry = stage if index == 0 else stage_entry(stage, takes_target=takes_target)
            parameters = self.ties.stage_parameters[index] + (self.loss_parameters if index == last else [])
            compiled_stages.append(_C.Stage(entry, encode, parameters))
        self.runtime_stages = compiled_stages
        self.runtime = _C.Pipeline(
            compiled_stages, schedule.stage_to_rank, [str(device) for device in self.devices], own_rank
        )
        follow_action_generator()
        if any(device.type == "cpu" for device in self.devices):
            _C.keep_large_blocks()
        ranks = range(len(self.devices)) if own_rank is None else [own_rank]
        self._threads = [
            threading.Thread(target=self.runtime.work, args=(index,), name=f"timelyfreeze-rank-{rank}", daemon=True)
            for index, rank in enumerate(ranks)
        ]
        for thread in self._threads:
            thread.start()
        # Runs at exit too: a daemon thread that wakes when the interpreter is gone would be killed inside C++.
        self._finalizer = weakref.finalize(self, _close, self.runtime, self._threads)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is here."""
        return self.stages[-1] is not None

    def overflows(self) -> bool:
        """Whether some gradient of the step is not finite, before ``commit``."""
        every = [*itertools.chain(*self.ties.stage_parameters), *self.loss_parameters]
        grads = [own_part(parameter.grad) for parameter in every if parameter.grad is not None]
        return any(not bool(torch.isfinite(grad.to_dense() if grad.is_sparse else grad).all()) for grad in grads)

    def close(self) -> None:
        """Let the workers go; waits for them. Calling it twice is harmless."""
        self._finalizer()

    def holds(self) -> bool:
        """Whether the stages still have the parameters that this engine was built for."""
        with_owners = self.ties.owners
        for stage, used in zip(self.stages, self.ties.stage_parameters, strict=True):
            now = [] if stage is None else list(stage.parameters())
            if len(now) != len(used) or any(with_owners.get(id(u), u) is not n for u, n in zip(used, now, strict=True)):
                return False
        own = self._find_loss_parameters()
        return len(own) == len(self.loss_parameters) and all(map(operator.is_, own, self.loss_parameters))

    def run(
        self,
        microbatches: list[Microbatch],
        shares: list[float],
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
            microbatches: may be none where this process has neither the first nor the last stage.
            shares: of each micro-batch in the samples of the step.
            masks: uint8 tensors, one a stage: which parameters are live ``[microbatches, parameters]``, and for which
                micro-batches an input gradient is computed even if nobody needs it ``[microbatches]``.

        Raises:
            StageError: user code failed; its exception is the cause. Gradients are as before.
            KeyboardInterrupt, TimeoutError: the step was stopped from outside.
        """
        compiled = self._program(train, len(shares))
        request = _C.StepRequest(compiled.program, self._inputs(microbatches, len(shares)))
        request.train = train
        request.step = step
        request.seed = seed
        request.timeout_s = timeout_s
        request.return_outputs = return_outputs
        request.check_finite = check_finite
        request.max_pending_bytes = self._max_pending_bytes
        request.grad_scale = grad_scale
        request.run_inline = self._mean_action_s < INLINE_BELOW_S
        if has_target and self.has_loss:
            request.targets = self._targets(microbatches)
            request.loss_fn = self._loss_fn
        request.weights = shares
        if masks is not None:
            live, request.needs_input_grad = masks
            always = live[-1].new_ones(len(live[-1]), len(self.loss_parameters))
            request.live = [*live[:-1], torch.cat([live[-1], always], dim=1)]
        with self.ties.installed():
            report = self.runtime.run(request)
        if report.error is not None:
            self._raise(report, compiled, step)
        times = StepTimes(compiled.actions, report.start_s, report.end_s, report.skipped, report.origin_s)
        if train and all(device.type == "cpu" for device in self.devices):
            self._mean_action_s = times.mean_action_s
        return EngineStep(report, times, microbatches, shares)

    def trainable(self) -> list[np.ndarray[Any, np.dtype[np.bool_]] | None]:
        """The user's ``requires_grad`` flags, one array a stage, in the order of its parameters; None: not here."""
        owners = self.ties.owners
        return [
            None
            if stage is None
            else np.array([owners.get(id(parameter), parameter).requires_grad for parameter in used], dtype=bool)
            for stage, used in zip(self.stages, self.ties.stage_parameters, strict=True)
        ]

    def commit(self, scale: float, factors: list[list[float]] | None = None) -> None:
        """Add the step's gradients to the parameters' ``.grad``.

        Args:
            scale: multiplies every gradient for which there is no factor of its own.
            factors: one list a stage, in the order of its parameters.
        """
        factors = factors or [[scale] * len(used) for used in self.ties.stage_parameters]
        self.runtime.commit([*factors[:-1], factors[-1] + [scale] * len(self.loss_parameters)])
        self.ties.merge_gradients()

    def abort(self) -> None:
        """Forget the step's gradients."""
        self.runtime.abort()

    def _find_loss_parameters(self) -> list[nn.Parameter]:
        """The parameters of the loss that no stage has, where the loss is computed here."""
        if self.stages[-1] is None or not isinstance(self._loss_fn, nn.Module):
            return []
        parameters = list(self._loss_fn.parameters())
        stages = [stage for stage in self.stages if stage is not None] if parameters else []
        known = {id(parameter) for stage in stages for parameter in stage.parameters()}
        return [parameter for parameter in parameters if id(parameter) not in known]

    def _inputs(self, microbatches: list[Microbatch], num_microbatches: int) -> list[tuple[list[torch.Tensor], Any]]:
        if self.stages[0] is None:
            return [([], None)] * num_microbatches
        return [encode_call(m.args, m.kwargs) for m in microbatches]

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
        if report.failed is None or isinstance(error, TransportError):
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


def _refuse_compiled(stages: Sequence[nn.Module | None], schedule: Schedule) -> None:
    """A compiled stage's backward is one piece: its weight gradients cannot wait for W."""
    split = {action.stage for action in schedule.actions if action.kind is Kind.I}
    here = {index: stage for index, stage in enumerate(stages) if stage is not None and index in split}
    compiled = [index for index, stage in here.items() if any(map(is_compiled, stage.modules()))]
    if compiled:
        raise ValueError(
            problem(
                f"schedule {schedule.name!r} splits the backward of compiled stages",
                expected="stages that are not compiled, or a schedule of full backwards",
                got=f"compiled modules in stages {', '.join(map(str, compiled))}",
                hint="Use schedule='interleaved_1f1b' or '1f1b', or do not compile these stages.",
            )
        )


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
