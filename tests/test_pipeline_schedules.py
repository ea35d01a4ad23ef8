"""Every schedule on the real runtime: gradients are the unpipelined model's, with freezing and without."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.models import plain_step
from tests.pipelines import masked_reference
from timelyfreeze import ActionCosts, FreezeConfig, FreezingPipeline, Kind, Schedule, create_schedule, make_plan
from timelyfreeze.schedule import default_stages_per_rank, schedule_names

WIDTH = 5
COUNTS = [(ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in (1, 3, 4, 8)]


def make_stages(num_stages):
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).double()
        for _ in range(num_stages)
    ]


def batch(num_microbatches):
    torch.manual_seed(1)
    size = 2 * num_microbatches + 1  # one micro-batch is larger
    return torch.randn(size, WIDTH, dtype=torch.float64), torch.randn(size, WIDTH, dtype=torch.float64)


def assert_close(stages, references):
    for stage, other in zip(stages, references, strict=True):
        for (name, p), q in zip(stage.named_parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), COUNTS)
def test_gradients_equal_the_unpipelined_models(name, num_ranks, num_microbatches):
    schedule = create_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    stages = make_stages(schedule.num_stages)
    reference = copy.deepcopy(stages)
    x, y = batch(num_microbatches)
    with FreezingPipeline(
        stages, num_microbatches=num_microbatches, loss_fn=F.mse_loss, schedule=name, timeout_s=60
    ) as pipe:
        assert pipe.schedule == schedule
        for _ in range(2):
            result = pipe.step(x, target=y)
        loss = pipe.evaluate(x, target=y)
    for _ in range(2):
        expected = plain_step(nn.Sequential(*reference), F.mse_loss, x, y, num_microbatches)
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(loss, expected)
    assert_close(stages, reference)


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), COUNTS)
def test_gradients_equal_the_unpipelined_models_under_the_same_masks(name, num_ranks, num_microbatches, drawn):
    """Cut-aware plans: below a micro-batch's cut neither I nor W runs."""
    schedule = create_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    costs = ActionCosts.uniform(schedule, forward_s=1.0, backward_s=3.0, frozen_backward_s=1.5)
    plan = make_plan(schedule, costs, max_ratio=0.6)
    stages = make_stages(schedule.num_stages)
    reference = copy.deepcopy(stages)
    x, y = batch(num_microbatches)
    config = FreezeConfig(plan=plan, ramp_steps=0)
    with FreezingPipeline(
        stages, num_microbatches=num_microbatches, loss_fn=F.mse_loss, schedule=schedule, freeze=config, timeout_s=60
    ) as pipe:
        for _ in range(4):
            for stage in [*stages, *reference]:
                stage.zero_grad()
            times = pipe.step(x, target=y).times
            masked_reference(reference, drawn[-1], F.mse_loss, x, y)
            assert_close(stages, reference)
            assert_only_what_is_cut_is_skipped(schedule, drawn[-1].live, times.skipped)
    assert pipe.plan == plan


def assert_only_what_is_cut_is_skipped(schedule, live, skipped):
    trains = [[bool(live[s][m].any()) for s in range(schedule.num_stages)] for m in range(schedule.num_microbatches)]
    for action in schedule.actions:
        is_cut = action.kind is not Kind.F and not any(trains[action.microbatch][: action.stage + 1])
        assert (action in skipped) == is_cut, action


@pytest.mark.parametrize("name", schedule_names())
def test_a_run_repeats_to_the_last_bit(name):
    """Threads or not, whatever the timing: every rank adds in its schedule's order."""
    found = []
    for inline in (False, True, False):
        per_rank = default_stages_per_rank(name)
        stages = make_stages(2 * per_rank)
        x, y = batch(6)
        with FreezingPipeline(stages, num_microbatches=6, loss_fn=F.mse_loss, schedule=name) as pipe:
            for _ in range(3):
                pipe._assembly.engine._mean_action_s = 0.0 if inline else 1.0
                pipe.step(x, target=y)
        found.append([p.grad for stage in stages for p in stage.parameters()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", schedule_names())
def test_dropout_and_tied_weights(name):
    """Random numbers belong to (stage, micro-batch), whatever the order; a weight of the ends is one weight."""

    class Tied(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight
            self.dropout = nn.Dropout(0.3)

        def forward(self, x):
            return self.dropout(F.linear(x, self.weight))

    def train(schedule, num_stages):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 2)
        stages = [Tied(weight), *make_stages(num_stages - 2), Tied(weight)]
        with FreezingPipeline(stages, num_microbatches=4, loss_fn=F.mse_loss, schedule=schedule, seed=7) as pipe:
            pipe.step(*batch(4)[:1], target=batch(4)[1])
        return stages

    num_stages = 2 * default_stages_per_rank(name)
    assert_close(train(name, num_stages), train("gpipe", num_stages))


def test_num_stages_counts_stages_and_the_schedule_deals_them_out():
    stages = make_stages(4)
    with FreezingPipeline(stages, num_microbatches=4, loss_fn=F.mse_loss, schedule="interleaved_1f1b") as pipe:
        assert (pipe.schedule.num_ranks, pipe.schedule.num_stages) == (2, 4)
    with FreezingPipeline(
        stages, num_microbatches=4, loss_fn=F.mse_loss, schedule="looped_bfs", stages_per_rank=4
    ) as pipe:
        assert (pipe.schedule.num_ranks, pipe.schedule.num_stages) == (1, 4)
    with FreezingPipeline(nn.Sequential(*stages), num_microbatches=4, loss_fn=F.mse_loss, schedule="zbv") as pipe:
        assert pipe.num_stages == 4
    with pytest.raises(ValueError, match=r"multiple of stages_per_rank=2, such as 2 or 4, got 3"):
        FreezingPipeline(stages[:3], num_microbatches=4, loss_fn=F.mse_loss, schedule="zbv")
    with pytest.raises(ValueError, match="stages_per_rank"):
        FreezingPipeline(stages, num_microbatches=4, loss_fn=F.mse_loss, schedule="1f1b", stages_per_rank=0)
    with pytest.raises(ValueError, match="stages_per_rank"):
        FreezingPipeline(stages, num_microbatches=4, loss_fn=F.mse_loss, schedule="1f1b", stages_per_rank=2)


def test_a_file_with_sends_and_receives_runs(tmp_path):
    """What torch.distributed.pipelining would run, compute-only or with communication."""
    schedule = create_schedule("zbv", num_ranks=2, num_microbatches=4)
    stages = make_stages(4)
    reference = copy.deepcopy(stages)
    x, y = batch(4)
    for communication in (False, True):
        path = os.fspath(tmp_path / f"{communication}.csv")
        schedule.to_csv(path, communication=communication)
        assert Schedule.from_csv(path, name="zbv") == schedule
        with FreezingPipeline(stages, num_microbatches=4, loss_fn=F.mse_loss, schedule=path) as pipe:
            pipe.step(x, target=y)
        plain_step(nn.Sequential(*reference), F.mse_loss, x, y, 4)
        assert_close(stages, reference)


@pytest.mark.parametrize("name", schedule_names())
def test_a_smaller_last_batch_runs_with_fewer_microbatches(name):
    stages = make_stages(2 * default_stages_per_rank(name))
    reference = copy.deepcopy(stages)
    x, y = batch(4)
    with FreezingPipeline(stages, num_microbatches=4, loss_fn=F.mse_loss, schedule=name) as pipe:
        pipe.step(x[:3], target=y[:3])
    plain_step(nn.Sequential(*reference), F.mse_loss, x[:3], y[:3], 3)
    assert_close(stages, reference)
