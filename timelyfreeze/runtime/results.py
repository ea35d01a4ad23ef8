"""From what the micro-batches left to what the caller gets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from timelyfreeze.errors import problem
from timelyfreeze.runtime.engine import EngineStep
from timelyfreeze.runtime.values import encode, encode_call


class StepLoss(NamedTuple):
    """The loss of a step.

    Attributes:
        mean: over all its samples, 0-dimensional.
        divisor: by what the accumulated gradients are still to be divided.
        weights: of the micro-batches within ``divisor``: gradients of some of them alone are divided by their sum.
    """

    mean: torch.Tensor
    divisor: float
    weights: list[float]


def step_loss(done: EngineStep) -> StepLoss:
    """From the micro-batches' losses to the step's; ValueError where a (sum, count) loss counts nothing."""
    losses, counts = done.report.losses, done.report.counts
    with torch.no_grad():
        if counts[0] is None:
            shares = torch.tensor([m.num_samples for m in done.microbatches], dtype=torch.float64)
            shares /= shares.sum()
            mean = torch.cat([loss.reshape(1) for loss in losses]).mul_(shares.to(losses[0])).sum()
            return StepLoss(mean, 1.0, shares.tolist())
        weights = [float(c) for c in counts]
        count = sum(weights)
        if count <= 0:
            raise ValueError(
                problem("the step's (sum, count) loss", expected="a count above 0", got=count, hint="Skip the batch.")
            )
        total = torch.stack([loss.reshape(()) for loss in losses]).sum()
        return StepLoss(total / count, count, weights)


def send_input_gradients(done: EngineStep, scale: float) -> None:
    """Pass on the gradients of inputs that require them, times ``scale``, to whatever made them."""
    roots, grads = [], []
    for one, received in zip(done.microbatches, done.report.input_grads, strict=True):
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
