"""What an asynchronous pipeline gives back for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from timelyfreeze.runtime.microbatch import Microbatch
from timelyfreeze.runtime.results import join_losses


@dataclass(frozen=True)
class AsyncResult:
    """What a batch gives back.

    Attributes:
        index: of the batch, counted from 0.
        loss: mean over its samples, each micro-batch by the weights of its time; detached, 0-dimensional.

    >>> AsyncResult(0, torch.tensor(1.0)).index
    0
    """

    index: int
    loss: torch.Tensor


def join_batch(slices: Sequence[Microbatch], losses: Sequence[tuple[torch.Tensor, Any]]) -> torch.Tensor:
    """A batch's mean loss from its micro-batches': (mean, None) or (sum, count)."""
    num_samples = sum(one.num_samples for one in slices)
    shares = [one.num_samples / num_samples for one in slices]
    return join_losses([loss for loss, _ in losses], [count for _, count in losses], shares).mean
