"""What does a GPT-2 block gain, and what of it do its Conv1D layers (weights stored ``[in, out]``) gain?

Forward and backward; gradients are added to those of the micro-batch before, as in a step of several.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bench.record import interleave, record
from bench.test_ops import timed
from tests.known_models import transformers
from timelyfreeze import accelerate
from timelyfreeze.acceleration.swap import kind_of, restore
from timelyfreeze.runtime.memory import count_saved_bytes


def gpt2_block(width: int) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=width, n_layer=1, n_head=width // 64, attn_pdrop=0.0, resid_pdrop=0.0, _attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    return transformers.models.gpt2.modeling_gpt2.GPT2Block(config, layer_idx=0)


def step_of(block: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], float]:
    def run() -> None:
        x.grad = None
        block(x).backward(grad)

    return timed(run)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("width", [256, 1024])
def test_gpt2_block(width: int, trains: bool) -> None:
    eager = gpt2_block(width).requires_grad_(trains)
    fused, without = copy.deepcopy(eager), copy.deepcopy(eager)
    for block in (fused, without):
        accelerate(block)
    for module in without.modules():
        if kind_of(module) == "conv1d":
            restore(module)
    x = torch.randn(2, 128, width, requires_grad=True)
    grad = torch.randn_like(x)
    saved = {}
    for name, block in (("eager", eager), ("fused", fused)):
        with count_saved_bytes(block.parameters()) as counted:
            block(x)
        saved[name] = counted.peak_bytes
    rounds = 60 if width == 256 else 15
    found = interleave(step_of(eager, x, grad), step_of(fused, x, grad), rounds=rounds)
    of_conv1d = interleave(step_of(without, x, grad), step_of(fused, x, grad), rounds=rounds)
    print(
        f"GPT-2 block, width {width}, {'trained' if trains else 'frozen'}: eager / fused {found}; "
        f"without / with Conv1D {of_conv1d}; saved {saved}"
    )
    record(
        "gpt2_block",
        width=width,
        trains=trains,
        eager_over_fused=found,
        without_over_with_conv1d=of_conv1d,
        saved_over_eager=saved["fused"] / saved["eager"],
    )
