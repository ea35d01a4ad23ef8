"""The split backward under user code that looks at gradients, keeps memory, or calls autograd by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.models import plain_step
from tests.split_layers import WAITING, WIDTH, Channels, Lambda, assert_close_grads, batch, run
from timelyfreeze import FreezingPipeline, Schedule, StageError

SQUARE = (WIDTH, WIDTH)


class Inner(nn.Module):
    """A linear layer within ``function(linear, x)``."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.function(self.linear, x)


def hook_the_cast(linear, x):
    weight = linear.weight.t()
    weight.register_hook(lambda grad: 3 * grad)
    return x @ weight


def hook_the_operators_node(linear, x):
    weight = linear.weight.t()
    weight.grad_fn.register_prehook(lambda grads: (3 * grads[0],))
    return x @ weight


def hook_afterwards(linear, x):
    y = linear(x)
    if not linear.weight._backward_hooks:
        linear.weight.register_hook(lambda grad: 3 * grad)
        linear.bias.register_hook(lambda grad: 5 * grad)
    return y


def hook_the_bias_alone(linear, x):
    if not linear.bias._backward_hooks:
        linear.bias.register_hook(lambda grad: 5 * grad)
    return linear(x)


def train_a_copy(linear, x):
    """Test-time training: the copy's gradient is wanted in the midst of the forward."""
    with torch.enable_grad():
        weight = linear.weight.detach().clone().requires_grad_()
        F.linear(x.detach(), weight).square().mean().backward()
    return linear(x) + F.linear(x, weight.detach() - weight.grad)


def backward_in_forward(linear, x):
    with torch.enable_grad():
        linear(x.detach()).square().mean().backward()
    assert linear.weight.grad is not None
    return linear(x)


