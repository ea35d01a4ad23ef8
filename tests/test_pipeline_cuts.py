"""Cut micro-batches: below their cut nothing is recorded, kept, sent or run, and gradients are the plain model's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.models import assert_same_grads
from tests.pipelines import SHORT, cut_plan, masked_reference
from timelyfreeze import FreezeConfig, FreezingPipeline, Kind
from timelyfreeze.runtime.memory import count_saved_bytes

# (stages, the cut of every micro-batch): none, all, alternating, deep, and one that trains nothing at all.
CUTS = [
    (2, [0, 1, 0, 1]),
    (2, [1, 1, 0, 1]),
    (3, [0, 2, 1, 0, 2]),
    (3, [2, 2, 0, 1]),
    (4, [0, 3, 1, 2, 0, 3]),
    (4, [3, 0, 4, 1]),
]


class Watched(nn.Sequential):
    """Notes every forward: whether its input carried a gradient, whether a graph is recorded, bytes kept, a graph."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.seen = []

    def forward(self, x):
        with count_saved_bytes(self.parameters()) as saved:
            y = super().forward(x)
        self.seen.append((x.requires_grad, torch.is_grad_enabled(), saved.total_bytes, y.grad_fn is not None))
        return y


def make_stages(num_stages, make=Watched):
    torch.manual_seed(0)
    return [make(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 6)) for _ in range(num_stages)]


def run_planned(stages, plan, x, y, num_steps=4):
    """Steps under a fixed plan, gradients zeroed in between; the first one profiles and freezes nothing."""
    config = FreezeConfig(plan=plan, ramp_steps=0)
    with FreezingPipeline(
        stages,
        num_microbatches=plan.schedule.num_microbatches,
        loss_fn=F.mse_loss,
        freeze=config,
        schedule=plan.schedule,
    ) as pipe:
        for step in range(num_steps):
            pipe.zero_grad()
            yield step, pipe.step(x, target=y)


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "cuts"), CUTS)
@pytest.mark.parametrize("at_cut", [0.0, 0.6])
def test_gradients_equal_the_plain_models(num_stages, cuts, at_cut, schedule, inline, drawn, monkeypatch):
    monkeypatch.setattr("timelyfreeze.runtime.engine.INLINE_BELOW_S", float("inf") if inline else 0.0)
    stages = make_stages(num_stages)
    reference = make_stages(num_stages, nn.Sequential)
    x, y = torch.randn(2 * len(cuts) + 1, 6), torch.randn(2 * len(cuts) + 1, 6)
    plan = cut_plan(cuts, num_stages, at_cut, above=0.4, schedule=schedule)
    for _ in run_planned(stages, plan, x, y):
        for stage in reference:
            stage.zero_grad()
        masked_reference(reference, drawn[-1], F.mse_loss, x, y)
        for stage, other in zip(stages, reference, strict=True):
            assert_same_grads(stage, other)
            for (name, ours), theirs in zip(stage.named_buffers(), other.buffers(), strict=True):
                assert torch.equal(ours, theirs), name  # batch statistics move below the cut too


@pytest.mark.parametrize(("num_stages", "cuts"), CUTS)
def test_nothing_is_kept_sent_or_run_below_a_cut(num_stages, cuts):
    stages = make_stages(num_stages)
    x = torch.randn(2 * len(cuts), 6)
    plan = cut_plan(cuts, num_stages)
    for _step, result in run_planned(stages, plan, x, x, num_steps=2):
        skipped = result.times.skipped
        seen = [[stage.seen.pop(0) for _ in cuts] for stage in stages]
    assert skipped == {a for a in plan.schedule.actions if a.kind is Kind.B and a.stage < cuts[a.microbatch]}
    for stage, notes in enumerate(seen):
        for cut, (input_grad, records, kept_bytes, has_graph) in zip(cuts, notes, strict=True):
            assert input_grad == (stage > cut)
            assert records == (stage >= cut)
            assert has_graph == (stage >= cut)
            assert (kept_bytes == 0) == (stage < cut)


