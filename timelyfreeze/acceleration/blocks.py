"""What the blocks of many libraries have in common: packed projections, gated layers, rotary positions.

Each function computes what plain modules would. It goes one by one through the modules where they are not ours any
more, are watched by hooks, or where the operators do not take what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from timelyfreeze import ops
from timelyfreeze.acceleration.guards import fits, stands_in, takes
from timelyfreeze.acceleration.modules import call_norm


def can_pack(x: Tensor, linears: Sequence[Any]) -> bool:
    """Whether linear layers may be computed as one."""
    return all(stands_in(linear, "linear") and linear.weight.shape[1:] == x.shape[-1:] for linear in linears) and fits(
        x, *linears
    )


def pack(x: Tensor, linears: Sequence[Any]) -> Tensor:
    """The outputs of linear layers behind each other, by one matrix product; ask ``can_pack`` first.

    >>> pack(torch.ones(1, 2), [nn.Linear(2, 3), nn.Linear(2, 4)]).shape
    torch.Size([1, 7])
    """
    return ops.packed_linear(x, [linear.weight for linear in linears], [linear.bias for linear in linears])


def gated(x: Tensor, gate: nn.Module, up: nn.Module, activation: nn.Module | None = None) -> Tensor:
    """``activation(gate(x)) * up(x)``; the activation is SiLU where none is given.

    >>> gated(torch.ones(1, 2), nn.Linear(2, 3), nn.Linear(2, 3)).shape
    torch.Size([1, 3])
    """
    free = activation is None or stands_in(activation, "silu")
    alike = getattr(gate, "out_features", 0) == getattr(up, "out_features", 1)
    if free and alike and can_pack(x, (gate, up)):
        return ops.swiglu(pack(x, (gate, up)))
    opened: Tensor = functional.silu(gate(x)) if activation is None else activation(gate(x))
    product: Tensor = opened * up(x)
    return product


def rotated_heads(
    x: Tensor,
    projections: tuple[Any, Any, Any],
    tables: tuple[Tensor, Tensor],
    head_width: int,
    norms: tuple[Any, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of an attention, with rotary positions; ask ``can_rotate`` first.

    Args:
        x: ``[batch, length, width]``.
        projections: of queries, keys and values.
        tables: float32 cosines and sines ``[length or more, head_width / 2]``.
        head_width: features a head.
        norms: RMSNorms of each query and each key before they are turned.

    Returns:
        ``[batch, heads, length, head_width]`` each.
    """
    num_heads, num_kv_heads = (projection.out_features // head_width for projection in projections[:2])
    packed = pack(x, projections)
    if norms is None:
        return ops.rope_qkv(packed, *tables, num_heads, num_kv_heads)
    heads = packed.view(*x.shape[:2], -1, head_width)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=-2)
    q, k = (call_norm(norm, part) for norm, part in zip(norms, (q, k), strict=True))
    q, k = ops.rope(q.transpose(1, 2), k.transpose(1, 2), *tables)
    return q, k, v.transpose(1, 2)


def rotary_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables as the operators take them: float32, contiguous. Those of float64 stay, and ``can_rotate`` refuses them.

    >>> rotary_tables(torch.ones(2, 1).bfloat16(), torch.zeros(2, 1))[0].dtype
    torch.float32
    """
    cos, sin = (table if table.dtype == torch.float64 else table.float().contiguous() for table in (cos, sin))
    return cos, sin


def can_rotate(
    x: Tensor,
    projections: tuple[Any, Any, Any],
    tables: tuple[Tensor, Tensor],
    head_width: int,
    norms: tuple[Any, Any] | None = None,
) -> bool:
    """Whether ``rotated_heads`` takes these arguments."""
    if x.ndim != 3 or head_width % 2 or not can_pack(x, projections):
        return False
    if norms is not None:
        # Autocast projects into another dtype than that of the norms.
        own = all(stands_in(norm, "rms_norm") and fits(x, norm) for norm in norms)
        if not own or torch.is_autocast_enabled(x.device.type):
            return False
    q, k, v = (projection.out_features for projection in projections)
    if q % head_width or k % head_width or v != k:
        return False
    return all(
        takes(table)
        and table.dtype == torch.float32
        and table.device == x.device
        and not table.requires_grad  # it would get none
        and table.ndim == 2
        and table.shape[0] >= x.shape[1]
        and table.shape[1] == head_width // 2
        for table in tables
    )
