"""From what the micro-batches left to what the caller gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from timelyfreeze.errors import problem
from timelyfreeze.runtime.engine import EngineStep, StepTimes
from timelyfreeze.runtime.values import encode, encode_call


@dataclass(frozen=True)
class StepResult:
    """What a training step gives back.

    Attributes:
        loss: mean over the samples of the step, detached, 0-dimensional.
        outputs: the last stage's outputs, one a micro-batch, if asked for, else None.
        step_time_s: seconds from the first action's start to the last one's end.
        phase: warmup | measure_upper | measure_lower | ramp | steady (plain training: steady).
        freeze_ratio: share of the weight-gradient work that was left out, mean over stages and micro-batches.
        times: start and end of every action.
        peak_pending_bytes: for every rank, the most that weight gradients waiting for their W kept from being freed.

    >>> StepResult(torch.tensor(1.0), None, 0.1, "steady").freeze_ratio
    0.0
    """

    loss: torch.Tensor
    outputs: list[Any] | None
    step_time_s: float
    phase: str
    freeze_ratio: float = 0.0
    times: StepTimes = field(default_factory=lambda: StepTimes([], [], []), repr=False)
    peak_pending_bytes: list[int] = field(default_factory=list, repr=False)


class StepLoss(NamedTuple):
    """The loss of a step.

    Attributes:
        mean: over all its samples, 0-dimensional.
        divisor: by what the accumulated gradients are still to be divided.
        weights: of the micro-batches within ``divisor``: gradients of some of them alone are divided by their sum.
        total: of a (sum, count) loss, the sum; else None.
    """

    mean: torch.Tensor
    divisor: float
    weights: list[float]
    total: torch.Tensor | None


def step_loss(done: EngineStep) -> StepLoss:
    """From the micro-batches' losses to the step's; ValueError where a (sum, count) loss counts nothing."""
    return join_losses(done.report.losses, done.report.counts, done.shares)


def join_losses(losses: list[torch.Tensor], counts: list[Any], shares: list[float]) -> StepLoss:
    """The same from the losses of some micro-batches, the counts of (sum, count) losses, and the samples' shares."""
    with torch.no_grad():
        if counts[0] is None:
            weights = torch.tensor(shares, dtype=torch.float64)
            mean = torch.cat([loss.reshape(1) for loss in losses]).mul_(weights.to(losses[0])).sum()
            return StepLoss(mean, 1.0, shares, None)
        own = [float(c) for c in counts]
        count = sum(own)
        if count <= 0:
            raise ValueError(
                problem("the step's (sum, count) loss", expected="a count above 0", got=count, hint="Skip the batch.")
            )
        total = torch.stack([loss.reshape(()) for loss in losses]).sum()
        return StepLoss(total / count, count, own, total)


def send_input_gradients(done: EngineStep, scale: float) -> None:
    """Pass on the gradients of inputs that require them, times ``scale``, to whatever made them."""
    roots, grads = [], []
    # A process with neither end of the model has no micro-batches.
    for one, received in zip(done.microbatches, done.report.input_grads, strict=bool(done.microbatches)):
        tensors = encode_call(one.args, one.kwargs)[0] if received else []
        for tensor, grad in zip(tensors, received, strict=False):
            if grad is not None and tensor.requires_grad:
                roots.append(tensor)
                grads.append(grad.to(tensor.device) * scale)
    if roots:
        torch.autograd.backward(roots, grads)


def join_outputs(outputs: list[Any]) -> Any:
    """Put the micro-batches' outputs together along dimension 0."""
    parts = [encode(output) for output in outputs]
    columns = zip(*(tensors for tensors, _ in parts), strict=True)
    joined = [torch.stack(column) if column[0].dim() == 0 else torch.cat(column) for column in columns]
    return parts[0][1].decode(joined)


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """The factor that the scaler puts on gradients; None where it is switched off."""
    if not scaler.is_enabled():
        return None
    return scaler.scale(torch.ones(()))
