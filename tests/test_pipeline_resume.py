"""Runs with a fixed plan repeat: over a resume, with evaluations in between, after a failed step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.models import mlp
from tests.pipelines import fixed_plan
from timelyfreeze import FreezeConfig, FreezingPipeline, StageError


def train(pipe, optimizer, steps):
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(8, 6, generator=generator) for _ in range(20)]
    losses = []
    for step in steps:
        losses.append(pipe.step(batches[step], target=batches[step] * 0.5).loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("at", [1, 5, 12])
def test_a_resumed_run_with_a_fixed_plan_has_the_same_losses_bit_for_bit(tmp_path, at):
    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(4)])
        config = FreezeConfig(plan=plan, ramp_steps=4)
        pipe = FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss, freeze=config, split_points=[2])
        return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)

    plan = fixed_plan(2, 4, 0.5)
    whole, optimizer = fresh()
    with whole:
        expected = train(whole, optimizer, range(20))
    first, optimizer = fresh()
    with first:
        losses = train(first, optimizer, range(at))
        state = {
            "model": first.state_dict(),
            "optimizer": optimizer.state_dict(),
            "freeze": first.freeze_state_dict(),
        }
        torch.save(state, tmp_path / "checkpoint.pt")
    second, optimizer = fresh()
    with second:
        state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        second.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        second.load_freeze_state_dict(state["freeze"])
        losses += train(second, optimizer, range(at, 20))
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))


def test_evaluating_in_between_changes_nothing():  # CASES 42
    def run(evaluate):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        config = FreezeConfig(plan=fixed_plan(2, 4, 0.5), ramp_steps=2)
        with FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss, freeze=config, split_points=[2]) as pipe:
            for _ in range(6):
                losses += train(pipe, optimizer, range(2))
                if evaluate:
                    phase = pipe.report()["phase"]
                    pipe.evaluate(torch.randn(12, 6), target=torch.randn(12, 6))
                    pipe(torch.randn(3, 6))
                    assert pipe.report()["phase"] == phase
        return losses

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_a_failed_step_under_masks_leaves_flags_and_gradients_and_the_next_one_is_the_same():
    class Fails(nn.Linear):
        armed = False

        def forward(self, x):
            if self.armed:
                raise RuntimeError("once")
            return super().forward(x)

    def run(fail):
        torch.manual_seed(0)
        stages = [nn.Linear(6, 6), Fails(6, 6)]
        x = torch.randn(8, 6)
        with FreezingPipeline(
            stages, num_microbatches=4, loss_fn=F.mse_loss, freeze=FreezeConfig(plan=fixed_plan(), ramp_steps=0)
        ) as pipe:
            for step in range(6):
                if fail and step == 3:
                    before = [p.grad.clone() for p in pipe.parameters()]
                    stages[1].armed = True
                    with pytest.raises(StageError):
                        pipe.step(x, target=x)
                    stages[1].armed = False
                    assert all(p.requires_grad for p in pipe.parameters())
                    assert all(torch.equal(p.grad, b) for p, b in zip(pipe.parameters(), before, strict=True))
                pipe.step(x, target=x)
            return [p.grad for p in pipe.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))
