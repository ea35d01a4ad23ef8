"""What gradients are divided by: means over live micro-batches, planned probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.pipelines import SHORT, cut_plan, fixed_plan, ratio_plan
from timelyfreeze import FreezeConfig, FreezingPipeline, StageError
from timelyfreeze.runtime import Microbatch

SIZES = [3, 1, 4, 2, 5]


def make_stages(num_stages=2):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double() for _ in range(num_stages)]


def make_microbatches(sizes=SIZES):
    torch.manual_seed(1)
    tensors = [(torch.randn(n, 6, dtype=torch.float64), torch.randn(n, 6, dtype=torch.float64)) for n in sizes]
    return [Microbatch((x,), {}, y, len(x)) for x, y in tensors]


def summed(output, target):
    """(sum, count) over what counts: of micro-batch 1 nothing, of the others all but the first sample."""
    weights = torch.ones(len(target), 1).index_fill(0, torch.tensor([0]), 0.0)
    return (weights * (output - target) ** 2).sum(), weights.sum() * target.shape[1]


def gradients_by_microbatch(stages, microbatches, loss_fn):
    """Of every micro-batch by itself: what it weighs, and its gradient of every parameter of every stage."""
    found = []
    for one in microbatches:
        value = one.args[0]
        for stage in stages:
            value = stage(value)
        loss = loss_fn(value, one.target)
        loss, weight = loss if isinstance(loss, tuple) else (loss * one.num_samples, one.num_samples)
        parameters = [list(stage.parameters()) for stage in stages]
        flat = iter(torch.autograd.grad(loss, [p for stage in parameters for p in stage]))
        found.append((float(weight), loss.item(), [[next(flat) for _ in stage] for stage in parameters]))
    return found


@pytest.mark.parametrize("loss_fn", [F.mse_loss, summed])
@pytest.mark.parametrize(
    "plan",
    [
        cut_plan([0, 1, 0, 1, 0], 2, live_microbatches=3),  # 3 of 5 in stage 0, all in stage 1
        ratio_plan([[0.0, 1.0, 1.0, 0.0, 0.0], [0.0, 0.7, 0.3, 0.5, 0.5]], live_microbatches=3),
        ratio_plan(
            [[0.0, 1.0, 1.0, 0.3, 0.0], [0.4, 0.7, 0.3, 0.5, 0.1], [0.4, 0.4, 0.4, 0.4, 0.4]], live_microbatches=3
        ),
    ],
)
def test_a_gradient_is_the_mean_over_the_parameters_live_microbatches(plan, loss_fn, drawn):
    """By hand: gradients of the micro-batches alone, summed where live, over the weights (samples or counts) there."""
    stages, microbatches = make_stages(plan.schedule.num_stages), make_microbatches()
    alone = gradients_by_microbatch(stages, microbatches, loss_fn)
    config = FreezeConfig(plan=plan, ramp_steps=0)
    with FreezingPipeline(stages, num_microbatches=5, loss_fn=loss_fn, freeze=config) as pipe:
        for _ in range(6):
            pipe.zero_grad()
            result = pipe.step(microbatches=microbatches)
            total = sum(weight for weight, _, _ in alone)
            torch.testing.assert_close(result.loss.item(), sum(loss for _, loss, _ in alone) / total)  # over all
            for s, stage in enumerate(stages):
                for p, parameter in enumerate(stage.parameters()):
                    live = np.flatnonzero(drawn[-1].live[s][:, p])
                    weight = sum(alone[m][0] for m in live)
                    if not len(live):
                        assert parameter.grad is None
                    elif weight == 0:
                        assert not parameter.grad.any()
                    else:
                        expected = sum(alone[m][2][s][p] for m in live) / weight
                        torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-15)
    assert any(masks.freeze_ratio > 0.15 for masks in drawn)


def test_it_is_that_of_a_plain_step_with_these_microbatches(drawn):
    """Stage 0 trains for micro-batches 0, 2 and 4: its gradients are those of a plain step with just these."""
    stages, microbatches = make_stages(), make_microbatches()
    plan = cut_plan([0, 1, 0, 1, 0], 2, live_microbatches=3)
    with FreezingPipeline(
        stages, num_microbatches=5, loss_fn=F.mse_loss, freeze=FreezeConfig(plan=plan, ramp_steps=0)
    ) as pipe:
        pipe.step(microbatches=microbatches)
        pipe.zero_grad()
        pipe.step(microbatches=microbatches)
        ours = [p.grad.clone() for p in stages[0].parameters()]
    with FreezingPipeline(stages, num_microbatches=3, loss_fn=F.mse_loss) as pipe:
        pipe.zero_grad()
        pipe.step(microbatches=[microbatches[m] for m in (0, 2, 4)])
    for a, b in zip(ours, stages[0].parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-12, atol=1e-15)


def test_each_use_of_a_tied_parameter_is_a_mean_of_its_own(drawn):
    """Stage 0 trains it for three micro-batches, stage 2 for others: the two means add up, as in a plain step."""
    torch.manual_seed(0)
    embed, body, head = nn.Embedding(11, 6).double(), nn.Linear(6, 6).double(), nn.Linear(6, 11, bias=False).double()
    head.weight = embed.weight
    ids, targets = torch.randint(11, (12,)), torch.randint(11, (12,))
    slices = [slice(0, 4), slice(4, 5), slice(5, 8), slice(8, 12)]
    microbatches = [Microbatch((ids[s],), {}, targets[s], len(ids[s])) for s in slices]
    plan = ratio_plan([[0.0, 1.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.5, 0.5, 0.5, 0.5]], live_microbatches=2)
    with FreezingPipeline(
        [embed, body, head], num_microbatches=4, loss_fn=F.cross_entropy, freeze=FreezeConfig(plan=plan, ramp_steps=0)
    ) as pipe:
        for _ in range(4):
            pipe.zero_grad()
            pipe.step(microbatches=microbatches)
            expected = torch.zeros_like(embed.weight)
            for stage in (0, 2):
                live = [m for m in range(4) if drawn[-1].live[stage][m, 0]]
                for m in live:
                    bottom, top = (embed.weight.detach().clone().requires_grad_() for _ in range(2))
                    output = F.linear(body(F.embedding(ids[slices[m]], bottom)), top)
                    F.cross_entropy(output, targets[slices[m]], reduction="sum").backward()
                    own = bottom.grad if stage == 0 else top.grad
                    expected += own / sum(microbatches[m].num_samples for m in live)
            torch.testing.assert_close(embed.weight.grad, expected, rtol=1e-12, atol=1e-15)


def test_a_smaller_batch_freezes_nothing(drawn):
    stages, microbatches = make_stages(), make_microbatches()
    plan = cut_plan([1, 1, 0, 0, 0], 2, live_microbatches=3)
    config = FreezeConfig(plan=plan, ramp_steps=0)
    with FreezingPipeline(stages, num_microbatches=5, loss_fn=F.mse_loss, freeze=config) as pipe:
        pipe.step(microbatches=microbatches)
        assert pipe.step(microbatches=microbatches).freeze_ratio > 0
        assert pipe.step(microbatches=microbatches[:2]).freeze_ratio == 0


def test_gradients_are_plain_ones_to_the_last_bit_where_all_is_live():
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    found = []
    for freeze in (None, FreezeConfig(live_microbatches=2)):
        stages = make_stages()
        with FreezingPipeline(stages, num_microbatches=3, loss_fn=F.mse_loss, freeze=freeze) as pipe:
            pipe.step(x, target=y)
        found.append([p.grad for stage in stages for p in stage.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_run_finds_its_own_plan_for_live_microbatches(drawn):
    stages = [nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]) for _ in range(2)]
    x = torch.randn(60, 64)
    config = FreezeConfig(live_microbatches=3, **SHORT)
    with FreezingPipeline(stages, num_microbatches=5, loss_fn=F.mse_loss, freeze=config) as pipe:
        for _ in range(200):
            if pipe.step(x, target=x).phase == "steady" and pipe.plan is not None:
                break
        assert pipe.plan is not None
        for _ in range(10):
            if pipe.step(x, target=x).phase == "steady":  # on a busy machine it may measure again
                assert all(live.sum(axis=0).min() >= 3 for live in drawn[-1].live)


def test_more_live_microbatches_than_a_step_has_are_refused_at_construction():
    with pytest.raises(ValueError, match="live_microbatches of at most 4, got 5"):
        FreezingPipeline(
            make_stages(), num_microbatches=4, loss_fn=F.mse_loss, freeze=FreezeConfig(live_microbatches=5)
        )


class Weighted(nn.Module):
    """A loss with a parameter of its own: (sum, count), every column weighed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 6, dtype=torch.float64))

    def forward(self, output, target):
        return (self.weight * (output - target) ** 2).sum(), target.numel()


