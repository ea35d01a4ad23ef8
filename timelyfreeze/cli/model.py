"""The command's model: a LLaMA-style language model over bytes, as an ``nn.Sequential`` that any pipeline can split.

RMSNorm, rotary attention and SwiGLU as in LLaMA (arXiv 2302.13971, section 2.2), pre-norm, no biases.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from timelyfreeze.acceleration import (
    add_and_norm,
    can_rotate,
    gated,
    norm_stream,
    register_block,
    rotary_tables,
    rotated_heads,
)
from timelyfreeze.cli.config import ModelConfig as ModelConfig
from timelyfreeze.errors import raise_all

VOCABULARY_SIZE = 256
"""Tokens are bytes."""

_INIT_STD = 0.02


def rotary_table(sequence_length: int, head_width: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of rotary position embedding (arXiv 2104.09864, section 3.2).

    Returns:
        Two float32 tensors ``[sequence_length, head_width / 2]``.

    >>> cos, sin = rotary_table(4, 2)
    >>> cos.shape, round(float(sin[1, 0]), 4)
    (torch.Size([4, 1]), 0.8415)
    """
    rates = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.arange(sequence_length, dtype=torch.float64)[:, None] * rates
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of the features of ``x`` ``[..., sequence, head_width]`` by its position's angle."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; ``[batch, sequence, width]`` in and out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)
        cos, sin = rotary_table(config.sequence_length, config.width // config.num_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        cos, sin = self.cos[:length], self.sin[:length]
        query, key, value = (
            project(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = rotate(query, cos, sin).to(value.dtype), rotate(key, cos, sin).to(value.dtype)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class SwiGLU(nn.Module):
    """Gated feed-forward layer (arXiv 2002.05202); ``[batch, sequence, width]`` in and out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden_width, bias=False)
        self.up = nn.Linear(config.width, config.hidden_width, bias=False)
        self.down = nn.Linear(config.hidden_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
    """One pre-norm transformer block; ``[batch, sequence, width]`` in and out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class Head(nn.Module):
    """Final norm and projection to logits: ``[batch, sequence, width]`` to ``[batch, sequence, 256]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.projection = nn.Linear(config.width, VOCABULARY_SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.projection(self.norm(x))
        return output


def _fused_attention(self: Attention, x: Tensor) -> Any:
    width = self.query.out_features // self.num_heads
    tables = rotary_tables(self.cos, self.sin)
    arguments = x, (self.query, self.key, self.value), tables, width
    if not can_rotate(*arguments):
        return NotImplemented
    mixed = functional.scaled_dot_product_attention(*rotated_heads(*arguments), is_causal=True)
    return self.output(mixed.transpose(1, 2).reshape(x.shape))


def _fused_block(self: Block, x: Tensor) -> Tensor:
    y, stream = norm_stream(self.attention_norm, x)
    y, stream = add_and_norm(self.mlp_norm, self.attention(y), stream)
    output: Tensor = stream + self.mlp(y)
    return output


_PROJECTIONS = ("query", "key", "value")
register_block(
    Attention,
    _fused_attention,
    what="queries, keys and values projected at once, rotary positions in one pass",
    parts=dict.fromkeys(_PROJECTIONS, "linear"),
    packs=(_PROJECTIONS,),
)
register_block(
    SwiGLU,
    lambda self, x: self.down(gated(x, self.gate, self.up)),
    what="gate and up projected at once, SwiGLU in one pass",
    parts={"gate": "linear", "up": "linear"},
    packs=(("gate", "up"),),
)
register_block(
    Block,
    _fused_block,
    what="residual sums within the norms",
    parts={"attention_norm": "rms_norm", "mlp_norm": "rms_norm"},
)


def build_model(config: ModelConfig, seed: int, wanted: Collection[int] | None = None) -> nn.Sequential:
    """Build the model with weights that depend on ``config`` and ``seed`` alone.

    Children are ``embedding``, ``block0`` .. and ``head``. Weights come from a generator of their own, so neither the
    global random state nor the later number of stages changes them, and the global state is left as it was.

    Args:
        wanted: numbers of the children to build; the others are on the meta device, without memory. Default: all.

    Raises:
        ValueError: naming every size that is out of range.

    >>> model = build_model(ModelConfig(width=16, num_layers=2, num_heads=2, sequence_length=8), seed=0)
    >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 256])
    """
    raise_all(ValueError, config.problems())
    model = _assemble(config, range(config.num_layers + 2) if wanted is None else wanted)
    generator = torch.Generator().manual_seed(seed)
    # Layers that write into the residual stream start smaller by the square root of their number (GPT-2's rule), so
    # that the stream's variance does not grow with depth.
    residual_std = _INIT_STD / (2 * config.num_layers) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                std = residual_std if name.endswith(("output.weight", "down.weight")) else _INIT_STD
                # What has no memory is drawn all the same, and forgotten: what comes after it must not change.
                target = torch.empty(parameter.shape) if parameter.is_meta else parameter
                target.normal_(0.0, std, generator=generator)
    return model


def without_memory(config: ModelConfig) -> nn.Sequential:
    """The model on the meta device: its names and sizes."""
    return _assemble(config, ())


def _assemble(config: ModelConfig, wanted: Collection[int]) -> nn.Sequential:
    """The children, those not wanted on the meta device; a tied embedding is there wherever the head is."""
    last = config.num_layers + 1
    present = {*wanted, *((0, last) if config.tied and (0 in wanted or last in wanted) else ())}

    def place(index: int) -> AbstractContextManager[object]:
        return nullcontext() if index in present else torch.device("meta")

    with torch.random.fork_rng(devices=[]):
        children: OrderedDict[str, nn.Module] = OrderedDict()
        with place(0):
            children["embedding"] = nn.Embedding(VOCABULARY_SIZE, config.width)
        for index in range(config.num_layers):
            with place(index + 1):
                children[f"block{index}"] = Block(config)
        with place(last):
            head = Head(config)
        children["head"] = head
        if config.tied:
            head.projection.weight = children["embedding"].weight  # type: ignore[assignment]
        return nn.Sequential(children)


def byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy in nats a byte: logits ``[batch, sequence, 256]``, target ``[batch, sequence]`` of int64."""
    return functional.cross_entropy(logits.float().flatten(0, -2), target.flatten())
