"""Models and uses that are legal but unusual; each once gave a wrong result or a crash."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.models import plain_step
from timelyfreeze import FreezeConfig, FreezingPipeline, PlanError, StageError


def assert_trains_like_the_plain_model(model, num_microbatches=2, num_steps=2, **options):
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with FreezingPipeline(model, 2, num_microbatches, loss_fn=F.mse_loss, **options) as pipe:
        for _ in range(num_steps):
            model.zero_grad()
            reference.zero_grad()
            pipe.step(x, target=y)
            plain_step(reference, F.mse_loss, x, y, num_microbatches)
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
    return reference


def test_a_module_that_stands_twice_in_a_sequential_runs_twice():
    tanh, shared = nn.Tanh(), nn.Linear(4, 4)
    assert_trains_like_the_plain_model(nn.Sequential(shared, tanh, shared, tanh, nn.Linear(4, 4)))


class Wraps(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.own = inner, nn.Linear(4, 4)

    def forward(self, x):
        return self.own(self.inner(x))


def test_parametrized_modules_may_be_shared_by_stages():
    shared = parametrizations.weight_norm(nn.Linear(4, 4))
    reference = nn.Sequential(Wraps(shared), Wraps(shared))
    x = torch.randn(4, 4)
    F.mse_loss(reference(x), x).backward()
    expected = [p.grad.clone() for p in reference.parameters()]
    reference.zero_grad()
    with FreezingPipeline(reference, 2, 1, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, target=x)
    for p, grad in zip(reference.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_buffers_and_attributes_of_shared_modules_stay_one():
    norm, dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
    shared = nn.Sequential(norm, dropout)
    model = nn.Sequential(Wraps(shared), Wraps(shared))
    with FreezingPipeline(model, 2, 1, loss_fn=F.mse_loss) as pipe:
        dropout.p = 0.0
        model.double()
        pipe.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        x = torch.randn(4, 4).double()
        first, second = pipe.step(x, target=x).loss, pipe.step(x, target=x).loss
        assert model[1].inner is shared
        assert norm.num_batches_tracked == 4
        assert torch.equal(first, second)  # no dropout


def test_a_replaced_child_trains():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    with FreezingPipeline(model, 2, 2, loss_fn=F.mse_loss, split_points=[1]) as pipe:
        pipe.step(x, target=x)
        old = model[2]
        old.weight.grad = None
        model[2] = nn.Linear(4, 4)
        pipe.step(x, target=x)
        assert model[2].weight.grad is not None
        assert old.weight.grad is None


def test_a_tensor_that_is_sent_twice_stays_one():
    class Twice(nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            return h, h

    class InPlace(nn.Linear):
        def forward(self, pair):
            first, second = pair
            first.mul_(2)
            return super().forward(first + second)

    assert_trains_like_the_plain_model(nn.Sequential(Twice(4, 4), InPlace(4, 4)))


def test_a_graph_hidden_in_an_unknown_object_is_refused():
    class Box:
        def __init__(self, t):
            self.t = t

    class Hides(nn.Linear):
        def forward(self, x):
            return Box(super().forward(x))

    pipe = FreezingPipeline([Hides(4, 4), nn.Linear(4, 4)], num_microbatches=2, loss_fn=F.mse_loss)
    with pipe, pytest.raises(StageError, match=r"in Box\.t"):
        pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))


def test_named_results_and_packed_sequences_travel():
    class Named(nn.Linear):
        def forward(self, x):
            return super().forward(x).max(dim=1, keepdim=True)

    class TakesNamed(nn.Linear):
        def forward(self, found):
            return super().forward(found.values.expand(-1, 4))

    assert_trains_like_the_plain_model(nn.Sequential(Named(4, 4), TakesNamed(4, 4)))

    class Packs(nn.Linear):
        def forward(self, x):
            return nn.utils.rnn.pack_padded_sequence(super().forward(x)[:, None], [1] * len(x), batch_first=True)

    class Unpacks(nn.Linear):
        def forward(self, packed):
            return super().forward(nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0][:, 0])

    assert_trains_like_the_plain_model(nn.Sequential(Packs(4, 4), Unpacks(4, 4)))


def test_sparse_embedding_tied_to_a_dense_head():
    class Head(nn.Module):
        def __init__(self, embed):
            super().__init__()
            self.embed = embed

        def forward(self, h):
            return h @ self.embed.weight.t()

    embed = nn.Embedding(10, 4, sparse=True)
    model = nn.Sequential(embed, nn.Tanh(), Head(embed))
    ids, y = torch.randint(10, (8,)), torch.randint(10, (8,))
    F.cross_entropy(model(ids), y).backward()
    expected, embed.weight.grad = embed.weight.grad.to_dense(), None
    with FreezingPipeline(model, 2, 2, loss_fn=F.cross_entropy, split_points=[1]) as pipe:
        pipe.step(ids, target=y)
    torch.testing.assert_close(embed.weight.grad.to_dense(), expected)


def test_input_gradients_of_a_counted_loss_are_divided_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    table = torch.randn(8, 4, requires_grad=True)
    y = torch.randn(8, 4)
    with FreezingPipeline(model, 2, 2, loss_fn=lambda o, t: ((o - t).pow(2).sum(), o.numel())) as pipe:
        pipe.step(table * 1, target=y)
    ours, table.grad = table.grad, None
    F.mse_loss(model(table * 1), y).backward()
    torch.testing.assert_close(ours, table.grad)


def test_a_child_that_cannot_be_copied_is_named():
    class Keeps(nn.Linear):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    model = nn.Sequential(Keeps(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model(torch.ones(2, 4))
    pipe = FreezingPipeline(model, 2, 2, loss_fn=F.mse_loss)
    with pipe, pytest.raises(ValueError, match=r"child 0, Keeps\). Pass split_points"):
        pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))


def test_the_step_after_one_that_was_given_up_is_a_clean_one(monkeypatch):
    release = threading.Event()

    class Hangs(nn.Linear):
        def forward(self, x):
            if hang:
                release.wait()  # in C: no interrupt reaches it
            return super().forward(x)

    hang = True
    x = torch.ones(4, 4)
    with FreezingPipeline(
        [Hangs(4, 4), nn.Linear(4, 4)], num_microbatches=2, loss_fn=F.mse_loss, timeout_s=0.1
    ) as pipe:
        with pytest.raises(TimeoutError):
            pipe.step(x, target=x)
        hang = False
        release.set()
        assert torch.isfinite(pipe.step(x, target=x).loss)


def test_a_refused_freeze_state_changes_nothing():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    with FreezingPipeline(model, 2, 2, loss_fn=F.mse_loss, freeze=FreezeConfig(), split_points=[1]) as pipe:
        state = copy.deepcopy(pipe.freeze_state_dict())
        bad = copy.deepcopy(state) | {"step": 99, "split_points": [2]}
        bad["freezing"]["version"] = 77
        with pytest.raises(PlanError):
            pipe.load_freeze_state_dict(bad)
        assert pipe.freeze_state_dict() == state


def test_the_default_generator_stays_usable_and_seed_in_a_stage_does_not_touch_it():
    class Seeds(nn.Linear):
        def forward(self, x):
            torch.seed()
            torch.manual_seed(3)
            return super().forward(x) + torch.rand(())

    x = torch.ones(4, 4)
    with FreezingPipeline([Seeds(4, 4), nn.Linear(4, 4)], num_microbatches=2, loss_fn=F.mse_loss) as pipe:
        before = torch.get_rng_state()
        losses = [pipe.step(x, target=x).loss for _ in range(2)]
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(*losses)  # the stage's own seed counts there
    torch.randn(2, generator=torch.random.default_generator)
