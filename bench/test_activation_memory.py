"""How many bytes does a LLaMA block keep between forward and backward, trained whole and at freeze ratio 0.8?"""

from __future__ import annotations

import copy
from statistics import mean

import numpy as np
import pytest
import torch

from bench.record import record
from timelyfreeze.cli.model import Block, ModelConfig
from timelyfreeze.freeze import MaskDrawer, parameter_work, record_forward
from timelyfreeze.freeze.rates import nominal_rates
from timelyfreeze.runtime.memory import count_saved_bytes

RATIO, NUM_MICROBATCHES, NUM_STEPS = 0.8, 8, 16


def saved_bytes(block: Block, live: np.ndarray, shape: tuple[int, ...]) -> int:
    for parameter, alive in zip(block.parameters(), live, strict=True):
        parameter.requires_grad_(bool(alive))
    x = torch.randn(shape, requires_grad=True)  # above the cut: the input gradient is wanted
    with count_saved_bytes(block.parameters()) as saved:
        block(x)
    block.requires_grad_(True)
    return saved.peak_bytes


@pytest.mark.parametrize("policy", ["random", "grouped"])
@pytest.mark.parametrize("width", [256, 1024])
def test_activation_memory(policy: str, width: int) -> None:
    config = ModelConfig(width=width)
    block = Block(config)
    shape = (2, config.sequence_length, width)
    with record_forward(block) as profile:
        block(torch.randn(shape))
    work = parameter_work(profile, nominal_rates)
    trainable = np.ones(len(work.names), dtype=bool)
    drawer = MaskDrawer([work, copy.copy(work)], [trainable] * 2, NUM_MICROBATCHES, policy=policy)
    ratios = np.array([[0.0] * NUM_MICROBATCHES, [RATIO] * NUM_MICROBATCHES])
    kept = [
        saved_bytes(block, live, shape)
        for step in range(NUM_STEPS)
        for live in drawer.draw(step, ratios, np.zeros(2))[1]
    ]
    plain = saved_bytes(block, trainable, shape)
    ratio = mean(kept) / plain
    print(f"\nwidth {width}, {policy}: {mean(kept) / 2**20:.2f} MiB of {plain / 2**20:.2f} MiB: {ratio:.3f}")
    record("activation_memory", width=width, policy=policy, plain_bytes=plain, frozen_bytes=mean(kept), ratio=ratio)