def test_a_plain_step_skips_nothing():
    x = torch.randn(4, 6)
    with FreezingPipeline(make_stages(2), num_microbatches=2, loss_fn=F.mse_loss) as pipe:
        assert pipe.step(x, target=x).times.skipped == frozenset()


def test_lower_bounds_are_measured_with_the_gradients_sent_and_dropped(drawn):
    """Everything of a micro-batch frozen: stage 0 skips its backward, stage 1 runs it to be timed."""
    x = torch.randn(8, 6)
    with FreezingPipeline(make_stages(2), num_microbatches=4, loss_fn=F.mse_loss, freeze=FreezeConfig(**SHORT)) as pipe:
        for _ in range(7):
            skipped = pipe.step(x, target=x).times.skipped
            frozen = [m for m in range(4) if not drawn[-1].live[0][m].any()]
            assert sorted((a.stage, a.microbatch) for a in skipped) == [(0, m) for m in frozen]
    assert 0 < len(frozen) < 4


def test_inputs_that_require_grad_get_theirs_below_a_cut_too(drawn):
    stages, reference = make_stages(3), make_stages(3, nn.Sequential)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _, result in run_planned(stages, cut_plan([0, 2, 1, 2], 3, at_cut=0.5), ours, y, num_steps=3):
        masked_reference(reference, drawn[-1], F.mse_loss, theirs, y)
        assert result.times.skipped == frozenset()
    torch.testing.assert_close(ours.grad, theirs.grad)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=True)


def mark(module, args, output):
    """What adapter libraries hook to embeddings: reentrant checkpoints above give no gradient without it."""
    return output.requires_grad_()


def test_outputs_marked_by_hand_carry_gradients_unless_masks_have_frozen_the_stage(drawn):
    stages = [Watched(nn.Linear(6, 6)), Watched(nn.Linear(6, 6))]
    stages[0].register_forward_hook(mark)
    x = torch.randn(8, 6)
    for _ in run_planned(stages, cut_plan([0, 1, 1, 0], 2), x, x, num_steps=2):
        seen = [stages[1].seen.pop(0)[0] for _ in range(4)]
    assert seen == [True, False, False, True]


def test_a_frozen_front_marked_by_hand_feeds_reentrant_checkpoints_above():
    front, above = nn.Linear(6, 6).requires_grad_(False), Checkpointed()
    front.register_forward_hook(mark)
    x = torch.randn(4, 6)
    for freeze in (None, FreezeConfig(**SHORT)):
        above.zero_grad()
        with FreezingPipeline([front, above], num_microbatches=2, loss_fn=F.mse_loss, freeze=freeze) as pipe:
            for _ in range(2):
                pipe.step(x, target=x)
                assert above.body.weight.grad is not None


def test_reentrant_checkpoints_in_a_cut_stage_are_trained(drawn):
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6), Checkpointed(), nn.Linear(6, 6)]
    reference = copy.deepcopy(stages)
    for stage in reference:
        if isinstance(stage, Checkpointed):
            stage.forward = stage.body.forward
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    for _ in run_planned(stages, cut_plan([0, 1, 2, 1], 3), x, y, num_steps=3):
        for stage in reference:
            stage.zero_grad()
        masked_reference(reference, drawn[-1], F.mse_loss, x, y)
        for stage, other in zip(stages, reference, strict=True):
            assert_same_grads(stage, other)
    assert [row.all() for row in drawn[-1].live[1]] == [True, True, False, True]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_tensor_hooks_and_backward_hooks_below_a_cut_stay_silent():
    calls = []

    class Hooked(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: calls.append("tensor"))
            return y

    stages = [Hooked(6, 6), nn.Linear(6, 6)]
    stages[0].register_full_backward_hook(lambda *_: calls.append("module"))
    x = torch.randn(8, 6)
    for step, _ in run_planned(stages, cut_plan([0, 1, 1, 1], 2), x, x, num_steps=2):
        assert sorted(calls) == sorted(["tensor", "module"] * (4 if step == 0 else 1))
        calls.clear()
