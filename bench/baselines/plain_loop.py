"""The least that training on micro-batches can cost on one thread: a loop over the model that is not split."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from bench.workloads import Workload


class PlainLoop:
    """Forward and backward of one micro-batch after the other, in this thread; gradients end as the batch's mean.

    With ``by_stage`` every stage has a graph of its own and its own backward call, as in any pipeline, but nothing is
    scheduled or handed over: what is left above it is a pipeline's own host time.

    >>> from bench.workloads import host_overhead
    >>> loop = PlainLoop(host_overhead())
    >>> loop.step() > 0.0
    True
    """

    def __init__(self, workload: Workload, by_stage: bool = False) -> None:
        stages, self._batch = workload.build()
        self.model = nn.Sequential(*stages)
        self.loss = float("nan")
        self._workload = workload
        self._run = self._stage_by_stage if by_stage else self._whole

    def step(self) -> float:
        """Seconds of one step. Clearing the old gradients is not counted; ``loss`` is then the batch's mean loss."""
        self.model.zero_grad(set_to_none=True)
        losses = []
        start = time.perf_counter()
        inputs, targets = (whole.chunk(self._workload.num_microbatches) for whole in self._batch)
        for x, y in zip(inputs, targets, strict=True):
            losses.append(self._run(x, y))
        torch._foreach_div_([p.grad for p in self.model.parameters() if p.grad is not None], float(len(losses)))
        seconds = time.perf_counter() - start
        self.loss = float(torch.stack(losses).mean())
        return seconds

    def _whole(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self._workload.loss_fn(self.model(x), y)
        torch.autograd.backward(loss)
        return loss.detach()

    def _stage_by_stage(self, x: Tensor, y: Tensor) -> Tensor:
        boundaries: list[tuple[Tensor, Tensor]] = []
        for index, stage in enumerate(self.model):
            if index > 0:
                boundaries.append((x, x.detach().requires_grad_()))
                x = boundaries[-1][1]
            x = stage(x)
        loss = self._workload.loss_fn(x, y)
        torch.autograd.backward(loss)
        for sent, received in reversed(boundaries):
            torch.autograd.backward(sent, received.grad)
        return loss.detach()
