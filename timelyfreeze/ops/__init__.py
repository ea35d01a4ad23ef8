"""Operators whose backward is one pass where their weights are frozen; forward and backward are kernels of our own.

What requires grad when forward runs decides: all of it (trainable), the input alone (weights frozen), or nothing, so
that no graph is recorded and nothing is kept. Formulas, sources and bytes moved stand in ``csrc/kernels``.
"""

from __future__ import annotations

from timelyfreeze.ops import fake as fake  # what torch.compile needs to know
from timelyfreeze.ops.functional import (
    embedding,
    geglu,
    gelu,
    layer_norm,
    linear_cross_entropy,
    packed_linear,
    rms_norm,
    rope,
    rope_qkv,
    silu,
    swiglu,
)

__all__ = [
    "embedding",
    "geglu",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "packed_linear",
    "rms_norm",
    "rope",
    "rope_qkv",
    "silu",
    "swiglu",
]