@pytest.mark.parametrize("plan", [None, cut_plan([0, 1, 0, 1, 2], 2, at_cut=0.5, live_microbatches=2)])
def test_a_losss_own_parameters_get_the_gradient_of_the_whole_batch(plan):
    """Masks freeze none of them, and the division by the count is theirs too."""
    stages, microbatches, loss_fn = make_stages(), make_microbatches(), Weighted()
    freeze = None if plan is None else FreezeConfig(plan=plan, ramp_steps=0)
    with FreezingPipeline(stages, num_microbatches=5, loss_fn=loss_fn, freeze=freeze) as pipe:
        for _ in range(2):
            loss_fn.zero_grad()
            pipe.step(microbatches=microbatches)
    ours, loss_fn.weight.grad = loss_fn.weight.grad, None
    parts = [loss_fn(stages[1](stages[0](one.args[0])), one.target) for one in microbatches]
    (sum(part for part, _ in parts) / sum(count for _, count in parts)).backward()
    torch.testing.assert_close(ours, loss_fn.weight.grad, rtol=1e-12, atol=1e-15)


def test_a_failed_step_leaves_a_losss_own_gradients_alone():
    class Fails(Weighted):
        num_calls = 0

        def forward(self, output, target):
            self.num_calls += 1
            if self.num_calls > 2:
                raise RuntimeError("enough")
            return super().forward(output, target)

    loss_fn = Fails()
    loss_fn.weight.grad = torch.full((6,), 7.0, dtype=torch.float64)
    with FreezingPipeline(make_stages(), num_microbatches=5, loss_fn=loss_fn) as pipe, pytest.raises(StageError):
        pipe.step(microbatches=make_microbatches())
    assert loss_fn.weight.grad.tolist() == [7.0] * 6


