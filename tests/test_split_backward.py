"""I and W apart: what waits for W, what does not, and that gradients are the plain model's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.models import assert_same_grads, plain_step
from tests.split_layers import (
    LAYERS,
    WAITING,
    WIDTH,
    Attention,
    Channels,
    Layer,
    Watched,
    assert_close_grads,
    batch,
    make,
    run,
)
from timelyfreeze import FreezingPipeline, Schedule, create_schedule

WHOLE = Schedule([["0F0", "0B0", "0F1", "0B1"]], name="whole")


def assert_trains_as_the_plain_model(model):
    """Two steps that add up."""
    reference = copy.deepcopy(model)
    x, y = batch()
    run(model, x, y)
    for _ in range(2):
        plain_step(reference, F.mse_loss, x, y, 2)
    assert_close_grads(model, reference)


@pytest.mark.parametrize("name", LAYERS)
def test_weight_gradients_wait_for_w_and_equal_the_plain_models(name):
    layer = LAYERS[name]
    watched = make(layer)
    reference = copy.deepcopy(watched)
    x, y = batch()
    result = run(watched, x, y)
    for _ in range(2):
        plain_step(reference, F.mse_loss, x, y, 2)
    assert_close_grads(watched.layer, reference.layer)
    in_input_grad = {n for n, _ in watched.layer.named_parameters() if any(part in n for part in layer.in_input_grad)}
    assert watched.ready[0::2] == [set(), set()]
    assert watched.ready[1::2] == [in_input_grad] * 2
    everything_at_once = in_input_grad == {n for n, _ in watched.layer.named_parameters()}
    assert (result.peak_pending_bytes == [0]) == everything_at_once


@pytest.mark.parametrize("name", ["linear", "attention", "batches"])
def test_without_i_and_w_nothing_waits_and_not_a_bit_changes(name):
    watched = make(LAYERS[name])
    reference = copy.deepcopy(watched)
    x, y = batch()
    assert run(watched, x, y, WHOLE).peak_pending_bytes == [0]
    for _ in range(2):
        reference.zero_grad()
        plain_step(reference, F.mse_loss, x, y, 2)
    for p in reference.parameters():
        p.grad *= 2
    assert_same_grads(watched, reference)


@pytest.mark.parametrize(
    ("options", "tied"),  # sparse and tied: torch itself cannot add the two
    [
        *(({}, tied) for tied in (False, True)),
        *(({"padding_idx": 2}, tied) for tied in (False, True)),
        *(({"scale_grad_by_freq": True}, tied) for tied in (False, True)),
        ({"sparse": True}, False),
    ],
)
def test_embeddings(options, tied):
    """Rows are added to the one gradient buffer; tied to the head, both uses add up."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, WIDTH, **options)
            self.head = nn.Linear(WIDTH, 11, bias=False)
            if tied:
                self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x)).transpose(1, 2)

    torch.manual_seed(0)
    model = Model().double()
    reference = copy.deepcopy(model)
    x, y = torch.randint(0, 11, (4, 3)), torch.randint(0, 11, (4, 3))
    with FreezingPipeline([model], num_microbatches=2, loss_fn=F.cross_entropy, schedule=WAITING) as pipe:
        pipe.step(x, target=y)
    plain_step(reference, F.cross_entropy, x, y, 2)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense())


def test_embedding_waits_and_rows_of_padding_stay_zero():
    torch.manual_seed(0)
    model = Watched(nn.Embedding(5, WIDTH, padding_idx=1)).double()
    x = torch.tensor([[1, 2, 2, 0]] * 4)
    with FreezingPipeline([model], num_microbatches=2, loss_fn=lambda o, t: o.sum(), schedule=WAITING) as pipe:
        pipe.step(x, target=x)
    assert model.ready == [set(), set()]
    expected = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0]).double()[:, None].expand(5, WIDTH)
    torch.testing.assert_close(
        model.layer.weight.grad, expected * 2.0
    )  # 2 samples a micro-batch, halved by its weight, twice


