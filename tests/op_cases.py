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
    cos, sin = (table[: x.shape[-2]].to(x) for table in (cos, sin))
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def tables(length: int, half: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length)[:, None] * 100.0 ** (-torch.arange(half) / half)
    return angles.cos().float(), angles.sin().float()


COS, SIN = tables(9, 3)


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return plain


def _tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def norm_cases(shape: tuple[int, ...]) -> dict[str, OpCase]:
    """RMSNorm and LayerNorm of inputs of this shape, with and without a residual stream and weights."""
    size = shape[-1:]
    x, w, b, r = {"x": shape}, {"w": size}, {"b": size}, {"r": shape}
    return {
        "rms_norm": OpCase(
            lambda x, w: ops.rms_norm(x, w, EPS), lambda x, w: F.rms_norm(x, size, w, EPS), x | w, ("w",)
        ),
        "rms_norm without weight": OpCase(
            lambda x: ops.rms_norm(x, None, EPS), lambda x: F.rms_norm(x, size, None, EPS), x
        ),
        "rms_norm and residual": OpCase(
            lambda x, r, w: ops.rms_norm(x, w, EPS, residual=r),
            lambda x, r, w: (F.rms_norm(x + r, size, w, EPS), x + r),
            x | r | w,
            ("w",),
        ),
        "rms_norm on a stream": OpCase(
            lambda x, w: ops.rms_norm(x, w, EPS, stream=True),
            lambda x, w: (F.rms_norm(x, size, w, EPS), x * 1),
            x | w,
            ("w",),
        ),
        "layer_norm": OpCase(
            lambda x, w, b: ops.layer_norm(x, w, b, EPS),
            lambda x, w, b: F.layer_norm(x, size, w, b, EPS),
            x | w | b,
            ("w", "b"),
        ),
        "layer_norm without bias": OpCase(
            lambda x, w: ops.layer_norm(x, w, None, EPS),
            lambda x, w: F.layer_norm(x, size, w, None, EPS),
            x | w,
            ("w",),
        ),
        "layer_norm and residual": OpCase(
            lambda x, r, w, b: ops.layer_norm(x, w, b, EPS, residual=r),
            lambda x, r, w, b: (F.layer_norm(x + r, size, w, b, EPS), x + r),
            x | r | w | b,
            ("w", "b"),
        ),
    }


def activation_cases(shape: tuple[int, ...]) -> dict[str, OpCase]:
    """Activations, and the gated ones where the last dimension is even."""
    x = {"x": shape}
    plain = {
        "silu": OpCase(ops.silu, F.silu, x),
        "gelu": OpCase(ops.gelu, F.gelu, x),
        "gelu tanh": OpCase(lambda x: ops.gelu(x, "tanh"), _tanh, x),
    }
    gated = {
        "swiglu": OpCase(ops.swiglu, _gated(F.silu), x),
        "geglu": OpCase(ops.geglu, _gated(F.gelu), x),
        "geglu tanh": OpCase(lambda x: ops.geglu(x, "tanh"), _gated(_tanh), x),
    }
    return plain | (gated if shape[-1] % 2 == 0 else {})


def rope_cases(batch: int, heads: int, kv_heads: int, length: int, width: int) -> dict[str, OpCase]:
    """Rotary positions, of queries and keys apart and of a packed projection."""
    cos, sin = tables(length + 4, width // 2)
    apart = {"q": (batch, heads, length, width), "k": (batch, kv_heads, length, width)}

    def on(x: Tensor) -> tuple[Tensor, Tensor]:
        return cos.to(x.device), sin.to(x.device)

    def plain_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = qkv.unflatten(-1, (heads + 2 * kv_heads, width)).transpose(1, 2)
        q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)
        return _turn(q, cos, sin), _turn(k, cos, sin), v

    return {
        "rope": OpCase(
            lambda q, k: ops.rope(q, k, *on(q)), lambda q, k: (_turn(q, cos, sin), _turn(k, cos, sin)), apart
        ),
        "rope from an offset": OpCase(
            lambda q, k: ops.rope(q, k, *on(q), offset=3),
            lambda q, k: (_turn(q, cos[3:], sin[3:]), _turn(k, cos[3:], sin[3:])),
            apart,
        ),
        "rope_qkv": OpCase(
            lambda x: ops.rope_qkv(x, *on(x), heads, kv_heads),
            plain_qkv,
            {"x": (batch, length, (heads + 2 * kv_heads) * width)},
        ),
    }


def linear_cases(shape: tuple[int, ...], features: tuple[int, int]) -> dict[str, OpCase]:
    """Two layers of one input, the second with a bias; their weights as they are, and stored [in, out]."""
    width, (first, second) = shape[-1], features
    return {
        "packed_linear": OpCase(
            lambda x, a, b, c: ops.packed_linear(x, [a, b], [None, c]),
            lambda x, a, b, c: torch.cat([F.linear(x, a), F.linear(x, b, c)], -1),
            {"x": shape, "a": (first, width), "b": (second, width), "c": (second,)},
            ("a", "b", "c"),
        ),
        "packed_linear, transposed": OpCase(
            lambda x, a, b, c: ops.packed_linear(x, [a, b], [None, c], transposed=True),
            lambda x, a, b, c: torch.cat([F.linear(x, a.t()), F.linear(x, b.t(), c)], -1),
            {"x": shape, "a": (width, first), "b": (width, second), "c": (second,)},
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


def _plain_loss(x: Tensor, w: Tensor, b: Tensor, target: Tensor, options: dict[str, Any]) -> Tensor:
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


def loss_case(options: dict[str, Any], target: Tensor, width: int, num_classes: int) -> OpCase:
    """A head and its loss; rows of ``target`` that are -100 are ignored, whatever the ignored class is."""
    target = torch.where(target == -100, options.get("ignore_index", -100), target)
    return OpCase(
        lambda x, w, b: ops.linear_cross_entropy(x, w, target.to(x.device), bias=b, **options),
        lambda x, w, b: _plain_loss(x, w, b, target.to(x.device), options),
        {"x": (len(target), width), "w": (num_classes, width), "b": (num_classes,)},
        ("w", "b"),
    )


X = (3, 5, 12)
TARGET = torch.tensor([0, 6, -100, 3, 2, 2, 1])
CASES = (
    norm_cases(X)
    | activation_cases(X)
    | rope_cases(batch=2, heads=4, kv_heads=2, length=5, width=6)
    | linear_cases(X, (4, 3))
    | {f"linear_cross_entropy, {name}": loss_case(options, TARGET, 5, 8) for name, options in LOSSES.items()}
)