def test_a_loss_that_shares_a_stages_parameter_is_part_of_that_stage():
    stages = make_stages()
    loss_fn = Weighted()
    loss_fn.weight = stages[1][2].bias
    microbatches = make_microbatches()
    with FreezingPipeline(stages, num_microbatches=5, loss_fn=loss_fn) as pipe:
        pipe.step(microbatches=microbatches)
    ours = stages[1][2].bias.grad.clone()
    pipe.zero_grad()
    parts = [loss_fn(stages[1](stages[0](one.args[0])), one.target) for one in microbatches]
    (sum(part for part, _ in parts) / sum(count for _, count in parts)).backward()
    torch.testing.assert_close(ours, stages[1][2].bias.grad, rtol=1e-12, atol=1e-15)


def test_rescaling_makes_the_mean_gradient_the_whole_one():
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))]
    x = torch.randn(2, 6).repeat(4, 1)  # every micro-batch the same, so that only masks make steps differ
    config = FreezeConfig(plan=fixed_plan(2, 4, 0.5), ramp_steps=0, rescale=True)
    with FreezingPipeline(stages, num_microbatches=4, loss_fn=F.mse_loss, freeze=config) as pipe:
        pipe.step(x, target=x * 0)
        whole = [p.grad.clone() for p in pipe.parameters()]
        pipe.zero_grad()
        num_steps = 256
        for _ in range(num_steps):
            pipe.step(x, target=x * 0)
        for p, full in zip(pipe.parameters(), whole, strict=True):
            torch.testing.assert_close(p.grad / num_steps, full, rtol=0.05, atol=1e-4)
