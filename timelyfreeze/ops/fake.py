"""What the operators return, as shapes: for torch.compile and other tracers, which run them on tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from timelyfreeze import _C as _C  # registers the operators


def _sums_of(x: Tensor) -> torch.dtype:
    """The dtype of statistics and losses."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(0, dtype=dtype or like.dtype)


def _norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    sums = _sums_of(x)
    return (
        y,
        torch.empty_like(y) if residual is not None else _empty(x),
        x.new_empty(rows if keep and centered else 0, dtype=sums),
        x.new_empty(rows if keep else 0, dtype=sums),
    )


def _norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    centered: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    vector = h if weight is None else weight
    width = h.shape[-1]
    return (
        torch.empty_like(h, memory_format=torch.contiguous_format),
        vector.new_empty(width if wants_weight else 0),
        vector.new_empty(width if wants_bias else 0),
    )


def _activation(x: Tensor, name: str, gated: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2) if gated else x.new_empty(x.shape)


def _activation_backward(dy: Tensor, x: Tensor, name: str, gated: bool) -> Tensor:
    return x.new_empty(x.shape)


def _rope_turn(x: Tensor, cosines: Tensor, sines: Tensor, offset: int, inverse: bool) -> Tensor:
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def _linear_cross_entropy_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_rows: int,
    wants_x: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = _sums_of(x)
    return (
        x.new_empty((), dtype=sums),
        x.new_empty(x.shape) if wants_x else _empty(x),
        weight.new_empty(weight.shape, dtype=sums) if wants_weight else _empty(x, sums),
        weight.new_empty(weight.shape[0], dtype=sums) if wants_bias else _empty(x, sums),
    )


_FAKES: dict[str, Callable[..., Any]] = {
    "norm_forward": _norm_forward,
    "norm_backward": _norm_backward,
    "activation": _activation,
    "activation_backward": _activation_backward,
    "rope_turn": _rope_turn,
    "linear_cross_entropy_forward": _linear_cross_entropy_forward,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"timelyfreeze::{_name}", _fake)
