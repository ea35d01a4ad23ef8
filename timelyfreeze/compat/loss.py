"""A loss that remembers what it gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from timelyfreeze.errors import problem
from timelyfreeze.runtime.values import map_tensors


class RecordingLoss(nn.Module):
    """The user's loss, with the keywords of a call; keeps the losses and outputs of the call's micro-batches.

    A module, so that the parameters of a loss that is one are found.

    Args:
        loss_fn: ``(output, target, **keywords)`` -> loss; None: there is none, and this is not called.
        num_microbatches: of a step.
        is_sum: a step's gradients are those of the sum of its micro-batches' losses, not of their mean.
    """

    def __init__(self, loss_fn: Callable[..., Any] | None, num_microbatches: int, *, is_sum: bool) -> None:
        super().__init__()
        self._loss_fn = loss_fn
        self._num_microbatches = num_microbatches
        self._is_sum = is_sum
        self._keywords: dict[str, Any] = {}
        self._keeps_outputs = False
        self._losses: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, Any] = {}
        self.running_microbatch: Callable[[], int | None] = lambda: None
        """Which micro-batch the last stage runs for; whoever calls this module sets it."""

    @property
    def is_given(self) -> bool:
        """Whether there is a loss."""
        return self._loss_fn is not None

    @property
    def losses(self) -> list[torch.Tensor]:
        """One a micro-batch, detached."""
        return [self._losses[index] for index in sorted(self._losses)]

    @property
    def outputs(self) -> list[Any]:
        """One a micro-batch, detached."""
        return [self._outputs[index] for index in sorted(self._outputs)]

    @contextmanager
    def recording(self, keywords: Mapping[str, Any] | None, *, outputs: bool = False) -> Iterator[None]:
        """Around one call of the pipeline."""
        self._keywords = dict(keywords or {})
        self._keeps_outputs = outputs
        try:
            yield
        finally:
            self._losses, self._outputs, self._keywords = {}, {}, {}

    def forward(self, output: Any, target: Any) -> Any:
        assert self._loss_fn is not None
        microbatch = self.running_microbatch()
        assert microbatch is not None
        loss = self._loss_fn(output, target, **self._keywords)
        if self._keeps_outputs:
            self._outputs[microbatch] = map_tensors(output, torch.Tensor.detach)
        mean = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        if isinstance(mean, torch.Tensor):  # else the runtime says what is wrong
            self._losses[microbatch] = mean.detach()
        if not self._is_sum:
            return loss
        if isinstance(loss, tuple):
            raise TypeError(problem("a loss with scale_grads=False", expected="a scalar", got="(sum, count)"))
        # Counts that add up to 1: by their sum the step divides the sum of the losses.
        return loss, 1.0 / self._num_microbatches
