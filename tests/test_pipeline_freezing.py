"""The pipeline with freezing: gradients against the plain model under the same masks, phases, unusual stages."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.models import assert_same_grads, mlp
from tests.pipelines import SHORT, cut_plan, fixed_plan, masked_reference
from timelyfreeze import FreezeConfig, FreezingPipeline, Kind


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("max_ratio", [0.3, 0.8])
def test_gradients_equal_the_plain_models_under_the_same_masks(schedule, num_stages, max_ratio, drawn):
    model = mlp(num_layers=6)
    plan = fixed_plan(num_stages, 4, max_ratio, schedule)
    config = FreezeConfig(plan=plan, ramp_steps=1)
    x, y = torch.randn(10, 6), torch.randn(10, 6)
    with FreezingPipeline(model, num_stages, 4, schedule=schedule, loss_fn=F.mse_loss, freeze=config) as pipe:
        reference = None
        for step in range(8):
            pipe.zero_grad()
            result = pipe.step(x, target=y)
            if reference is None:
                reference = copy.deepcopy(pipe._assembly.engine.stages)
            for stage in reference:
                stage.zero_grad()
            masked_reference(reference, drawn[-1], F.mse_loss, x, y)
            for stage, other in zip(pipe._assembly.engine.stages, reference, strict=True):
                assert_same_grads(stage, other)
            assert all(p.requires_grad for p in model.parameters())
            if step > 1:
                assert result.phase == "steady"
                assert 0 < result.freeze_ratio <= max_ratio + 0.2


def test_phases_run_in_order_and_find_a_plan():
    model = mlp(width=64, num_layers=8)
    x = torch.randn(64, 64)
    config = FreezeConfig(max_ratio=0.8, **SHORT)
    with FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss, freeze=config) as pipe:
        phases = []
        for _ in range(60):
            phases.append(pipe.step(x, target=x).phase)
            if phases[-1] == "steady" and pipe.plan is not None:
                break
        assert phases[-1] == "steady"
        order = list(dict.fromkeys(phases))
        assert order == ["warmup", "measure_upper", "measure_lower", "ramp", "steady"]
        plan = pipe.plan
        assert plan is not None
        assert all(plan.costs.lower_s[a] == 0 for a in plan.schedule.actions if a.kind is Kind.B and a.stage == 0)
        assert all(plan.costs.lower_s[a] > 0 for a in plan.schedule.actions if a.kind is Kind.B and a.stage == 1)
        json.dumps(pipe.report())


def test_lower_bounds_are_measured_with_input_gradients_and_no_step_trains_nothing(drawn):
    model = mlp()
    x = torch.randn(8, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss, freeze=FreezeConfig(**SHORT)) as pipe:
        seen = 0
        for _ in range(12):
            pipe.step(x, target=x, grad_scaler=scaler)
            masks = drawn[-1]
            scaler.step(optimizer)  # raises where no gradient was recorded
            scaler.update()
            optimizer.zero_grad()
            if masks.phase == "measure_lower" and 0 < masks.freeze_ratio < 1:
                seen += 1
                assert masks.needs_input_grad[1].all()
                assert sorted(live.any() for live in masks.live[0]) == [False, False, True, True]
        assert seen >= 2


def test_a_parameter_frozen_all_step_keeps_no_gradient_and_its_optimizer_state():  # CASES 9
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = cut_plan([1, 1], num_stages=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    x = torch.randn(4, 4)
    with FreezingPipeline(model, 2, 2, loss_fn=F.mse_loss, freeze=FreezeConfig(plan=plan, ramp_steps=0)) as pipe:
        for step in range(4):
            if step == 1:
                before = copy.deepcopy((model[0].state_dict(), optimizer.state[model[0].weight]))
            pipe.step(x, target=x)
            if step >= 1:
                assert model[0].weight.grad is None
                assert model[1].weight.grad is not None
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(value, before[0][name]) for name, value in model[0].state_dict().items())
    assert all(torch.equal(value, before[1][name]) for name, value in optimizer.state[model[0].weight].items())


class Noisy(nn.Module):
    """What makes freezing hard: dropout, batch statistics, checkpointed regions."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Tanh())
        self.norm = nn.BatchNorm1d(6)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.norm(self.body(x))
        return self.norm(checkpoint(self.body, x, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_under_masks_equals_no_checkpointing(use_reentrant, drawn):  # CASES 13
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    grads = []
    for reentrant in (None, use_reentrant):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(6, 6), Noisy(reentrant)), Noisy(reentrant), Noisy(reentrant)]
        config = FreezeConfig(plan=fixed_plan(3, 4, 0.6), ramp_steps=0)
        with FreezingPipeline(stages, num_microbatches=4, loss_fn=F.mse_loss, freeze=config) as pipe:
            for _ in range(5):
                pipe.step(x, target=y)
        grads.append([p.grad for stage in stages for p in stage.parameters()])
    assert any(masks.freeze_ratio > 0.2 for masks in drawn)
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_frozen_front_with_adapters_inside_checkpoints_trains():  # CASES 13
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.adapter = nn.Linear(6, 6), nn.Linear(6, 6)
            self.base.requires_grad_(False)

        def forward(self, x):
            return checkpoint(lambda h: self.base(h) + self.adapter(h), x, use_reentrant=False)

    stages = [Adapted(), Adapted()]
    x = torch.randn(4, 6)
    with FreezingPipeline(stages, num_microbatches=2, loss_fn=F.mse_loss, freeze=FreezeConfig(**SHORT)) as pipe:
        pipe.step(x, target=x)
        assert all(stage.adapter.weight.grad is not None and stage.base.weight.grad is None for stage in stages)


