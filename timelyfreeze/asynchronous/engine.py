"""The C++ runtime of an asynchronous pipeline, its worker threads, and the stages' optimizers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from timelyfreeze import _C
from timelyfreeze.asynchronous.ledger import DriftLedger, read_ledger
from timelyfreeze.asynchronous.norms import DelayedNorm, lag_of
from timelyfreeze.asynchronous.updates import Clip, MakeOptimizer, StageUpdate, make_optimizer
from timelyfreeze.errors import StageError, problem
from timelyfreeze.runtime.engine import Engine
from timelyfreeze.runtime.microbatch import Microbatch
from timelyfreeze.runtime.values import encode_call, map_tensors

MakeScheduler = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class AsyncOptions:
    """How an asynchronous pipeline trains; see ``AsyncPipeline``."""

    accumulation: int
    optimizer: MakeOptimizer
    lr_scheduler: MakeScheduler | None
    stashes: bool
    recomputes: bool
    seed: int
    timeout_s: float
    check_finite: bool
    max_skipped: int
    max_grad_norm: float | None


class AsyncEngine:
    """Stages, each with a worker thread and an optimizer of its own, until ``close``.

    Args:
        engine: that holds the stages; it evaluates them while nothing trains.
        loss_fn: ``(output, target)`` -> loss, or None where the last stage takes the target itself.
        options: what to train by.
    """

    def __init__(self, engine: Engine, loss_fn: Callable[..., Any] | None, options: AsyncOptions) -> None:
        self.engine = engine
        self._loss_fn = loss_fn
        self._options = options
        num_stages = len(engine.stages)
        used = [list(parameters) for parameters in engine.ties.stage_parameters]
        used[-1] += engine.loss_parameters
        self._parameters = used
        self.optimizers = [make_optimizer(options.optimizer, parameters, s) for s, parameters in enumerate(used)]
        make_scheduler = options.lr_scheduler
        self.schedulers = [None if o is None or make_scheduler is None else make_scheduler(o) for o in self.optimizers]
        updating = [stage for stage, optimizer in enumerate(self.optimizers) if optimizer is not None]
        self._norms = DelayedNorm(len(updating), lag_of(num_stages, options.accumulation))
        updates = []
        for stage, optimizer in enumerate(self.optimizers):
            clip = None
            if options.max_grad_norm is not None and optimizer is not None:
                clip = Clip(self._norms, updating.index(stage), options.max_grad_norm)
            update = None
            if optimizer is not None:
                update = StageUpdate(
                    optimizer, check_finite=options.check_finite, max_skipped=options.max_skipped, clip=clip
                )
            updates.append(update)
        self.runtime = _C.AsyncPipeline(
            [stage for stage in engine.runtime_stages if stage is not None],
            [str(device) for device in engine.devices],
            loss_fn,
            updates,
            [None if scheduler is None else scheduler.step for scheduler in self.schedulers],
            options.accumulation,
            options.stashes,
            options.recomputes,
            options.seed,
        )
        self._threads = [
            threading.Thread(target=self.runtime.work, args=(index,), name=f"timelyfreeze-stage-{index}", daemon=True)
            for index in range(num_stages)
        ]
        for thread in self._threads:
            thread.start()
        # Runs at exit too: a daemon thread that wakes when the interpreter is gone would be killed inside C++.
        self._finalizer = weakref.finalize(self, _close, self.runtime, self._threads)

    @property
    def is_open(self) -> bool:
        """Whether micro-batches may be between forward and backward."""
        return self.runtime.is_open

    @property
    def ledger(self) -> DriftLedger:
        return read_ledger(self.runtime)

    def push(self, batch: Sequence[Microbatch]) -> None:
        """Hand over a batch's micro-batches; comes back at once."""
        if not self.is_open:
            self.forget_gradients()
        device = self.engine.devices[-1]
        microbatches = []
        for one in batch:
            tensors, spec = encode_call(one.args, one.kwargs)
            target = one.target
            if device.type != "cpu":
                target = map_tensors(target, lambda t: t.to(device, non_blocking=True))
            microbatches.append((tensors, spec, target, float(one.num_samples)))
        self.runtime.push(microbatches)

    def take_losses(self, count: int) -> list[tuple[torch.Tensor, Any]]:
        """The next losses, once they are there: (mean, None) or (sum, count).

        Raises:
            StageError: user code failed; what was in flight is lost.
        """
        self._check(self.runtime.wait_for_losses(count, self._options.timeout_s))
        return self.runtime.take_losses(count)

    def settle(self) -> None:
        """Wait until every stage waits for input, so that no weight changes. Raises as ``take_losses`` does."""
        if self.is_open:
            self._check(self.runtime.settle(self._options.timeout_s))

    def drain(self) -> None:
        """Run the backwards and updates that are left. Raises as ``take_losses`` does."""
        if self.is_open:
            self._check(self.runtime.drain(self._options.timeout_s))

    def forget(self) -> None:
        """End a stream that has been drained."""
        self.runtime.forget()

    def forget_gradients(self) -> None:
        """Between streams the gradients are nobody's."""
        for parameters in self._parameters:
            for parameter in parameters:
                parameter.grad = None

    def close(self) -> None:
        """Let the workers go, and what is in flight with them. Calling it twice is harmless."""
        self._finalizer()

    def _check(self, reached: bool) -> None:
        if reached:
            return
        place, error = self.runtime.take_failure()
        self._norms.reset()
        self.forget_gradients()
        if place is None:
            raise error
        stage, kind, microbatch = place
        raise StageError(
            problem(
                f"stage {stage} failed in action {stage}{kind}{microbatch}: {type(error).__name__}: {error}",
                where=f"micro-batch {microbatch}",
                hint="Micro-batches in flight are lost, weights are as the last updates left them; mend the cause "
                "shown above and call run() again, or go back to a checkpoint.",
            ),
            rank=stage,
            stage=stage,
            action=f"{stage}{kind}{microbatch}",
            step=microbatch,
        ) from error


def _close(runtime: _C.AsyncPipeline, threads: list[threading.Thread]) -> None:
    runtime.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=5.0)
