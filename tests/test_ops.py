"""The fused operators against their plain formulas: gradients, states, dtypes, shapes, and what they keep."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.op_cases import CASES, COS, SIN, outputs
from tests.op_parity import layouts, random_like, run, strided, worst_errors
from timelyfreeze import ops
from timelyfreeze.runtime.memory import count_saved_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def states(case):
    """Every choice of what requires grad: all, weights frozen, the weights alone, each tensor alone."""
    names = list(case.shapes)
    inputs = [name for name in names if name not in case.weights]
    chosen = [names, inputs, list(case.weights), *[[name] for name in names]]
    return [set(c) for c in dict.fromkeys(tuple(c) for c in chosen if c)]


ALL_STATES = [
    pytest.param(name, live, id=f"{name}: {'+'.join(sorted(live))}")
    for name, case in CASES.items()
    for live in states(case)
]


@pytest.mark.parametrize(("name", "live"), ALL_STATES)
def test_gradcheck(name, live):
    """Float64, first and second derivatives."""
    case = CASES[name]
    tensors = case.tensors(torch.float64)

    def function(*given):
        filled = dict(zip(sorted(live), given, strict=True))
        return tuple(outputs(case.fused(*[filled.get(n, t) for n, t in tensors.items()])))

    inputs = [tensors[n].clone().requires_grad_() for n in sorted(live)]
    assert torch.autograd.gradcheck(function, inputs)
    if name.startswith("linear_cross_entropy") and "x" not in live:
        return  # linear in the weights' gradient but for the softmax: checked with x
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize(("name", "live"), ALL_STATES)
def test_equals_the_plain_formula(name, live):
    case = CASES[name]
    tensors = case.tensors(torch.float64)
    made, grads = run(case.fused, tensors, live)
    expected, expected_grads = run(case.plain, tensors, live)
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # rotary tables are float32
        assert a.requires_grad == b.requires_grad or name == "rms_norm on a stream"
    for key in tensors:
        if expected_grads[key] is None:
            assert grads[key] is None, key
        else:
            torch.testing.assert_close(grads[key], expected_grads[key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_at_most_twice_plain_torchs(name, dtype):
    """Against float64, the worst of many samples: outputs and gradients (one rounding of the result is free)."""
    assert worst_errors(CASES[name], dtype).faults() == []


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_kept_where_nothing_requires_grad(name):
    case = CASES[name]
    tensors = case.tensors(torch.float32)
    with count_saved_bytes() as saved:
        assert not any(o.requires_grad for o in outputs(case.fused(*tensors.values())))
        with torch.no_grad():
            case.fused(*[t.requires_grad_() for t in tensors.values()])
    assert saved.total_bytes == 0


def kept(function, *tensors, parameters=()):
    with count_saved_bytes(parameters) as saved:
        result = function(*tensors)
    del result
    return saved.total_bytes


def test_what_is_kept_is_what_is_said():
    """Norms: their input and one number a row. Activations: their input. A frozen linear layer: nothing."""
    x = torch.randn(6, 16, requires_grad=True)
    w = torch.randn(16)
    rows = 6 * 4
    assert kept(lambda: ops.rms_norm(x, w, 1e-5), parameters=[w]) == x.nbytes + rows
    assert kept(lambda: ops.layer_norm(x, w, w, 1e-5), parameters=[w]) == x.nbytes + 2 * rows
    assert kept(lambda: ops.rms_norm(x, w, 1e-5, residual=x), parameters=[w]) == x.nbytes + rows  # h alone
    for op in (ops.swiglu, ops.geglu, ops.gelu, ops.silu):
        assert kept(lambda op=op: op(x)) == x.nbytes
    assert kept(lambda: ops.packed_linear(x, [torch.randn(3, 16)])) == 3 * 16 * 4  # the weight, for the input gradient


@pytest.mark.parametrize("name", CASES)
def test_inputs_and_gradients_may_lie_in_memory_as_they_like(name):
    case = CASES[name]
    tensors = case.tensors(torch.float64)
    first = next(iter(tensors))
    live = set(tensors)
    for laid in layouts(tensors[first]):
        given = {**tensors, first: laid}
        expected = run(case.plain, {n: t.contiguous() for n, t in given.items()}, live)
        found = run(case.fused, given, live, strided(random_like(expected[0], seed=5)), as_they_lie=True)
        torch.testing.assert_close(found[1][first], expected[1][first], rtol=1e-6, atol=1e-6)


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    width=st.integers(1, 70),
    op=st.sampled_from(["rms_norm", "layer_norm", "silu", "gelu", "swiglu", "geglu"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_leading_shape(shape, width, op, dtype):
    """Also none, and empty ones."""
    gated = op in ("swiglu", "geglu")
    x = torch.randn(*shape, width * (2 if gated else 1)).to(dtype).requires_grad_()
    w = torch.randn(width).to(dtype).requires_grad_()
    plain = {
        "rms_norm": lambda x: F.rms_norm(x, (width,), w, 1e-5),
        "layer_norm": lambda x: F.layer_norm(x, (width,), w, None, 1e-5),
        "silu": F.silu,
        "gelu": F.gelu,
        "swiglu": lambda x: F.silu(x[..., :width]) * x[..., width:],
        "geglu": lambda x: F.gelu(x[..., :width]) * x[..., width:],
    }[op]
    fused = {
        "rms_norm": lambda x: ops.rms_norm(x, w, 1e-5),
        "layer_norm": lambda x: ops.layer_norm(x, w, None, 1e-5),
    }.get(op, getattr(ops, op))
    y = fused(x)
    assert y.shape == (*shape, width)
    y.sum().backward()
    found, x.grad = x.grad, None
    expected = plain(x)
    expected.sum().backward()
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found, x.grad, rtol=tolerance, atol=tolerance)


def test_threads_change_no_bit():
    x, r, w = torch.randn(300, 64, requires_grad=True), torch.randn(300, 64), torch.randn(64, requires_grad=True)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            x.grad = w.grad = None
            y, h = ops.rms_norm(x, w, 1e-5, residual=r)
            (y.square().sum() + h.sum()).backward()
            found.append((y.detach(), x.grad, w.grad))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_all_rows_ignored_is_nan_as_in_torch_and_no_rows_too():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    loss = ops.linear_cross_entropy(x, w, torch.full((3,), -100))
    assert loss.isnan()
    assert ops.linear_cross_entropy(x, w, torch.full((3,), -100), reduction="sum") == 0
    assert ops.linear_cross_entropy(x[:0], w, torch.zeros(0, dtype=torch.long), reduction="sum") == 0


def test_where_no_row_counts_gradients_are_zeros_as_in_torch():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    ops.linear_cross_entropy(x, w, torch.full((3,), -100)).backward()
    assert not x.grad.any()
    assert not w.grad.any()


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_the_loss_under_autocast(x_dtype):
    """Cast as the layer alone would be; the loss is float32."""
    x, w = torch.randn(6, 8, dtype=x_dtype, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    target = torch.arange(6) % 5
    with torch.autocast("cpu", torch.bfloat16):
        loss = ops.linear_cross_entropy(x, w, target)
        plain = F.cross_entropy(F.linear(x, w), target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain.float(), rtol=2e-2, atol=2e-2)
    for a, b in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(plain, (x, w)), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=5e-2, atol=2e-2)


def test_queries_keys_and_values_are_one_memory_and_not_the_projections():
    """What attention keeps is one tensor; the projection may be written into, and is free to go."""
    qkv = torch.randn(1, 5, 24, requires_grad=True) * 1
    before, squares = qkv.detach().clone(), qkv.pow(2).sum()
    parts = ops.rope_qkv(qkv, COS, SIN, 2, 1)
    assert len({part.untyped_storage().data_ptr() for part in (*parts, qkv)}) == 2
    assert parts[0].untyped_storage().nbytes() == qkv.nbytes
    parts[2].detach().mul_(3.0)
    assert torch.equal(qkv, before)
    squares.backward()


def test_threads_may_share_a_weight():
    """As in torch, no gradient is lost: each of many backwards adds one to every entry."""
    weight = torch.zeros(8, 8, requires_grad=True)

    def work():
        for _ in range(50):
            ops.packed_linear(torch.ones(1, 8), [weight]).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(weight.grad, torch.full((8, 8), 200.0))


def test_a_weight_frozen_after_forward_gets_no_gradient():
    weight, bias = torch.zeros(3, 8, requires_grad=True), torch.zeros(3, requires_grad=True)
    y = ops.packed_linear(torch.ones(1, 8), [weight], [bias])
    weight.requires_grad_(False)
    y.sum().backward()
    assert weight.grad is None
    assert torch.equal(bias.grad, torch.ones(3))


def test_the_loss_scales_with_what_comes_back():
    x, w, t = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True), torch.arange(6) % 5
    loss = ops.linear_cross_entropy(x, w, t)
    grads = torch.autograd.grad(loss * 3.0, (x, w), retain_graph=True)
    again = torch.autograd.grad(loss, (x, w))
    for a, b in zip(grads, again, strict=True):
        torch.testing.assert_close(a, 3 * b)


WRONG = [
    (lambda: ops.rms_norm(torch.ones(2, 3), torch.ones(4)), ValueError, r"expected shape \[3\]"),
    (lambda: ops.rms_norm(torch.ones(()), None), ValueError, "at least 1 dimension"),
    (lambda: ops.rms_norm(torch.ones(2, 3, dtype=torch.int64), None), TypeError, "float32"),
    (lambda: ops.rms_norm(torch.ones(2, 3), None, residual=torch.ones(3, 2)), ValueError, "residual"),
    (lambda: ops.layer_norm(torch.ones(2, 3), torch.ones(3), torch.ones(2)), ValueError, r"expected shape \[3\]"),
    (lambda: ops.layer_norm(torch.ones(2, 3), torch.ones(3), torch.ones(3).double()), ValueError, "dtype"),
    (lambda: ops.swiglu(torch.ones(2, 3)), ValueError, "even size"),
    (lambda: ops.gelu(torch.ones(2), "sigmoid"), ValueError, "'none' or 'tanh'"),
    (lambda: ops.silu(torch.ones(2, dtype=torch.complex64)), TypeError, "float32"),
    (lambda: ops.rope(torch.ones(2, 3, 4), torch.ones(2, 3, 4), COS, SIN), ValueError, "batch, heads"),
    (lambda: ops.rope(*[torch.ones(1, 1, 12, 6)] * 2, COS, SIN), ValueError, "at least 12 positions"),
    (lambda: ops.rope(*[torch.ones(1, 1, 2, 6)] * 2, COS.double(), SIN), TypeError, "float32"),
    (lambda: ops.rope(*[torch.ones(1, 1, 2, 6)] * 2, COS, SIN, offset=-1), ValueError, "offset"),
    (lambda: ops.rope(*[torch.ones(1, 1, 2, 6)] * 2, COS.clone().requires_grad_(), SIN), ValueError, "require grad"),
    (lambda: ops.embedding(torch.tensor([0]), torch.ones(4, 2), 7), ValueError, "-4 to 3"),
    (lambda: ops.rope_qkv(torch.ones(1, 2, 7), COS, SIN, 1, 1), ValueError, "num_heads"),
    (lambda: ops.linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 4])), IndexError, "row 1"),
    (lambda: ops.linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 2), torch.tensor([0, 1])), ValueError, "width"),
    (lambda: ops.linear_cross_entropy(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0])), ValueError, "target"),
    (
        lambda: ops.linear_cross_entropy(torch.ones(1, 3), torch.ones(4, 3), torch.tensor([0]), reduction="none"),
        ValueError,
        "'mean' or 'sum'",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), WRONG)
def test_wrong_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()


OPERATORS = {
    "norm": [
        (x, r, w, None, 1e-5, False)
        for x, r, w in itertools.product([torch.randn(3, 8)], [None, torch.randn(3, 8)], [None, torch.randn(8)])
    ],
    "activation": [(torch.randn(3, 8), name, gated) for name in ("silu", "gelu") for gated in (False, True)],
    "rope_turn": [(torch.randn(1, 2, 5, 6), COS, SIN, 0, False)],
    "linear_cross_entropy": [
        (torch.randn(4, 6), torch.randn(5, 6), None, torch.tensor([0, 4, -100, 1]), -100, 0.1, 0.0, True, 0)
    ],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_keep_the_dispatchers_rules(name):
    """Schema, autograd registration, fake tensors, and tracing by torch.compile, as torch checks them."""
    for args in OPERATORS[name]:
        live = [
            a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
        ]
        if name == "rope_turn":
            live[1:3] = args[1:3]
        torch.library.opcheck(getattr(torch.ops.timelyfreeze, name).default, tuple(live))
