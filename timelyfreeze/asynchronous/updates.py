"""A stage's own optimizer step, taken while micro-batches are between forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from timelyfreeze.asynchronous.norms import DelayedNorm, RemoteNorm
from timelyfreeze.asynchronous.scaling import DelayedLossScale
from timelyfreeze.errors import problem

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def make_optimizer(make: MakeOptimizer, parameters: Sequence[nn.Parameter], stage: int) -> torch.optim.Optimizer | None:
    """A stage's optimizer; None where nothing of it trains.

    Raises:
        TypeError: what was made is no optimizer, or one that wants to call the model itself.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return None
    made: object = make(trained)
    where = f"stage {stage}"
    if not isinstance(made, torch.optim.Optimizer):
        got = type(made).__name__
        raise TypeError(problem("optimizer", expected="parameters -> torch optimizer", got=got, where=where))
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            problem(
                f"optimizer {type(made).__name__}",
                expected="one whose step() needs no closure: a stage cannot evaluate the loss by itself",
                where=where,
                hint="Use SGD, AdamW or another first-order optimizer.",
            )
        )
    return made


class StageUpdate:
    """Called by the runtime after every ``accumulation`` backwards of its stage, on the stage's own thread.

    Args:
        optimizer: of the stage's parameters, which nobody else writes.
        check_finite: leave out an update where a gradient is NaN or infinite.
        max_skipped: so many left out in a row raise FloatingPointError.
        place: of the stage among those that update.
        clip: what the gradients are scaled by, known from the norms of updates before; None: nothing.
        loss_scale: is told whether they were finite; an overflow that a smaller scale may mend does not count as
            left out in a row.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        place: int,
        *,
        check_finite: bool,
        max_skipped: int,
        clip: Clip | None = None,
        loss_scale: DelayedLossScale | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._check_finite = check_finite
        self._max_skipped = max_skipped
        self._clip = clip
        self._place = place
        self._loss_scale = loss_scale
        self.skipped_in_a_row = 0

    def __call__(self, factor: float) -> bool:
        """Update the weights by the gradients times ``factor``; returns whether they were changed."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        grads = [
            parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
            for parameter in parameters
            if parameter.grad is not None
        ]
        if factor != 1.0:
            torch._foreach_mul_(grads, factor)
        finite = not (self._check_finite or self._loss_scale is not None) or all_finite(grads)
        if self._clip is not None:
            self._clip(grads if finite else [])
        if finite:
            # Graphs of micro-batches whose backward is still to come hold these tensors, and shall run through the new
            # values: to them nothing has happened.
            with _unsafe_preserve_version_counter(tuple(parameters)):
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        is_fault = not finite
        if self._loss_scale is not None:
            is_fault = self._loss_scale.end_update(self._place, finite=finite)
        self.skipped_in_a_row = self.skipped_in_a_row + int(is_fault) if not finite else 0
        if self.skipped_in_a_row >= self._max_skipped:
            raise FloatingPointError(
                f"the gradients of {self.skipped_in_a_row} updates in a row are NaN or infinite; all of them were "
                "left out. Lower the learning rate, or look for what is not finite in the input."
            )
        return finite

    def forget_gradients(self) -> None:
        """Drop what has been accumulated."""
        self.optimizer.zero_grad(set_to_none=True)


class Clip:
    """Scales a stage's gradients so that the whole model's norm, as ``norms`` knows it, is at most ``max_norm``."""

    def __init__(self, norms: DelayedNorm | RemoteNorm, stage: int, max_norm: float) -> None:
        self._norms = norms
        self._stage = stage
        self._max_norm = max_norm

    def __call__(self, grads: list[torch.Tensor]) -> None:
        norm = self._norms.exchange(self._stage, square_norm(grads))
        scale = self._max_norm / (norm + 1e-6)
        if grads and scale < 1.0:
            torch._foreach_mul_(grads, scale)


def all_finite(grads: list[torch.Tensor]) -> bool:
    """Whether no gradient is NaN or infinite; one host synchronisation.

    >>> all_finite([torch.ones(2), torch.tensor([1.0, float("nan")])])
    False
    >>> all_finite([torch.full((2,), 3e38)])
    True
    """
    if not grads:
        return True
    # What is not finite makes the sum so. A norm took ten times as long on a CPU: 15 % of a small model's step.
    if bool(torch.stack([grad.sum().isfinite() for grad in grads]).all()):
        return True
    return all(bool(grad.isfinite().all()) for grad in grads)  # finite values may add up to what is not


def square_norm(grads: list[torch.Tensor]) -> float:
    """The sum of the squares; one host synchronisation.

    >>> round(square_norm([torch.ones(2), torch.full((1,), 2.0)]), 3)
    6.0
    """
    if not grads:
        return 0.0
    return float(torch.stack([norm.double() for norm in torch._foreach_norm(grads)]).square().sum())
