"""Train your own nn.Sequential in two pipeline stages, and let the pipeline plan what to leave out.

python examples/own_model.py
"""

from __future__ import annotations

import torch
from torch import nn

from timelyfreeze import FreezeConfig, FreezingPipeline


def main(num_steps: int = 60) -> float:
    """Fit a small network to a sine; returns the last loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # one thread a stage
    layers: list[nn.Module] = [nn.Linear(1, 256), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(256, 1))

    with FreezingPipeline(
        model,
        num_stages=2,
        num_microbatches=8,
        schedule="1f1b",
        loss_fn=nn.functional.mse_loss,
        freeze=FreezeConfig(max_ratio=0.5),
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        for step in range(num_steps):
            x = torch.rand(1024, 1) * 6
            result = pipe.step(x, target=x.sin())
            torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == num_steps - 1:
                print(
                    f"step {step:3d}  {result.phase:<13}  loss {result.loss:.4f}  "
                    f"{1e3 * result.step_time_s:6.2f} ms  {100 * result.freeze_ratio:3.0f} % frozen"
                )
        if pipe.plan is not None:
            print(
                f"planned {1e3 * pipe.plan.makespan_s:.2f} ms a step, "
                f"{1e3 * pipe.plan.unfrozen_makespan_s:.2f} ms with nothing frozen"
            )
    return float(result.loss)


if __name__ == "__main__":
    main()
