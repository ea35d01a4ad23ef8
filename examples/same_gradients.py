"""The same gradients, sooner: a step of more micro-batches, of which every parameter trains on as many as before.

The extra micro-batches fill the time in which stages would wait for each other. Two stages gain little; the gain grows
with the number of stages.

    python examples/same_gradients.py
"""

from __future__ import annotations

import copy
from statistics import median

import torch
from torch import Tensor, nn

from timelyfreeze import ActionCosts, FreezeConfig, FreezingPipeline
from timelyfreeze.planner import choose_microbatches

NUM_LIVE = 4  # micro-batches that every parameter trains on in a step
SAMPLES = 64  # in a micro-batch


def batch(step: int, num_microbatches: int) -> tuple[Tensor, Tensor]:
    """A function of the step alone."""
    x = torch.randn(num_microbatches * SAMPLES, 256, generator=torch.Generator().manual_seed(step))
    return x, x.relu()


def measure(model: nn.Sequential) -> ActionCosts:
    """How long every action of a plain step takes: train a copy until a plan has been made from that."""
    with FreezingPipeline(
        copy.deepcopy(model),
        num_stages=2,
        num_microbatches=NUM_LIVE,
        loss_fn=nn.functional.mse_loss,
        freeze=FreezeConfig(mode="lp"),
        split_points=[2],
    ) as pipe:
        for step in range(200):
            x, y = batch(step, NUM_LIVE)
            pipe.step(x, target=y)
            if pipe.plan is not None:
                return pipe.plan.costs
        raise RuntimeError(f"no plan: {pipe.report()['failure']}")


def train(model: nn.Sequential, num_microbatches: int, freeze: FreezeConfig | None, num_steps: int) -> float:
    """Train and print what a step takes; returns the mean loss of the last ten steps."""
    with FreezingPipeline(
        model,
        num_stages=2,
        num_microbatches=num_microbatches,
        loss_fn=nn.functional.mse_loss,
        freeze=freeze,
        split_points=[2],
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        losses, times_s = [], []
        for step in range(num_steps):
            x, y = batch(step, num_microbatches)
            result = pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(result.loss))
            times_s.append(result.step_time_s)
    loss = sum(losses[-10:]) / 10
    print(f"{num_microbatches} micro-batches: {1e3 * median(times_s[-20:]):.2f} ms a step, loss {loss:.4f}")
    return loss


def main(num_steps: int = 120) -> tuple[float, float]:
    """Compare plain steps of NUM_LIVE micro-batches with larger ones that freeze; returns the losses of both."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3)), nn.Linear(256, 256))
    plan = choose_microbatches("1f1b", measure(model), live_microbatches=NUM_LIVE)
    num_microbatches = plan.schedule.num_microbatches
    print(f"chosen: {num_microbatches} micro-batches, of which every parameter trains on {NUM_LIVE}")
    plain = train(copy.deepcopy(model), NUM_LIVE, None, num_steps)
    larger = train(model, num_microbatches, FreezeConfig(live_microbatches=NUM_LIVE), num_steps)
    return plain, larger


if __name__ == "__main__":
    main()
