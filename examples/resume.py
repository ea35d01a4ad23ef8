"""Stop and go on exactly where training stood, freezing included: save three state dicts, load three.

With a fixed plan the resumed run has the same losses bit for bit. A plan that training finds itself comes from clock
times, so it differs from run to run; here the first run's plan is used for the others.

    python examples/resume.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from timelyfreeze import FreezeConfig, FreezingPipeline, Plan

NUM_MICROBATCHES = 4


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A function of the step alone, so that a resumed run needs no loader state."""
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


class Training:
    """A model, its pipeline and its optimizer."""

    def __init__(self, plan: Plan | None) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
        self.pipe = FreezingPipeline(
            model,
            num_stages=2,
            num_microbatches=NUM_MICROBATCHES,
            loss_fn=nn.functional.mse_loss,
            freeze=FreezeConfig(max_ratio=0.5, plan=plan),
            split_points=[3],
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-3)

    def run(self, first: int, last: int) -> list[float]:
        """Losses of the steps first .. last - 1."""
        losses = []
        for step in range(first, last):
            x, y = batch(step)
            losses.append(float(self.pipe.step(x, target=y).loss))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def save(self, path: Path) -> None:
        state = {
            "model": self.pipe.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "freeze": self.pipe.freeze_state_dict(),
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.pipe.load_freeze_state_dict(state["freeze"])
        self.pipe.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def find_plan() -> Plan:
    """Train until there is a plan: about 20 steps."""
    training = Training(plan=None)
    for step in range(200):
        training.run(step, step + 1)
        if training.pipe.plan is not None:
            training.pipe.close()
            print(f"a plan was found in step {step}: {1e3 * training.pipe.plan.makespan_s:.2f} ms a step")
            return training.pipe.plan
    raise RuntimeError(f"no plan: {training.pipe.report()['failure']}")


def main() -> None:
    """Find a plan, train 20 steps at one go, and again with a stop in the middle."""
    torch.set_num_threads(1)
    plan = find_plan()

    whole = Training(plan)
    expected = whole.run(0, 20)
    whole.pipe.close()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        stopped = Training(plan)
        losses = stopped.run(0, 11)
        stopped.save(path)
        stopped.pipe.close()
        resumed = Training(plan)
        resumed.load(path)
        losses += resumed.run(11, 20)
        resumed.pipe.close()
    assert losses == expected
    print("20 losses, bit for bit the same with a stop after 11")


if __name__ == "__main__":
    main()
