"""This package on a workload, with the step() -> seconds of the baselines."""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.workloads import Workload
from timelyfreeze import FreezingPipeline


class OurPipeline:
    """A pipeline over the workload's stages. ``step`` measures what the baselines measure: one call, no optimizer."""

    def __init__(self, workload: Workload, **options: Any) -> None:
        stages, (self.x, self.y) = workload.build()
        self.pipe = FreezingPipeline(
            stages, num_microbatches=workload.num_microbatches, loss_fn=workload.loss_fn, **options
        )
        self.loss = float("nan")
        self.last: Any = None

    def step(self) -> float:
        self.pipe.zero_grad(set_to_none=True)
        start = time.perf_counter()
        self.last = self.pipe.step(self.x, target=self.y)
        seconds = time.perf_counter() - start
        self.loss = float(self.last.loss)
        return seconds

    def step_until_planned(self, most_steps: int = 100) -> None:
        """Step until the plan is in force at full strength: in peace, since what others do would be in the bounds."""
        for _ in range(most_steps):
            self.step()
            if self.last.phase == "steady" and self.pipe.plan is not None:
                return
        raise RuntimeError(f"no plan after {most_steps} steps: {self.pipe.report()['failure']}")

    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.pipe.parameters()]

    def __enter__(self) -> OurPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