def test_tied_weights_under_masks(drawn):
    embed, body = nn.Embedding(11, 6), nn.Linear(6, 6)
    head = nn.Linear(6, 11, bias=False)
    head.weight = embed.weight
    ids, y = torch.randint(11, (8,)), torch.randint(11, (8,))
    config = FreezeConfig(plan=fixed_plan(3, 4, 0.5), ramp_steps=0)
    with FreezingPipeline([embed, body, head], num_microbatches=4, loss_fn=F.cross_entropy, freeze=config) as pipe:
        for _ in range(4):
            pipe.zero_grad()
            pipe.step(ids, target=y)
            ours = None if embed.weight.grad is None else embed.weight.grad.clone()
            expected = torch.zeros(11, 6)
            masks = drawn[-1]
            for m in range(4):
                part = slice(2 * m, 2 * m + 2)
                bottom = embed.weight.detach().requires_grad_(bool(masks.live[0][m, 0]))
                top = embed.weight.detach().requires_grad_(bool(masks.live[2][m, 0]))
                loss = F.cross_entropy(F.linear(body(F.embedding(ids[part], bottom)), top), y[part]) / 4
                if loss.requires_grad:
                    loss.backward()
                for leaf in (bottom, top):
                    expected += 0 if leaf.grad is None else leaf.grad
            body.zero_grad()
            torch.testing.assert_close(torch.zeros(11, 6) if ours is None else ours, expected)


def test_user_changes_what_trains():  # CASES 1 with freezing
    model = mlp()
    x = torch.randn(8, 6)
    model[0].requires_grad_(False)
    with FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss, freeze=FreezeConfig(**SHORT), split_points=[1]) as pipe:
        for step in range(40):
            if step == 20:
                model[0].requires_grad_(True)
            pipe.zero_grad()
            pipe.step(x, target=x)
            if step < 20:
                assert model[0][0].weight.grad is None
        assert "trainable_changed" in [event["event"] for event in pipe.report()["events"]]


def test_compiled_stages_follow_the_masks(drawn):  # CASES 12
    torch.manual_seed(0)
    plain = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
    compiled = [torch.compile(copy.deepcopy(stage), backend="aot_eager") for stage in plain]
    x = torch.randn(8, 8)
    config = FreezeConfig(plan=fixed_plan(2, 4, 0.5), ramp_steps=0)
    with FreezingPipeline(compiled, num_microbatches=4, loss_fn=F.mse_loss, freeze=config) as pipe:
        for _ in range(6):
            pipe.zero_grad()
            pipe.step(x, target=x)
            for stage in plain:
                stage.zero_grad()
            masked_reference(plain, drawn[-1], F.mse_loss, x, x)
            for stage, other in zip(compiled, plain, strict=True):
                for p, q in zip(stage.parameters(), other.parameters(), strict=True):
                    assert (p.grad is None) == (q.grad is None)
                    if p.grad is not None:
                        torch.testing.assert_close(p.grad, q.grad)
    patterns = {tuple(row) for masks in drawn for row in masks.live[1]}
    assert 1 < len(patterns) <= 4


def test_a_plan_for_another_schedule_is_refused_before_anything_runs(tmp_path):
    path = tmp_path / "plan.json"
    fixed_plan(3, 4).save(path)
    with pytest.raises(Exception, match="another number of stages"):
        FreezingPipeline(mlp(), 2, 4, loss_fn=F.mse_loss, freeze=FreezeConfig(plan=path))


def test_masks_leave_numpys_generator_alone():
    state = np.random.get_state()[1].copy()
    x = torch.randn(8, 6)
    config = FreezeConfig(plan=fixed_plan(), ramp_steps=0)
    with FreezingPipeline(mlp(), 2, 4, loss_fn=F.mse_loss, freeze=config) as pipe:
        for _ in range(3):
            pipe.step(x, target=x)
    assert np.array_equal(state, np.random.get_state()[1])