def test_weight_used_twice_counts_twice_and_once_only():
    """Case 15: one parameter in two products on one path."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(torch.tanh(self.inner(x)))

    model = Twice().double()
    assert_trains_as_the_plain_model(model)


@pytest.mark.parametrize(
    "leave",
    [
        lambda y: y.view(-1),
        lambda y: y.transpose(0, 1)[::1],
        lambda y: y.unbind(1)[0],
        lambda y: y.expand(2, *y.shape),
        lambda y: y.chunk(2, dim=-1),
        lambda y: {"h": y[:, :2], "rest": (y[:, 2:], None, 3, "text"), "mask": torch.ones(3, dtype=torch.bool)},
    ],
)
def test_outputs_that_are_views_and_nested_values(leave):
    """Cases 16 and 17: views of every sort, and what is no tensor, between stages."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return leave(self.inner(x))

    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(1, 1)

        def forward(self, value):
            parts: list[torch.Tensor] = []

            def collect(item):
                if isinstance(item, torch.Tensor) and item.is_floating_point():
                    parts.append(item)
                elif isinstance(item, dict):
                    list(map(collect, item.values()))
                elif isinstance(item, tuple):
                    list(map(collect, item))

            collect(value)
            return self.scale(sum(part.square().sum() for part in parts).reshape(1, 1))

    torch.manual_seed(0)
    stages = [First().double(), Second().double()]
    reference = copy.deepcopy(nn.Sequential(*stages))
    x, _ = batch()
    schedule = Schedule([["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]])

    def loss(output, target):
        return output.sum()

    with FreezingPipeline(stages, num_microbatches=2, loss_fn=loss, schedule=schedule) as pipe:
        pipe.step(x, target=x)
    plain_step(reference, loss, x, x, 2)
    assert_close_grads(nn.Sequential(*stages), reference)


def test_hooks_see_the_whole_gradient():
    """A weight with a hook is left to autograd: the hook sees its gradient, once a backward, as in the plain model."""
    seen: dict[str, list[torch.Tensor]] = {"hook": [], "post": [], "plain": []}
    model = make(
        Layer(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    )
    reference = copy.deepcopy(model)
    reference.layer[0].weight.register_hook(lambda g: seen["plain"].append(g.clone()))
    model.layer[0].weight.register_hook(lambda g: seen["hook"].append(g.clone()))
    model.layer[1].weight.register_post_accumulate_grad_hook(lambda p: seen["post"].append(p.grad.clone()))
    x, y = batch()
    run(model, x, y)
    for _ in range(2):
        plain_step(reference, F.mse_loss, x, y, 2)
    assert_close_grads(model, reference)
    assert len(seen["hook"]) == len(seen["post"]) == 4
    for a, b in zip(seen["hook"], seen["plain"], strict=True):
        torch.testing.assert_close(a, b)
    assert model.ready[1] == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_gradients_that_user_code_asks_for_are_given_at_once():
    """A penalty on the input gradient: torch.autograd.grad inside forward, differentiated again in I."""

    class Penalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

        def forward(self, x):
            with torch.enable_grad():
                x = x if x.requires_grad else x.detach().requires_grad_()
                y = self.inner(x)
                slope, weight = torch.autograd.grad(y.square().sum(), [x, self.inner[0].weight], create_graph=True)
            return y + slope + weight.square().sum()

    model = Penalized().double()
    assert_trains_as_the_plain_model(model)


def test_autocast_casts_as_without_a_pipeline():
    layer = Layer(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Channels(nn.Conv1d(WIDTH, WIDTH, 1)), Attention())
    )
    model = make(layer).float()
    reference = copy.deepcopy(model)
    x, y = batch(dtype=torch.float32)
    kept = []
    model.layer[0].register_forward_hook(lambda m, a, out: kept.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        run(model, x, y)
        for _ in range(2):
            plain_step(reference, F.mse_loss, x, y, 2)
    assert set(kept) == {torch.bfloat16}
    assert_close_grads(model, reference, rtol=2e-2, atol=2e-3)
    assert model.ready[1] == {"2.inner.bias"}


@pytest.mark.parametrize("compile_it", [torch.compile, lambda m: (m.compile(), m)[1]])
def test_compiled_stages_are_refused_where_their_backward_is_split(compile_it):
    stages = [nn.Linear(2, 2), nn.Sequential(compile_it(nn.Linear(2, 2)))]
    schedule = create_schedule("zb_h1", num_ranks=2, num_microbatches=4)
    with pytest.raises(ValueError, match="compiled modules in stages 1") as caught:
        FreezingPipeline(stages, num_microbatches=4, schedule=schedule, loss_fn=F.mse_loss)
    assert "1f1b" in str(caught.value)
    FreezingPipeline(stages, num_microbatches=4, schedule="1f1b", loss_fn=F.mse_loss).close()


def test_w_right_behind_its_i_is_a_whole_backward():
    """Case 20, with the numbers of a whole backward to the last bit."""
    schedule = Schedule([["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]], name="adjacent")
    watched = make(LAYERS["mlp"])
    reference = copy.deepcopy(watched)
    x, y = batch()
    with FreezingPipeline([watched], num_microbatches=2, loss_fn=F.mse_loss, schedule=schedule) as pipe:
        assert [str(action) for action in pipe.schedule.actions] == ["0F0", "0B0", "0F1", "0B1"]
        assert pipe.step(x, target=y).peak_pending_bytes == [0]
    plain_step(reference, F.mse_loss, x, y, 2)
    assert_same_grads(watched, reference)
