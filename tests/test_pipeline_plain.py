"""The pipeline without freezing against the same model, not split."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.models import assert_same_grads, mlp, plain_step
from timelyfreeze import FreezingPipeline, NoChunk
from timelyfreeze.runtime import Microbatch


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3, 4, 8])
def test_equals_the_plain_model_bit_for_bit(schedule, num_stages, num_microbatches):
    model = mlp()
    reference = copy.deepcopy(model)
    x, y = torch.randn(10, 6), torch.randn(10, 6)
    with FreezingPipeline(model, num_stages, num_microbatches, schedule=schedule, loss_fn=F.mse_loss) as pipe:
        for _ in range(3):
            loss = pipe.step(x, target=y).loss
            assert torch.equal(loss, plain_step(reference, F.mse_loss, x, y, num_microbatches))
    # Steps add up without a division, as backward() does (CASES 34); the first step's buffer plus the second's is the
    # one difference in the order of additions.
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inline", [False, True])
def test_gradients_of_one_step_are_bitwise_those_of_the_plain_model(inline, monkeypatch):
    monkeypatch.setattr("timelyfreeze.runtime.engine.INLINE_BELOW_S", float("inf") if inline else 0.0)
    model = mlp()
    reference = copy.deepcopy(model)
    x, y = torch.randn(7, 6), torch.randn(7, 6)
    with FreezingPipeline(model, 2, 3, loss_fn=F.mse_loss, split_points=[1]) as pipe:
        for _ in range(3):
            model.zero_grad()
            reference.zero_grad()
            pipe.step(x, target=y)
            plain_step(reference, F.mse_loss, x, y, 3)
            assert_same_grads(model, reference)


def test_batch_smaller_than_the_number_of_microbatches_and_a_new_length(tmp_path):  # CASES 22, 27, 28, 29
    model = mlp()
    reference = copy.deepcopy(model)
    with FreezingPipeline(model, 2, 8, loss_fn=F.mse_loss) as pipe:
        for shape in [(8, 6), (3, 6), (5, 4, 6), (8, 9, 6)]:
            model.zero_grad()
            reference.zero_grad()
            x, y = torch.randn(shape), torch.randn(shape)
            pipe.step(x, target=y)
            plain_step(reference, F.mse_loss, x, y, min(8, shape[0]))
            assert_same_grads(model, reference)


def test_token_weighted_loss_divides_once_by_the_whole_count():  # CASES 35, 37
    model = mlp()
    reference = copy.deepcopy(model)
    x = torch.randn(8, 6)
    y = torch.tensor([0, 1, -100, -100, -100, -100, 5, 3])

    def summed(output, target):
        return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()

    with FreezingPipeline(model, 2, 4, loss_fn=summed) as pipe:
        loss = pipe.step(x, target=y).loss
    expected = F.cross_entropy(reference(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_no_valid_sample_is_an_error_and_leaves_gradients_alone():
    model = mlp()
    with FreezingPipeline(model, 2, 2, loss_fn=lambda o, t: ((o * 0).sum(), 0)) as pipe:
        with pytest.raises(ValueError, match="count above 0"):
            pipe.step(torch.randn(4, 6), target=torch.randn(4, 6))
        assert all(p.grad is None for p in model.parameters())


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.5))


@dataclass
class Record:
    h: torch.Tensor
    note: str


class Pair(NamedTuple):
    h: torch.Tensor
    ids: torch.Tensor


class MakeTuple(Scale):
    def forward(self, x, mask=None, flag=True, n=3):
        assert mask is None
        assert flag is True
        assert n == 3
        return x * self.w, torch.arange(len(x)), None, "text", torch.ones(len(x))


class FromTuple(Scale):
    def forward(self, h, ids, nothing, text, extra):
        assert nothing is None
        assert text == "text"
        assert not extra.requires_grad
        assert ids.dtype == torch.int64
        return {"h": h * self.w + ids[:, None], "complex": torch.ones(len(h), dtype=torch.complex64)}


class FromDict(Scale):
    def forward(self, value):
        assert value["complex"].is_complex()
        return Record(value["h"] * self.w, "kept")


class FromRecord(Scale):
    def forward(self, record):
        assert record.note == "kept"
        return Pair(record.h * self.w, torch.zeros(1))


class FromPair(Scale):
    def forward(self, h, ids):
        return h * self.w


def test_tuples_dicts_records_none_and_plain_values_travel():  # CASES 2, 3, 31, 32, 33
    stages = [MakeTuple(), FromTuple(), FromDict(), FromRecord(), FromPair()]
    reference = copy.deepcopy(stages)
    x, y = torch.randn(6, 3), torch.randn(6, 3)
    with FreezingPipeline(stages, num_microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, None, flag=True, n=3, target=y)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        value = reference[1](*reference[0](a))
        value = reference[4](*reference[3](reference[2](value)))
        (F.mse_loss(value, b) * 0.5).backward()
    for stage, other in zip(stages, reference, strict=True):
        assert torch.equal(stage.w.grad, other.w.grad)


def test_presplit_microbatches_and_nochunk():  # CASES 30, 31
    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x, table):
            return self.linear(x) + table

    torch.manual_seed(0)
    stages = [Add(), nn.Linear(3, 3)]
    reference = copy.deepcopy(stages)
    x, y, table = torch.randn(6, 3), torch.randn(6, 3), torch.randn(3)
    with FreezingPipeline(stages, num_microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, NoChunk(table), target=y)
        whole = [stage.weight.grad.clone() for stage in (stages[0].linear, stages[1])]
        pipe.zero_grad()
        pipe.step(microbatches=[((x[:4], NoChunk(table)), y[:4]), Microbatch((x[4:], table), {}, y[4:], num_samples=2)])
    F.mse_loss(reference[1](reference[0](x, table)), y).backward()
    for grad, presplit, expected in zip(
        whole,
        (stages[0].linear.weight.grad, stages[1].weight.grad),
        (reference[0].linear.weight.grad, reference[1].weight.grad),
        strict=True,
    ):
        torch.testing.assert_close(grad, expected)
        torch.testing.assert_close(presplit, expected)


def test_loss_inside_the_last_stage():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, h, target):
            return F.mse_loss(self.linear(h), target)

    torch.manual_seed(0)
    stages = [nn.Linear(6, 6), Head()]
    reference = copy.deepcopy(stages)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    with FreezingPipeline(stages, num_microbatches=2) as pipe:
        loss = pipe.step(x, target=y).loss
        evaluated = pipe.evaluate(x, target=y)
    expected = reference[1](reference[0](x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(evaluated, expected.detach())
    torch.testing.assert_close(stages[0].weight.grad, reference[0].weight.grad)


def test_gradients_reach_inputs_that_require_them():
    model = mlp()
    reference = copy.deepcopy(model)
    table = torch.randn(8, 6, requires_grad=True)
    other = table.detach().clone().requires_grad_()
    y = torch.randn(8, 6)
    with FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss) as pipe:
        pipe.step(table * 2, target=y)
    F.mse_loss(reference(other * 2), y).backward()
    torch.testing.assert_close(table.grad, other.grad)


def test_user_frozen_stage_and_back():  # CASES 1: frozen first, then trainable
    model = mlp()
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    with FreezingPipeline(model, 2, 2, loss_fn=F.mse_loss, split_points=[2]) as pipe:
        for frozen in (True, False, True):
            for p in model[:2].parameters():
                p.requires_grad_(not frozen)
            model.zero_grad()
            pipe.step(x, target=y)
            reference = copy.deepcopy(model)
            reference.zero_grad()
            plain_step(reference, F.mse_loss, x, y, 2)
            assert_same_grads(model, reference)
            assert all(p.requires_grad is not frozen for p in model[:2].parameters())


def test_activation_written_in_place_at_a_boundary():
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))]
    reference = copy.deepcopy(stages)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with FreezingPipeline(stages, num_microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, target=y)
    F.mse_loss(reference[1](reference[0](x)), y).backward()
    torch.testing.assert_close(stages[0].weight.grad, reference[0].weight.grad)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


@pytest.mark.parametrize("shared_module", [False, True])
def test_tied_parameters(shared_module):  # CASES 39
    class Unembed(nn.Module):
        def __init__(self, embed):
            super().__init__()
            self.embed = embed

        def forward(self, h):
            return F.linear(h, self.embed.weight)

    torch.manual_seed(0)
    whole = Tied()
    reference = copy.deepcopy(whole)
    head = Unembed(whole.embed) if shared_module else whole.head
    model = nn.Sequential(whole.embed, whole.body, head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    ids, y = torch.randint(11, (8,)), torch.randint(11, (8,))
    with FreezingPipeline(model, 3, 4, loss_fn=F.cross_entropy) as pipe:
        assert len(list(pipe.parameters())) == 3
        for _ in range(3):
            pipe.step(ids, target=y)
            F.cross_entropy(reference(ids), y).backward()
            torch.testing.assert_close(whole.embed.weight.grad, reference.embed.weight.grad)
            for each in (optimizer, reference_optimizer):
                each.step()
                each.zero_grad()
    torch.testing.assert_close(whole.embed.weight, reference.embed.weight, rtol=1e-4, atol=1e-5)
    assert whole.head.weight is whole.embed.weight
