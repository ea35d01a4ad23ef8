"""One script for one process and for many: each rank of the pipeline is a process that torchrun starts.

    python examples/many_processes.py
    torchrun --nproc-per-node 2 examples/many_processes.py

Both print the same losses. A rank makes its own stages only, and brings what its stages need: the first the input, the
last the target.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from timelyfreeze import FreezingPipeline

NUM_STAGES = 2


def make_stage() -> nn.Module:
    """Both stages are alike here."""
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def main() -> None:
    """Five steps on this rank."""
    is_one_of_many = "RANK" in os.environ  # torchrun says so
    if is_one_of_many:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights, however many processes there are
    with FreezingPipeline(
        stages=[make_stage] * NUM_STAGES,
        num_microbatches=4,
        loss_fn=nn.functional.mse_loss,
        process_group=dist.group.WORLD if is_one_of_many else None,
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        for step in range(5):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            result = pipe.step(x, target=x.relu())
            optimizer.step()
            optimizer.zero_grad()
            if not is_one_of_many or dist.get_rank() == 0:
                print(f"step {step}: loss {result.loss:.6f}")  # known on every rank
    if is_one_of_many:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
