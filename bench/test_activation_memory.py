"""How many bytes does a LLaMA block keep between forward and backward: whole, at freeze ratio 0.8, below a cut?"""

from __future__ import annotations

import copy
from statistics import mean

import numpy as np
import pytest
import torch
from torch import nn

from bench.record import record
from timelyfreeze import ActionCosts, FreezeConfig, FreezingPipeline, Kind, Plan, create_schedule
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


class CountingBlock(Block):
    """Notes the bytes that each of its forwards keeps."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.kept_bytes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with count_saved_bytes(self.parameters()) as saved:
            y: torch.Tensor = super().forward(x)
        self.kept_bytes.append(saved.total_bytes)
        return y


@pytest.mark.parametrize("width", [256, 1024])
def test_below_the_cut(width: int) -> None:
    """Two blocks as two stages of a running pipeline; every other micro-batch trains nothing in the first."""
    config = ModelConfig(width=width)
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    costs = ActionCosts.uniform(schedule, forward_s=1.0, backward_s=2.0, frozen_backward_s=1.0)
    cut = {a: 1.0 for a in schedule.actions if a.kind is Kind.B and a.stage == 0 and a.microbatch % 2}
    plan = Plan.of_ratios(schedule, costs, cut, max_ratio=0.5, objective_s=0.0)
    blocks = [CountingBlock(config) for _ in range(2)]
    x = torch.randn(4 * 2, config.sequence_length, width)
    with FreezingPipeline(
        blocks,
        loss_fn=nn.functional.mse_loss,
        schedule=schedule,
        num_microbatches=4,
        freeze=FreezeConfig(plan=plan, ramp_steps=0),
    ) as pipe:
        for _ in range(2):  # the first step freezes nothing: the parameters' work is found out
            for block in blocks:
                block.kept_bytes.clear()
            pipe.step(x, target=torch.zeros_like(x))
    whole, below = mean(blocks[0].kept_bytes[::2]), mean(blocks[0].kept_bytes[1::2])
    print(
        f"\nwidth {width}: {below / 2**20:.2f} MiB below the cut, {whole / 2**20:.2f} MiB of a micro-batch without one"
    )
    record("activation_memory", width=width, policy="cut", plain_bytes=whole, frozen_bytes=below, ratio=below / whole)
    assert below == 0
