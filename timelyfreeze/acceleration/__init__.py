"""Let models run on the package's own operators, without a change in their code."""

from __future__ import annotations

from timelyfreeze.acceleration import huggingface as huggingface  # adds its rules
from timelyfreeze.acceleration import timm as timm
from timelyfreeze.acceleration.apply import Acceleration, accelerate
from timelyfreeze.acceleration.blocks import can_pack, can_rotate, gated, pack, rotary_tables, rotated_heads
from timelyfreeze.acceleration.modules import add_and_norm, norm_stream
from timelyfreeze.acceleration.swap import register_block

__all__ = [
    "Acceleration",
    "accelerate",
    "add_and_norm",
    "can_pack",
    "can_rotate",
    "gated",
    "norm_stream",
    "pack",
    "register_block",
    "rotary_tables",
    "rotated_heads",
]