class Recomputed(torch.autograd.Function):
    """A backward that runs another one, on copies of its own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            F.linear(x, weight).backward(grad)
        return x.grad, weight.grad


def dual(linear, x):
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(linear(forward_ad.make_dual(x, torch.ones_like(x))))
    return value + tangent


def tangent_of_the_bias(linear, x):
    with forward_ad.dual_level():
        bias = forward_ad.make_dual(linear.bias, linear.bias.detach() + 1)
        value, tangent = forward_ad.unpack_dual(F.linear(x, linear.weight, bias))
    return value + tangent


def closed_over_by_grad(linear, x):
    return torch.func.grad(lambda factor: (factor * linear(x)).square().sum())(x)


def per_sample_gradients(linear, x):
    def loss(parameters, sample):
        return torch.func.functional_call(linear, parameters, (sample,)).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(linear.named_parameters()), x)
    return linear(x) + grads["weight"].mean()


INNER = [
    hook_the_cast,
    hook_the_operators_node,
    hook_the_bias_alone,
    train_a_copy,
    backward_in_forward,
    lambda linear, x: Recomputed.apply(x, linear.weight) + linear(x),
    lambda linear, x: linear(x) + torch.autograd.grad(linear(x).sum(), linear.weight)[0].sum(),
    dual,
    tangent_of_the_bias,
    closed_over_by_grad,
    lambda linear, x: torch.func.jvp(linear, (x,), (torch.ones_like(x),))[1] + linear(x),
    per_sample_gradients,
]
WEIGHTS = {
    "a bias of one number": Lambda(lambda m, x: F.linear(x, m.w0, m.w1), SQUARE, (1,)),
    "addmm with a bias of one number": Lambda(
        lambda m, x: torch.addmm(m.w1, x.flatten(0, 1), m.w0).view_as(x), SQUARE, (1,)
    ),
    "addmm with a column": Lambda(lambda m, x: torch.addmm(m.w1, x.flatten(0, 1), m.w0).view_as(x), SQUARE, (6, 1)),
    "a gradient that is a view": Lambda(lambda m, x: F.linear(x, m.w0) + m.w1.view(2, 3, WIDTH), SQUARE, (6, WIDTH)),
    "vectors": Lambda(
        lambda m, x: torch.stack([F.linear(v, m.w0, m.w1) @ m.w0 for v in x.flatten(0, 1)]).view_as(x), SQUARE, (WIDTH,)
    ),
    "an empty input": Lambda(lambda m, x: F.linear(x, m.w0) + F.linear(x[:0], m.w0).sum(), SQUARE),
    "an expanded input": Lambda(lambda m, x: F.linear(x[:1].expand(2, 3, WIDTH), m.w0), SQUARE),
    "a cast and transposed weight": Lambda(lambda m, x: (x.float() @ m.w0.t().float()).double(), SQUARE),
    "a weight that is the input": Lambda(lambda m, x: x + torch.mm(m.w0, m.w0.t()).sum(), SQUARE),
    "a convolution without bias, first": Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding="same", bias=False)),
}


def assert_equals_plain(model, context=torch.enable_grad, **options):
    torch.manual_seed(0)
    model = model.double()
    reference = copy.deepcopy(model)
    x, y = batch()
    with context():
        result = run(model, x, y, **options)
        for _ in range(2):
            plain_step(reference, F.mse_loss, x, y, 2)
    assert_close_grads(model, reference)
    return result


@pytest.mark.parametrize("cap", [None, 0])
@pytest.mark.parametrize("function", INNER)
def test_user_code_that_meets_gradients_itself(function, cap):
    assert_equals_plain(Inner(function), max_pending_bytes=cap)


def test_a_hook_set_after_the_layer_ran_sees_its_gradient():
    model, seen = Inner(hook_afterwards).double(), []
    x, y = batch()
    with FreezingPipeline([model], num_microbatches=2, loss_fn=F.mse_loss, schedule=WAITING) as pipe:
        pipe.step(x, target=y)
    reference = copy.deepcopy(model)
    for p in reference.parameters():
        p._backward_hooks, p.grad = None, None
        p.register_hook(seen.append)
    plain_step(reference, F.mse_loss, x, y, 2)
    torch.testing.assert_close(model.linear.weight.grad, 3 * sum(g for g in seen if g.dim() == 2))
    torch.testing.assert_close(model.linear.bias.grad, 5 * sum(g for g in seen if g.dim() == 1))


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_and_inputs_of_every_shape(name):
    assert_equals_plain(copy.deepcopy(WEIGHTS[name]))


def test_an_input_written_between_i_and_w_is_an_error():
    """F0 I0 F1 is well for autograd; W0 comes when the buffer has micro-batch 1 in it."""

    def reuse(linear, x):
        linear.buffer.copy_(x)
        return linear(linear.buffer)

    model = Inner(reuse)
    model.linear.register_buffer("buffer", torch.zeros(2, 3, WIDTH))
    model = model.double()
    x, y = batch()
    with FreezingPipeline([model], num_microbatches=2, loss_fn=F.mse_loss, schedule=WAITING) as pipe:
        with pytest.raises(StageError, match=r"0W0: .*\[2, 3, 8\].* in-place .*expected version 1, got 2"):
            pipe.step(x, target=y)
        assert all(p.grad is None for p in model.parameters())


def test_a_graph_kept_beyond_the_step_gives_its_gradients_at_once():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            self.kept = self.other(x).square().sum()
            return self.head(x)

    model = Auxiliary().double()
    reference = copy.deepcopy(model)
    x, y = batch()
    with FreezingPipeline([model], num_microbatches=2, loss_fn=F.mse_loss, schedule=WAITING) as pipe:
        result = pipe.step(x, target=y)
    del result, pipe
    model.kept.backward()
    plain_step(reference, F.mse_loss, x, y, 2)
    reference.kept.backward()
    assert_close_grads(model, reference)


def test_anomaly_mode_names_the_operator():
    model = nn.Linear(WIDTH, WIDTH)
    x, y = batch(dtype=torch.float32)
    x[0] = float("inf")
    loss = {"loss_fn": lambda output, target: (output.nan_to_num(0, 0, 0) * 0).sum(), "num_microbatches": 2}
    with (
        torch.autograd.set_detect_anomaly(True),
        FreezingPipeline([model], schedule=WAITING, **loss) as pipe,
        pytest.raises(StageError, match=r"0I0: .*AddmmBackward0' returned nan"),
    ):
        pipe.step(x, target=y)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("cache_enabled", [False, True])
def test_nested_autocast_and_nested_checkpoints(use_reentrant, cache_enabled):
    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.kernel = nn.Parameter(torch.randn(WIDTH, WIDTH, 1) / 4)

        def forward(self, x):
            h = checkpoint(self.a, x, use_reentrant=use_reentrant)
            with torch.autocast("cpu", enabled=False):
                h = self.b(h.float())
            with torch.autocast("cpu", torch.float16):
                h = self.c(h) + self.b(h)
            h = h.transpose(1, 2).float()
            return torch.convolution(h, self.kernel, None, [1], [0], [1], False, [0], 1).transpose(1, 2)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(WIDTH, WIDTH), Casting()

        def forward(self, x):
            return checkpoint(self.inner, self.first(x), use_reentrant=use_reentrant).float()

    torch.manual_seed(0)
    model = Outer()
    reference = copy.deepcopy(model)
    x, y = batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
        run(model, x, y)
        for _ in range(2):
            plain_step(reference, F.mse_loss, x, y, 2)
    assert_close_grads(model, reference, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cap", [None, 0])
def test_layers_that_autocast_leaves_alone_keep_their_precision_in_i_and_w(cap):
    def at_full_precision(linear, x):
        with torch.autocast("cpu", enabled=False):
            return linear(torch.tanh(linear(x)))

    torch.manual_seed(0)
    model = Inner(at_full_precision)
    reference = copy.deepcopy(model)
    x, y = batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        run(model, x, y, max_pending_bytes=cap)
    for _ in range(2):
        plain_step(reference, F.mse_loss, x, y, 2)
    assert_close_grads(model, reference)


def test_a_weight_with_gaps_in_its_memory_that_is_cast():
    def make():
        torch.manual_seed(0)
        model = Lambda(lambda m, x: F.linear(x.float(), m.w0.float()).double())
        model.w0 = nn.Parameter(torch.randn(WIDTH, WIDTH + 1, dtype=torch.float64).t()[1:])
        return model

    model, reference = make(), make()
    x, y = batch()
    with FreezingPipeline([model], num_microbatches=2, loss_fn=F.mse_loss, schedule=WAITING) as pipe:
        assert pipe.step(x, target=y).peak_pending_bytes != [0]
    plain_step(reference, F.mse_loss, x, y, 2)
    assert_close_grads(model, reference)


def test_w_gives_its_bytes_back():
    """One micro-batch waits at a time, so the most that waits is what one keeps."""
    one_at_a_time = Schedule([["0F0", "0I0", "0F1", "0W0", "0I1", "0F2", "0W1", "0I2", "0W2"]], name="one at a time")
    model = nn.Sequential(nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)).double()
    x, y = torch.zeros(6, 3, dtype=torch.int64), torch.zeros(6, 3, WIDTH, dtype=torch.float64)
    layer_bytes = 2 * 3 * WIDTH * 8  # of an input or an output's gradient, for one micro-batch
    assert run(model, x, y, one_at_a_time).peak_pending_bytes == [x.nbytes + 3 * layer_bytes]
