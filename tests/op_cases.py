"""The fused operators beside their plain formulas: what every test of them is run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from timelyfreeze import ops

EPS = 1e-5


@dataclass
class OpCase:
    """One operator with its arguments.

    Attributes:
        fused, plain: from the tensors to one output or several.
        shapes: of the tensors, by name; weights are those whose names are in ``weights``.
    """

    fused: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    weights: tuple[str, ...] = ()
    extra: tuple[Any, ...] = field(default=())

    def tensors(self, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in self.shapes.items()
        }
        return {name: tensor.to(dtype) for name, tensor in made.items()}


def outputs(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[: x.shape[-2]].to(x.dtype), sin[: x.shape[-2]].to(x.dtype)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def tables(length: int, half: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length)[:, None] * 100.0 ** (-torch.arange(half) / half)
    return angles.cos().float(), angles.sin().float()


COS, SIN = tables(9, 3)


def _plain_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv.unflatten(-1, (8, 6)).transpose(1, 2)
    q, k, v = heads.split([4, 2, 2], dim=1)
    return _turn(q, COS, SIN), _turn(k, COS, SIN), v


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return plain


def _tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


X = (3, 5, 12)
TARGET = torch.tensor([0, 6, -100, 3, 2, 2, 1])

CASES: dict[str, OpCase] = {
    "rms_norm": OpCase(
        lambda x, w: ops.rms_norm(x, w, EPS), lambda x, w: F.rms_norm(x, (12,), w, EPS), {"x": X, "w": (12,)}, ("w",)
    ),
    "rms_norm without weight": OpCase(
        lambda x: ops.rms_norm(x, None, EPS), lambda x: F.rms_norm(x, (12,), None, EPS), {"x": X}
    ),
    "rms_norm and residual": OpCase(
        lambda x, r, w: ops.rms_norm(x, w, EPS, residual=r),
        lambda x, r, w: (F.rms_norm(x + r, (12,), w, EPS), x + r),
        {"x": X, "r": X, "w": (12,)},
        ("w",),
    ),
    "rms_norm on a stream": OpCase(
        lambda x, w: ops.rms_norm(x, w, EPS, stream=True),
        lambda x, w: (F.rms_norm(x, (12,), w, EPS), x * 1),
        {"x": X, "w": (12,)},
        ("w",),
    ),
    "layer_norm": OpCase(
        lambda x, w, b: ops.layer_norm(x, w, b, EPS),
        lambda x, w, b: F.layer_norm(x, (12,), w, b, EPS),
        {"x": X, "w": (12,), "b": (12,)},
        ("w", "b"),
    ),
    "layer_norm without bias": OpCase(
        lambda x, w: ops.layer_norm(x, w, None, EPS),
        lambda x, w: F.layer_norm(x, (12,), w, None, EPS),
        {"x": X, "w": (12,)},
        ("w",),
    ),
    "layer_norm and residual": OpCase(
        lambda x, r, w, b: ops.layer_norm(x, w, b, EPS, residual=r),
        lambda x, r, w, b: (F.layer_norm(x + r, (12,), w, b, EPS), x + r),
        {"x": X, "r": X, "w": (12,), "b": (12,)},
        ("w", "b"),
    ),
    "silu": OpCase(ops.silu, F.silu, {"x": X}),
    "gelu": OpCase(ops.gelu, F.gelu, {"x": X}),
    "gelu tanh": OpCase(lambda x: ops.gelu(x, "tanh"), _tanh, {"x": X}),
    "swiglu": OpCase(ops.swiglu, _gated(F.silu), {"x": X}),
    "geglu": OpCase(ops.geglu, _gated(F.gelu), {"x": X}),
    "geglu tanh": OpCase(lambda x: ops.geglu(x, "tanh"), _gated(_tanh), {"x": X}),
    "rope": OpCase(
        lambda q, k: ops.rope(q, k, COS, SIN),
        lambda q, k: (_turn(q, COS, SIN), _turn(k, COS, SIN)),
        {"q": (2, 4, 5, 6), "k": (2, 2, 5, 6)},
    ),
    "rope from an offset": OpCase(
        lambda q, k: ops.rope(q, k, COS, SIN, offset=3),
        lambda q, k: (_turn(q, COS[3:], SIN[3:]), _turn(k, COS[3:], SIN[3:])),
        {"q": (2, 4, 5, 6), "k": (2, 2, 5, 6)},
    ),
    "rope_qkv": OpCase(lambda x: ops.rope_qkv(x, COS, SIN, 4, 2), _plain_qkv, {"x": (2, 5, 48)}),
    "packed_linear": OpCase(
        lambda x, a, b, c: ops.packed_linear(x, [a, b], [None, c]),
        lambda x, a, b, c: torch.cat([F.linear(x, a), F.linear(x, b, c)], -1),
        {"x": X, "a": (4, 12), "b": (3, 12), "c": (3,)},
        ("a", "b", "c"),
    ),
    "packed_linear, transposed": OpCase(
        lambda x, a, b, c: ops.packed_linear(x, [a, b], [None, c], transposed=True),
        lambda x, a, b, c: torch.cat([F.linear(x, a.t()), F.linear(x, b.t(), c)], -1),
        {"x": X, "a": (12, 4), "b": (12, 3), "c": (3,)},
        ("a", "b", "c"),
    ),
}

LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothed": {"label_smoothing": 0.2},
    "with z-loss": {"z_loss": 0.1, "label_smoothing": 0.1, "reduction": "sum"},
    "in chunks of 3": {"chunk_rows": 3},
    "another ignored class": {"ignore_index": 2, "z_loss": 0.05},
}


def _plain_loss(x: Tensor, w: Tensor, b: Tensor, options: dict[str, Any]) -> Tensor:
    target = torch.where(TARGET == -100, options.get("ignore_index", -100), TARGET)
    logits = F.linear(x, w, b)
    counts = target != options.get("ignore_index", -100)
    reduction = options.get("reduction", "mean")
    loss = F.cross_entropy(
        logits,
        target,
        ignore_index=options.get("ignore_index", -100),
        label_smoothing=options.get("label_smoothing", 0.0),
        reduction=reduction,
    )
    extra = (logits.logsumexp(-1).square() * counts).sum() * options.get("z_loss", 0.0)
    return loss + (extra / counts.sum() if reduction == "mean" else extra)


for _name, _options in LOSSES.items():

    def _fused_loss(x: Tensor, w: Tensor, b: Tensor, options: dict[str, Any] = _options) -> Tensor:
        target = torch.where(TARGET == -100, options.get("ignore_index", -100), TARGET)
        return ops.linear_cross_entropy(x, w, target, bias=b, **options)

    def _plain(x: Tensor, w: Tensor, b: Tensor, options: dict[str, Any] = _options) -> Tensor:
        return _plain_loss(x, w, b, options)

    CASES[f"linear_cross_entropy, {_name}"] = OpCase(
        _fused_loss, _plain, {"x": (7, 5), "w": (8, 5), "b": (8,)}, ("w", "b")
    )
