"""What a benchmark runs: stages, a batch and a loss, built the same in every process from importable functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from timelyfreeze.cli.model import VOCABULARY_SIZE, ModelConfig, build_model, byte_loss

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """One training step. Fields are functions that a worker process can import, so no lambdas.

    Args:
        make_stages: builds the stage modules, in order.
        make_batch: builds (input, target); the first dimension is cut into micro-batches.
        loss_fn: (output, target) -> mean loss of a micro-batch.
        num_microbatches: divides the batch evenly.
    """

    make_stages: Callable[[], list[nn.Module]]
    make_batch: Callable[[], Batch]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    num_microbatches: int
    seed: int = 0

    def build(self) -> tuple[list[nn.Module], Batch]:
        """Stages and batch: equal bit for bit wherever this is called."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.make_stages(), self.make_batch()


def linear_stages(num_stages: int, width: int, num_layers: int) -> list[nn.Module]:
    return [nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers))) for _ in range(num_stages)]


def mlp_stages(num_stages: int, blocks_per_stage: int, width: int) -> list[nn.Module]:
    """Stages of Linear (to 4 x width), GELU, Linear blocks."""

    def block() -> list[nn.Module]:
        return [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]

    return [nn.Sequential(*(m for _ in range(blocks_per_stage) for m in block())) for _ in range(num_stages)]


def normal_batch(num_samples: int, width: int) -> Batch:
    return torch.randn(num_samples, width), torch.randn(num_samples, width)


def language_model_stages(num_stages: int, config: ModelConfig) -> list[nn.Module]:
    """The main job's model, its blocks shared out evenly."""
    model = list(build_model(config, 0).children())
    bounds = [len(model) * stage // num_stages for stage in range(num_stages + 1)]
    return [nn.Sequential(*model[a:b]) for a, b in itertools.pairwise(bounds)]


def byte_batch(num_sequences: int, sequence_length: int) -> Batch:
    tokens = torch.randint(VOCABULARY_SIZE, (num_sequences, sequence_length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def language_model(num_stages: int = 2, microbatch_size: int = 2, num_microbatches: int = 8) -> Workload:
    """The main job's default model and batch."""
    config = ModelConfig()
    return Workload(
        partial(language_model_stages, num_stages, config),
        partial(byte_batch, num_microbatches * microbatch_size, config.sequence_length),
        byte_loss,
        num_microbatches,
    )


def host_overhead(num_layers: int = 1) -> Workload:
    """2 stages of Linear(4, 4), 64 micro-batches of 4 samples: there is next to no work, so the host's time shows."""
    return Workload(
        partial(linear_stages, 2, 4, num_layers), partial(normal_batch, 64 * 4, 4), nn.functional.mse_loss, 64
    )


def mlp(blocks_per_stage: int = 2, width: int = 256, microbatch_size: int = 128) -> Workload:
    """2 stages of MLP blocks, 8 micro-batches: the arithmetic dominates."""
    return Workload(
        partial(mlp_stages, 2, blocks_per_stage, width),
        partial(normal_batch, 8 * microbatch_size, width),
        nn.functional.mse_loss,
        8,
    )
