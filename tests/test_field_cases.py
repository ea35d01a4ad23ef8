"""Situations from the field that no other test file holds: what a frozen weight must not do, and what must survive."""

from __future__ import annotations

import copy
import threading
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from tests.models import assert_same_grads, mlp, plain_step
from timelyfreeze import ActionCosts, FreezeConfig, FreezingPipeline, Kind, Plan, create_schedule
from timelyfreeze.runtime.memory import count_saved_bytes


def plan_with(ratio_of, num_microbatches=2):
    """A fixed plan for two stages whose ratios are ``ratio_of(stage, microbatch)``."""
    schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=num_microbatches)
    upper = {a: 1.0 if a.kind is Kind.F else 3.0 for a in schedule.actions}
    backward = [a for a in schedule.actions if a.kind is Kind.B]
    costs = ActionCosts(upper, {a: 1.5 if a.stage else 0.0 for a in backward})
    ratios = {a: ratio_of(a.stage, a.microbatch) for a in backward}
    plan = Plan.of_ratios(schedule, costs, ratios, mode="lp", max_ratio=1.0, objective_s=1.0)
    return FreezeConfig(plan=plan, ramp_steps=0)


class SeesWhatIsWanted(torch.autograd.Function):
    """A matrix product that notes for which inputs its backward was asked."""

    asked: ClassVar[list[tuple[bool, bool]]] = []

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        SeesWhatIsWanted.asked.append(ctx.needs_input_grad)
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return grad @ weight.t() if wanted[0] else None, x.t() @ grad if wanted[1] else None


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return SeesWhatIsWanted.apply(x, self.weight)


def test_a_custom_function_is_not_asked_for_a_frozen_weights_gradient():  # CASES 5, 11
    stages = [nn.Linear(4, 4), Custom()]
    x = torch.randn(4, 4)
    frozen_top = plan_with(lambda stage, microbatch: float(stage == 1 and microbatch == 0))
    with FreezingPipeline(stages, num_microbatches=2, loss_fn=F.mse_loss, freeze=frozen_top) as pipe:
        pipe.step(x, target=x)  # profiled, nothing frozen
        SeesWhatIsWanted.asked.clear()
        pipe.step(x, target=x)
    assert SeesWhatIsWanted.asked == [(True, False), (True, True)]


def test_freezing_before_forward_keeps_no_activation_for_it():  # CASES 10
    stages = [nn.Linear(64, 64), nn.Linear(64, 64)]
    x = torch.randn(32, 64)

    def saved(config):
        with FreezingPipeline(stages, num_microbatches=2, loss_fn=F.mse_loss, freeze=config, schedule="1f1b") as pipe:
            pipe.step(x, target=x)
            with count_saved_bytes(pipe.parameters()) as counted:
                pipe.step(x, target=x)
        return counted.total_bytes

    kept, spared = saved(plan_with(lambda stage, _: 0.0)), saved(plan_with(lambda stage, _: float(stage == 1)))
    assert kept - spared == 2 * 16 * 64 * 4  # the top Linear's input, of both micro-batches


def test_flags_survive_wrapping_and_moving():  # CASES 8
    model = mlp()
    model[1].requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    with FreezingPipeline(model, 2, 2, loss_fn=F.mse_loss, freeze=FreezeConfig()) as pipe:
        pipe.step(torch.randn(4, 6), target=torch.randn(4, 6))
        pipe.to(torch.float64)
        pipe.load_state_dict(pipe.state_dict())
        assert [p.requires_grad for p in pipe.parameters()] == flags
        pipe.step(torch.randn(4, 6).double(), target=torch.randn(4, 6).double())
    assert [p.grad is not None for p in model.parameters()] == flags


def test_each_stages_backward_runs_on_its_own_thread(monkeypatch):  # CASES 25
    monkeypatch.setattr("timelyfreeze.runtime.engine.INLINE_BELOW_S", 0.0)
    seen = {0: set(), 1: set()}
    model = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for index, stage in enumerate(model):
        stage.weight.register_hook(lambda grad, index=index: seen[index].add(threading.current_thread().name))
    x = torch.randn(8, 4)
    with FreezingPipeline(model, num_microbatches=4, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, target=x)
    assert seen == {0: {"timelyfreeze-rank-0"}, 1: {"timelyfreeze-rank-1"}}


def test_a_new_length_in_the_middle_of_accumulation_keeps_what_was_added():  # CASES 34, 36
    model = mlp()
    reference = copy.deepcopy(model)
    with FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss) as pipe:
        for index, shape in enumerate([(8, 6), (8, 3, 6)]):
            x, y = torch.randn(shape), torch.randn(shape)
            pipe.step(x, target=y)
            other = copy.deepcopy(reference)
            other.zero_grad()
            plain_step(other, F.mse_loss, x, y, 4)
            for p, q in zip(reference.parameters(), other.parameters(), strict=True):
                p.grad = q.grad if index == 0 else p.grad + q.grad
    assert_same_grads(model, reference)
