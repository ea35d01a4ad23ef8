"""The C++ runtime of an asynchronous pipeline, its worker threads, and the stages' optimizers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from timelyfreeze import _C
from timelyfreeze.asynchronous.ledger import DriftLedger, read_ledger
from timelyfreeze.asynchronous.norms import DelayedNorm, lag_of
from timelyfreeze.asynchronous.scaling import DelayedLossScale
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
        self._norms = DelayedNorm(len(updating), lag)
        self.loss_scale: DelayedLossScale | None = None
        if options.grad_scaler is not None and options.grad_scaler.is_enabled():
            self.loss_scale = DelayedLossScale(options.grad_scaler, len(updating), lag)
        self._updates = [
            None if optimizer is None else self._make_update(optimizer, updating.index(stage))
            for stage, optimizer in enumerate(self.optimizers)
        ]
        self.runtime = _C.AsyncPipeline(
            [stage for stage in engine.runtime_stages if stage is not None],
            [str(device) for device in engine.devices],
            loss_fn,
            self._updates,
            [None if scheduler is None else scheduler.step for scheduler in self.schedulers],
            None if self.loss_scale is None else self.loss_scale.begin_update,
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

    def _make_update(self, optimizer: torch.optim.Optimizer, place: int) -> StageUpdate:
        options = self._options
        return StageUpdate(
            optimizer,
            place,
            check_finite=options.check_finite,
            max_skipped=options.max_skipped,
            clip=None if options.max_grad_norm is None else Clip(self._norms, place, options.max_grad_norm),
            loss_scale=self.loss_scale,
        )

    @property
    def is_open(self) -> bool:
        """Whether micro-batches may be between forward and backward."""
        return self.runtime.is_open

    @property
    def ledger(self) -> DriftLedger:
        return read_ledger(self.runtime)

    def push(
        self, batch: Sequence[Microbatch], masks: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
    ) -> None:
        """Hand over a batch's micro-batches; comes back at once. For the masks see ``Engine.run``."""
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
        self.runtime.push(microbatches, masks)

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

    def state_dict(self) -> dict[str, Any]:
        """When drained, what the next updates depend on beside the weights."""
        return {
            "microbatches": self.runtime.num_microbatches,
            "optimizers": [_state_of(one) for one in self.optimizers],
            "lr_schedulers": [_state_of(one) for one in self.schedulers],
            "skipped_in_a_row": [None if one is None else one.skipped_in_a_row for one in self._updates],
            "gradient_norms": self._norms.state_dict(),
            "loss_scale": _state_of(self.loss_scale),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.runtime.num_microbatches = int(state["microbatches"])
        owners = [*self.optimizers, *self.schedulers, self.loss_scale]
        states = [*state["optimizers"], *state["lr_schedulers"], state["loss_scale"]]
        for owner, saved in zip(owners, states, strict=True):
            if owner is not None and saved is not None:
                owner.load_state_dict(saved)
        for update, skipped in zip(self._updates, state["skipped_in_a_row"], strict=True):
            if update is not None:
                update.skipped_in_a_row = skipped
        self._norms.load_state_dict(state["gradient_norms"])

    def close(self) -> None:
        """Let the workers go, and what is in flight with them. Calling it twice is harmless."""
        self._finalizer()

    def _check(self, reached: bool) -> None:
        if reached:
            return
        place, error = self.runtime.take_failure()
        self._norms.reset()
        if self.loss_scale is not None:
            self.loss_scale.reset()
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


def _state_of(owner: Any) -> Any:
    return None if owner is None else owner.state_dict()


def _close(runtime: _C.AsyncPipeline, threads: list[threading.Thread]) -> None:
    runtime.close()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=5.0)
