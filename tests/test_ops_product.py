"""Products large enough for oneDNN, where it is the faster one: as exact as torch's, and off where it is off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from timelyfreeze import ops

ROWS, WIDTH, FEATURES = (2, 128), 160, (96, 64, 130)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(together, biased):
    """x, weights and biases; the weights behind each other in memory, or apart."""
    x = torch.randn(*ROWS, WIDTH, requires_grad=True)
    whole = torch.randn(sum(FEATURES), WIDTH)
    weights = [part if together else part.clone() for part in whole.split(FEATURES)]
    weights = [weight.detach().requires_grad_() for weight in weights]
    biases = [torch.randn(size, requires_grad=True) for size in FEATURES] if biased else None
    return x, weights, biases


def in_double(x, weights, biases, grad):
    """Output and gradients of the same in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, *weights, *(biases or ()))]
    w = torch.cat(leaves[1 : 1 + len(weights)])
    b = torch.cat(leaves[1 + len(weights) :]) if biases else None
    y = functional.linear(leaves[0], w, b)
    return [y, *torch.autograd.grad(y, leaves, grad.double())]


def assert_close(found, wanted):
    tolerance = 4 * torch.finfo(torch.float32).eps * wanted.norm().item()
    assert (found.double() - wanted).norm().item() <= tolerance


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_large_products(together, biased):
    x, weights, biases = make(together, biased)
    grad = torch.randn(*ROWS, sum(FEATURES))
    y = ops.packed_linear(x, weights, biases)
    y.backward(grad)
    leaves = [x, *weights, *(biases or ())]
    for found, wanted in zip([y, *(leaf.grad for leaf in leaves)], in_double(x, weights, biases, grad), strict=True):
        assert_close(found, wanted)


def test_a_second_gradient_is_added_in_place():
    x, weights, _ = make(together=True, biased=False)
    grad = torch.randn(*ROWS, sum(FEATURES))
    wanted = in_double(x, weights, None, grad)[2:]
    ops.packed_linear(x, weights).backward(grad)
    first = [(weight.grad, weight.grad._version) for weight in weights]
    ops.packed_linear(x, weights).backward(grad)
    for weight, (old, version), once in zip(weights, first, wanted, strict=True):
        assert weight.grad is old
        assert old._version > version
        assert_close(weight.grad, 2 * once)


def test_frozen_weights_pass_a_gradient_on():
    x, weights, _ = make(together=False, biased=False)
    grad = torch.randn(*ROWS, sum(FEATURES))
    wanted = in_double(x, weights, None, grad)[1]
    ops.packed_linear(x, [weight.detach() for weight in weights]).backward(grad)
    assert_close(x.grad, wanted)


def test_without_onednn_the_bits_are_torchs():
    x, weights, _ = make(together=False, biased=False)
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(ops.packed_linear(x, weights[:1]), functional.linear(x, weights[0]))


def test_a_large_head_and_its_loss():
    x = torch.randn(256, WIDTH, requires_grad=True)
    weight = (torch.randn(300, WIDTH) / 10).requires_grad_()
    target = torch.randint(300, (256,))
    loss = ops.linear_cross_entropy(x, weight, target, chunk_rows=128)
    loss.backward()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    functional.cross_entropy(functional.linear(*wide), target).backward()
    for found, wanted in zip((x, weight), wide, strict=True):
        assert_close(found.grad, wanted.grad)


def products_of(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return [event.count for event in profile.key_averages() if event.key == "timelyfreeze::product"]


def test_onednn_multiplies_on_amd_with_avx512_and_nowhere_else():
    x, weights, _ = make(together=True, biased=False)
    info = Path("/proc/cpuinfo")
    amd = info.exists() and "AuthenticAMD" in info.read_text()
    faster = amd and torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert products_of(lambda: ops.packed_linear(x, weights)) == ([1] if faster else [])
    assert products_of(lambda: ops.packed_linear(x[:, :1], weights)) == []  # small: a call costs more
    with torch.backends.mkldnn.flags(enabled=False):
        assert products_of(lambda: ops.packed_linear(x, weights)) == []
