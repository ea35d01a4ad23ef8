"""Layers to split the backward of, a schedule in which everything waits, and what tells what waited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from timelyfreeze import FreezingPipeline, Schedule

# What waits from I0 on still waits when the second forward begins.
WAITING = Schedule([["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]], name="waiting")
WIDTH = 8


class Lambda(nn.Module):
    """``function(module, x)`` with parameters of given shapes as ``w0``, ``w1``, ..."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        for index, shape in enumerate(shapes):
            self.register_parameter(f"w{index}", nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        return self.function(self, x)


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Channels(nn.Module):
    """A convolution over the sequence."""

    def __init__(self, convolution):
        super().__init__()
        self.inner = convolution

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


class Transposed(nn.Module):
    """A weight whose memory is laid out the other way round; so is its gradient's, then."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH + 1).t()[1:])

    def forward(self, x):
        return F.linear(x, self.weight)


@dataclass
class Layer:
    """A layer, and the parts of parameter names whose gradients are computed in I."""

    make: Any
    in_input_grad: tuple[str, ...] = ()


LAYERS = {
    "linear": Layer(lambda: nn.Linear(WIDTH, WIDTH)),
    "linear without bias": Layer(lambda: nn.Linear(WIDTH, WIDTH, bias=False)),
    "mlp": Layer(lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))),
    "in place": Layer(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))),
    "layer norm": Layer(lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)), ("0.",)),
    "attention": Layer(Attention),
    "conv1d": Layer(lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), ("bias",)),
    "conv1d in groups": Layer(lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2, groups=4)), ("bias",)),
    "conv1d transposed": Layer(lambda: Channels(nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)), ("bias",)),
    "recurrent": Layer(Recurrent),
    "x @ w": Layer(lambda: Lambda(lambda m, x: x @ m.w0, (WIDTH, WIDTH))),
    "x @ w.t()": Layer(lambda: Lambda(lambda m, x: x @ m.w0.t(), (WIDTH, WIDTH))),
    "linear(x, w.t())": Layer(lambda: Lambda(lambda m, x: F.linear(x, m.w0.t()), (WIDTH, WIDTH))),
    "a transposed leaf": Layer(lambda: Transposed()),
    "addmm": Layer(
        lambda: Lambda(lambda m, x: torch.addmm(m.w1, x.reshape(-1, WIDTH), m.w0).view_as(x), (WIDTH, WIDTH), (WIDTH,))
    ),
    "addmm with factors": Layer(
        lambda: Lambda(
            lambda m, x: torch.addmm(m.w1, x.reshape(-1, WIDTH), m.w0, beta=2, alpha=3).view_as(x),
            *[(WIDTH, WIDTH), (WIDTH,)],
        ),
        ("w0", "w1"),
    ),
    "batches": Layer(lambda: Lambda(lambda m, x: torch.bmm(x, m.w0), (2, WIDTH, WIDTH))),
    "a product of weights": Layer(
        lambda: Lambda(lambda m, x: F.linear(x, m.w0 * m.w1), (WIDTH, WIDTH), (WIDTH, WIDTH)), ("w0", "w1")
    ),
    "weight norm": Layer(
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), ("bias", "original0", "original1")
    ),
    "an outer weight": Layer(
        lambda: Lambda(lambda m, x: (m.w0 @ x.transpose(1, 2)).transpose(1, 2), (WIDTH, WIDTH)), ("w0",)
    ),
}


class Watched(nn.Module):
    """A layer that notes at its second forward which of its parameters have a gradient already."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.ready: list[set[str]] = []

    def forward(self, x):
        self.ready.append({name for name, p in self.layer.named_parameters() if p.grad is not None})
        return self.layer(x)


def make(layer):
    torch.manual_seed(0)
    return Watched(layer.make()).double()


def batch(size=4, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(size, 3, WIDTH, dtype=dtype), torch.randn(size, 3, WIDTH, dtype=dtype)


def run(stages, x, y, schedule=WAITING, **options):
    """Two steps that add up."""
    stages = stages if isinstance(stages, list) else [stages]
    with FreezingPipeline(
        stages, num_microbatches=schedule.num_microbatches, loss_fn=F.mse_loss, schedule=schedule, **options
    ) as pipe:
        pipe.step(x, target=y)
        return pipe.step(x, target=y)


def assert_close_grads(model, reference, **tolerance):
    for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
            assert p.grad.dtype == p.dtype
            assert p.grad.stride() == p.stride() or p.grad.is_contiguous()
