"""Small models, and the plain training step that a pipelined one must equal."""

from __future__ import annotations

import torch
from torch import nn


def mlp(num_layers: int = 4, width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers)])


def plain_step(model, loss_fn, x, y, num_microbatches):
    """What the pipeline must equal: one micro-batch after the other, each weighed by its share of the samples."""
    losses = []
    for a, b in zip(x.tensor_split(num_microbatches), y.tensor_split(num_microbatches), strict=True):
        loss = loss_fn(model(a), b)
        loss.backward(torch.full_like(loss, len(a) / len(x)))
        losses.append(loss.detach() * (len(a) / len(x)))
    return torch.stack(losses).sum()


def assert_same_grads(model, reference):
    for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name
