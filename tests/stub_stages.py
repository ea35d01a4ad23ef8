"""Run a plan on the real runtime with stages of next to no work, and see that exactly the plan is what happens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn

from timelyfreeze import FreezeConfig, FreezingPipeline, Plan
from timelyfreeze.freeze.step_masks import StepMasks
from timelyfreeze.schedule import Action, Kind, Schedule, data_dependencies

_TIMEOUT_S = 60.0


class Stub(nn.Module):
    """A stage of four small tensors. Its input carries the micro-batch's number; it notes what runs, as it runs.

    Args:
        log: gets the stage's actions, shared by all stages.
    """

    def __init__(self, stage: int, log: list[Action]) -> None:
        super().__init__()
        self.stage, self.log = stage, log
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        microbatch = int(number[0])
        self.log.append(Action(self.stage, Kind.F, microbatch))
        y = self.layers(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.log.append(Action(self.stage, Kind.B, microbatch)))
        return y, number


def loss_fn(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output[0], target)


def run_plan(plan: Plan, drawn: list[StepMasks], num_steps: int = 2) -> None:
    """Train some steps under a plan and assert that each runs what its masks left to run, in the schedule's order.

    Args:
        drawn: where the masks of every step turn up: the fixture of this name.
    """
    schedule, log = plan.schedule, []
    torch.manual_seed(0)
    stages = [Stub(stage, log) for stage in range(schedule.num_stages)]
    frozen_by_user = [stage for stage in range(schedule.num_stages) if _has_nothing_to_train(plan, stage)]
    for stage in frozen_by_user:
        stages[stage].requires_grad_(False)
    num = schedule.num_microbatches
    x, numbers = torch.randn(num, 2), torch.arange(num)
    if len(frozen_by_user) == schedule.num_stages:
        return
    with FreezingPipeline(
        stages,
        num_microbatches=num,
        schedule=schedule,
        loss_fn=loss_fn,
        freeze=FreezeConfig(plan=plan, ramp_steps=0),
        timeout_s=_TIMEOUT_S,
    ) as pipe:
        pipe.step(x, numbers, target=x)  # finds out how much work each parameter is; freezes nothing
        for _ in range(num_steps):
            log.clear()
            pipe.zero_grad()
            result = pipe.step(x, numbers, target=x)
            live = np.array([masks.any(axis=1) for masks in drawn[-1].live])  # [num_stages, num_microbatches]
            _check_masks(plan, drawn[-1], set(frozen_by_user))
            skipped = {
                action
                for action in schedule.actions
                if action.kind is Kind.B and not live[: action.stage + 1, action.microbatch].any()
            }
            assert result.times.skipped == skipped
            _check_order(schedule, log, result.times.start_s, result.times.end_s, skipped)
            for stage, masks in zip(stages, drawn[-1].live, strict=True):
                has_gradient = [parameter.grad is not None for parameter in stage.parameters()]
                assert has_gradient == masks.any(axis=0).tolist()


def _has_nothing_to_train(plan: Plan, stage: int) -> bool:
    return all(time == 0 for a, time in plan.costs.upper_s.items() if a.stage == stage and a.kind is Kind.B)


def _check_masks(plan: Plan, masks: StepMasks, frozen_by_user: set[int]) -> None:
    """Wholly frozen is frozen, wholly live is live."""
    for stage, live in enumerate(masks.live):
        for microbatch, row in enumerate(live):
            ratio = plan.ratios.get(Action(stage, Kind.B, microbatch), 0.0)
            if stage in frozen_by_user or ratio == 1.0:
                assert not row.any()
            elif ratio == 0.0:
                assert row.all()


def _check_order(
    schedule: Schedule,
    log: list[Action],
    start_s: dict[Action, float],
    end_s: dict[Action, float],
    skipped: set[Action],
) -> None:
    """Each rank ran its actions one after the other, in its order, and none before what it reads was there."""
    for order in schedule.ranks:
        stages = {action.stage for action in order}
        assert [action for action in log if action.stage in stages] == [a for a in order if a not in skipped]
        for before, after in pairwise(order):
            assert start_s[before] <= end_s[before] <= start_s[after]
    for edge in data_dependencies(schedule):
        if edge.after not in skipped:
            assert end_s[edge.before] <= start_s[edge.after]
