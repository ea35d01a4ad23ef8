"""GPT-2's Conv1D, weights stored [in, out], on the operator for linear layers; what its backward keeps and writes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.known_models import transformers
from tests.models import plain_step
from timelyfreeze import FreezingPipeline, accelerate, ops
from timelyfreeze.runtime.memory import count_saved_bytes

Conv1D = transformers.pytorch_utils.Conv1D


def layers(dtype=torch.float32):
    """One accelerated, and its plain twin."""
    torch.manual_seed(0)
    plain = Conv1D(5, 6).to(dtype)
    with torch.no_grad():
        plain.bias.copy_(torch.randn(5))
    layer = copy.deepcopy(plain)
    assert [name for name, _ in accelerate(layer).changed] == [""]
    return layer, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 6), (6,), (1, 2, 3, 6)])
def test_outputs_and_gradients(dtype, shape):
    layer, plain = layers(dtype)
    x = torch.randn(shape, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [m(y) for m, y in zip((layer, plain), inputs, strict=True)]
    assert "PackedLinear" in outputs[0].grad_fn.name()
    assert torch.equal(*outputs)
    for output in outputs:
        output.backward(torch.ones_like(output))
    tolerance = 8 * torch.finfo(dtype).eps
    for a, b in [(inputs[0], inputs[1]), (layer.weight, plain.weight), (layer.bias, plain.bias)]:
        torch.testing.assert_close(a.grad, b.grad, rtol=tolerance, atol=tolerance)
    assert layer.weight.grad.stride() == layer.weight.stride()


def test_what_is_kept():
    """The input where the weight trains; frozen, the weight alone."""
    layer, _ = layers()
    x = torch.randn(7, 6, requires_grad=True)
    for trains, kept in ((True, x.nbytes), (False, 0)):
        layer.weight.requires_grad_(trains)
        with count_saved_bytes(layer.parameters()) as saved:
            y = layer(x)
        assert saved.total_bytes == kept
        del y


def test_gradients_are_added_where_they_lie():
    layer, plain = layers()
    for m in (layer, plain):
        m(torch.ones(3, 6)).sum().backward()
    before = layer.weight.grad.data_ptr()
    with torch.profiler.profile() as profile:
        layer(torch.ones(3, 6)).sum().backward()
    plain(torch.ones(3, 6)).sum().backward()
    assert layer.weight.grad.data_ptr() == before
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    # One GEMM with beta = 1 into the gradient, and no addition of a gradient as large as the weight.
    assert "aten::addmm_" in {event.key for event in profile.key_averages()}


def test_hooks_of_the_weight_see_its_gradient():
    layer, plain = layers()
    seen = []
    for m in (layer, plain):
        m.weight.register_hook(lambda grad: seen.append(grad.clone()))
        m(torch.ones(3, 6)).sum().backward()
    torch.testing.assert_close(*seen)
    assert seen[0].shape == (6, 5)


def test_inputs_that_do_not_fit_are_the_layers_own_error():
    layer, _ = layers()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        layer(torch.ones(3, 5))
    with pytest.raises(ValueError, match="packed_linear: weight 0"):
        ops.packed_linear(torch.ones(2, 3), [torch.ones(4, 3)] * 2, transposed=True)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_in_a_pipeline(schedule):
    """Weight gradients wait for W where the backward is split."""
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(8, 6), nn.GELU(), Conv1D(6, 8), nn.Tanh())
    plain = copy.deepcopy(model)
    accelerate(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with FreezingPipeline(model, 2, 4, schedule=schedule, loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(x, target=y)
    plain_step(plain, nn.functional.mse_loss, x, y, 4)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
