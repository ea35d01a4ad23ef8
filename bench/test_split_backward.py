"""What does it cost to take the backward of a LLaMA stage apart into I and W: ours, and torch.distributed.pipelining's?

A stage between two small ones, all on one rank, so that only the actions' own times count. Several micro-batches a
step: from the second on gradients are added to, as in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from bench.record import interleave, record
from timelyfreeze import Action, FreezingPipeline, Kind, Schedule
from timelyfreeze.cli.model import Block, ModelConfig

NUM_BLOCKS, NUM_MICROBATCHES, MICROBATCH_SIZE = 2, 4, 2


def one_rank(kinds: str) -> Schedule:
    """Micro-batch after micro-batch; of stage 1 the kinds given, W one micro-batch late."""
    order: list[Action] = []
    for m in range(NUM_MICROBATCHES):
        order += [Action(stage, Kind.F, m) for stage in range(3)]
        order += [Action(2, Kind.B, m), Action(1, Kind(kinds[0]), m), Action(0, Kind.B, m)]
        if kinds == "IW" and m > 0:
            order.append(Action(1, Kind.W, m - 1))
    if kinds == "IW":
        order.append(Action(1, Kind.W, NUM_MICROBATCHES - 1))
    return Schedule([order], name=kinds)


def blocks(config: ModelConfig) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(config) for _ in range(NUM_BLOCKS)))


def pipeline_step(config: ModelConfig, kinds: str) -> Callable[[], float]:
    """A function that runs a step and returns the seconds of stage 1's backward, I and W together, a micro-batch."""
    width = config.width
    stages = [nn.Linear(width, width), blocks(config), nn.Linear(width, 1)]
    pipe = FreezingPipeline(
        stages, num_microbatches=NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss, schedule=one_rank(kinds)
    )
    x = torch.randn(NUM_MICROBATCHES * MICROBATCH_SIZE, config.sequence_length, width)
    target = torch.randn(*x.shape[:2], 1)

    def step() -> float:
        pipe.zero_grad(set_to_none=True)
        times_s = pipe.step(x, target=target).times.durations_s
        by_microbatch = [sum(times_s[Action(1, Kind(kind), m)] for kind in kinds) for m in range(1, NUM_MICROBATCHES)]
        return median(by_microbatch)

    return step


def plain_step(
    config: ModelConfig, backward: Callable[[Tensor, Tensor, Tensor, nn.Module], None]
) -> Callable[[], float]:
    """The same for the bare stage: ``backward(output, its gradient, input, stage)``."""
    stage = blocks(config)
    x = torch.randn(MICROBATCH_SIZE, config.sequence_length, config.width)

    def step() -> float:
        stage.zero_grad(set_to_none=True)
        times_s = []
        for _ in range(NUM_MICROBATCHES):
            given = x.clone().requires_grad_()
            output = stage(given)
            grad = torch.ones_like(output)
            start = time.perf_counter()
            backward(output, grad, given, stage)
            times_s.append(time.perf_counter() - start)
        return median(times_s[1:])

    return step


def whole(output: Tensor, grad: Tensor, given: Tensor, stage: nn.Module) -> None:
    output.backward(grad)


def torch_split(output: Tensor, grad: Tensor, given: Tensor, stage: nn.Module) -> None:
    _, groups = stage_backward_input([output], [grad], [given], stage.parameters())
    stage_backward_weight(stage.parameters(), groups)


@pytest.mark.parametrize("width", [256, 1024])
def test_split_backward(width: int) -> None:
    config = ModelConfig(width=width)
    rounds = 60 if width == 256 else 10
    ours = interleave(pipeline_step(config, "IW"), pipeline_step(config, "B"), rounds)
    torchs = interleave(plain_step(config, torch_split), plain_step(config, whole), rounds)
    whole_ratio = interleave(pipeline_step(config, "B"), plain_step(config, whole), rounds)
    print(f"\nwidth {width}: I and W / B: {ours}")
    print(f"torch.distributed.pipelining's split / backward(): {torchs}")
    print(f"B / backward(): {whole_ratio}")
    record(
        "split_backward",
        width=width,
        split_over_whole=ours,
        torch_split_over_whole=torchs,
        whole_over_plain=whole_ratio,
    )
