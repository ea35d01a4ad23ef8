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
from timelyfreeze.asynchronous.norms import DelayedNorm, RemoteNorm, lag_of
from timelyfreeze.asynchronous.scaling import DelayedLossScale
from timelyfreeze.asynchronous.updates import Clip, MakeOptimizer, StageUpdate, make_optimizer
from timelyfreeze.errors import StageError, TransportError, problem
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
    predicts: bool
    seed: int
    timeout_s: float
    check_finite: bool
    max_skipped: int
    max_grad_norm: float | None
    grad_scaler: torch.amp.GradScaler | None


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
        lag = lag_of(num_stages, options.accumulation)
        is_rank = engine.own_rank is not None
        self.norms = RemoteNorm(num_stages, lag) if is_rank else DelayedNorm(len(updating), lag)
        self._places = {stage: stage if is_rank else place for place, stage in enumerate(updating)}
        self.loss_scale: DelayedLossScale | None = None
        if options.grad_scaler is not None and options.grad_scaler.is_enabled():
            self.loss_scale = DelayedLossScale(options.grad_scaler, len(updating), lag)
        self._updates = [
            None if optimizer is None else self._make_update(optimizer, self._places[stage])
            for stage, optimizer in enumerate(self.optimizers)
        ]
        self.runtime = _C.AsyncPipeline(
            engine.runtime_stages,
            [str(device) for device in engine.devices],
            loss_fn,
            self._updates,
            [None if scheduler is None else scheduler.step for scheduler in self.schedulers],
            None if self.loss_scale is None else self.loss_scale.begin_update,
            options.accumulation,
            options.stashes,
            options.recomputes,
            options.predicts,
            options.seed,
        )
        local = [stage for stage, module in enumerate(engine.stages) if module is not None]
        self._threads = [
            threading.Thread(target=self.runtime.work, args=(index,), name=f"timelyfreeze-stage-{stage}", daemon=True)
            for index, stage in enumerate(local)
        ]
        for thread in self._threads:
            thread.start()
        # Runs at exit too: a daemon thread that wakes when the interpreter is gone would be killed inside C++.
        self._finalizer = weakref.finalize(self, _close, self.runtime, self._threads)

    def _make_update(self, optimizer: torch.optim.Optimizer, place: int) -> StageUpdate:
        options = self._options
        return StageUpdate(
            optimizer,
            place,
            check_finite=options.check_finite,
            max_skipped=options.max_skipped,
            clip=None if options.max_grad_norm is None else Clip(self.norms, place, options.max_grad_norm),
            loss_scale=self.loss_scale,
        )

    @property
    def is_open(self) -> bool:
        """Whether micro-batches may be between forward and backward."""
        return self.runtime.is_open

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is here."""
        return self.engine.has_loss

    @property
    def ledger(self) -> DriftLedger:
        return read_ledger(self.runtime)

    def norms_by_stage(self) -> list[tuple[int, list[float]]]:
        """For each stage here that updates, how many norms it has told, and the squares of the last of them."""
        places = self._places
        return [
            self.norms.known(places[stage]) if stage in places else (0, []) for stage in range(len(self.optimizers))
        ]

    def load_norms(self, by_stage: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Go on where ``norms_by_stage`` was taken."""
        for stage, (count, squares) in enumerate(by_stage):
            if stage in self._places:
                self.norms.restore(self._places[stage], count, squares)

    def own_place(self) -> list[Any]:
        """What the other ranks must know before a stream: which stages update, micro-batches so far, norms so far."""
        own = self.engine.own_rank
        assert own is not None
        return [self.optimizers[own] is not None, self.runtime.num_microbatches, *self.norms_by_stage()[own]]

    def take_places(self, every: Sequence[Sequence[Any]]) -> None:
        """From all ranks what ``own_place`` gave there."""
        assert isinstance(self.norms, RemoteNorm)
        self.norms.updating = [stage for stage, (updates, *_) in enumerate(every) if updates]
        # After a failure one may have been given a batch more than another.
        self.runtime.num_microbatches = max(one[1] for one in every)
        for stage, (_, _, count, squares) in enumerate(every):
            self.norms.restore(stage, count, squares)

    def push(
        self, batch: Sequence[Microbatch], masks: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
    ) -> None:
        """Hand over a batch's micro-batches; comes back at once. For the masks see ``Engine.run``."""
        if not self.is_open:
            self.forget_gradients()
        device = self.engine.devices[-1]
        takes_input, takes_target = self.engine.stages[0] is not None, self.engine.has_loss
        microbatches = []
        for one in batch:
            tensors, spec = encode_call(one.args, one.kwargs) if takes_input else ([], None)
            target = one.target if takes_target else None
            if device.type != "cpu":
                target = map_tensors(target, lambda t: t.to(device, non_blocking=True))
            microbatches.append((tensors, spec, target, float(one.num_samples)))
        self.runtime.push(microbatches, masks)

    def take_losses(self, count: int) -> list[tuple[torch.Tensor, Any]]:
        """The next losses, once they are there: (mean, None) or (sum, count).

        Raises:
            StageError: user code failed; what was in flight is lost.
        """
        self._check(self.runtime.wait_for_losses(count, self._options.timeout_s))
        return self.runtime.take_losses(count)

    def skip_losses(self, count: int) -> None:
        """Let go of the next losses, which may still be on their way."""
        self.runtime.skip_losses(count)

    def settle(self) -> None:
        """Wait until every stage waits for input, so that no weight changes. Raises as ``take_losses`` does."""
        if self.is_open:
            self._check(self.runtime.settle(self._options.timeout_s))

    def drain(self) -> None:
        """Run the backwards and updates that are left. Raises as ``take_losses`` does."""
        if self.is_open:
            self._check(self.runtime.drain(self._options.timeout_s))
            if self.loss_scale is not None:
                self.loss_scale.settle()

    def forget(self) -> None:
        """End a stream that has been drained."""
        self.runtime.forget()

    def forget_gradients(self) -> None:
        """Between streams the gradients are nobody's."""
        for parameters in self._parameters:
            for parameter in parameters:
                parameter.grad = None

    @property
    def skipped_in_a_row(self) -> list[int]:
        """By stage, how many updates in a row were left out."""
        return [0 if update is None else update.skipped_in_a_row for update in self._updates]

    def load_skipped(self, by_stage: Sequence[int]) -> None:
        """Go on where ``skipped_in_a_row`` was taken."""
        for update, skipped in zip(self._updates, by_stage, strict=True):
            if update is not None:
                update.skipped_in_a_row = int(skipped)

    def close(self) -> None:
        """Let the workers go, and what is in flight with them. Calling it twice is harmless."""
        self._finalizer()

    def abandon(self) -> None:
        """Give up what is in flight."""
        self.runtime.abandon()
        self.norms.reset()
        self.forget_gradients()

    def failure(self) -> BaseException | None:
        """What ``take_losses`` would raise. From any thread."""
        failed = self.runtime.failure
        return None if failed is None else _as_exception(*failed)

    def _check(self, reached: bool) -> None:
        if reached:
            return
        place, error = self.runtime.take_failure()
        self.norms.reset()
        if self.loss_scale is not None:
            self.loss_scale.reset()
        self.forget_gradients()
        raise _as_exception(place, error)


def _as_exception(place: tuple[int, str, int] | None, error: BaseException) -> BaseException:
    if place is None or isinstance(error, TransportError):
        return error
    stage, kind, microbatch = place
    failed = StageError(
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
    )
    failed.__cause__ = error
    return failed


def _close(runtime: _C.AsyncPipeline, threads: list[threading.Thread]) -> None:
    runtime.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=5.0)
