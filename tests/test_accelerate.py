"""Swapping forwards: what a module stays, what is left alone, and when its own forward runs."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from timelyfreeze import accelerate
from timelyfreeze.acceleration import Acceleration
from timelyfreeze.acceleration.swap import full_name, rule_of


class Odd(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 8),
        nn.Linear(8, 16),
        nn.GELU(),
        nn.LayerNorm(16),
        nn.Linear(16, 8, bias=False),
        nn.SiLU(),
        nn.RMSNorm(8),
        nn.Sequential(nn.Dropout(0.0), nn.Linear(8, 3)),
    )


TOKENS = torch.tensor([[0, 3, 10], [5, 5, 1]])


def test_what_a_module_is_stays():
    model, plain = small(), small()
    modules, parameters = list(model.modules()), list(model.parameters())
    done = accelerate(model)
    assert [name for name, _ in done.changed] == ["0", "1", "2", "3", "4", "5", "6", "7.1"]
    assert done.skipped == []
    assert list(model.modules()) == modules
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert repr(model) == repr(plain)
    assert isinstance(model[1], nn.Linear)
    assert full_name(type(model[1])) == full_name(nn.Linear)
    torch.testing.assert_close(model(TOKENS), plain(TOKENS))


def test_state_moves_both_ways():
    model, plain = small(), small()
    accelerate(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    plain.load_state_dict(model.state_dict())
    other = small()
    accelerate(other)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(model(TOKENS), other(TOKENS))


def _pickled(protocol):
    return lambda module: pickle.loads(pickle.dumps(module, protocol))


@pytest.mark.parametrize("copy_of", [copy.deepcopy, copy.copy, _pickled(0), _pickled(2), _pickled(5)])
def test_copies_are_plain(copy_of):
    model = small()
    accelerate(model)
    for index, kind in ((1, nn.Linear), (3, nn.LayerNorm), (6, nn.RMSNorm)):
        copied = copy_of(model[index])
        assert type(copied) is kind
        assert torch.equal(copied.weight, model[index].weight)
        assert rule_of(model[index]) is not None  # the original is untouched


def test_a_whole_model_saves_and_loads():
    model = small()
    accelerate(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(rule_of(module) is None for module in loaded.modules())
    torch.testing.assert_close(loaded(TOKENS), model(TOKENS))


def test_shallow_copies_of_the_pipeline_stay_accelerated():
    model = small()
    accelerate(model)
    kind = type(model[1])
    own = kind.__new__(kind)
    own.__dict__.update(model[1].__dict__)
    assert torch.equal(own(torch.ones(2, 8)), model[1](torch.ones(2, 8)))


def test_undo():
    model, plain = small(), small()
    done = accelerate(model)
    done.undo()
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert torch.equal(model(TOKENS), plain(TOKENS))
    done.undo()  # nothing is left to undo
    assert len(accelerate(model).changed) == 8


def test_undo_names_what_somebody_else_has_changed():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    done = accelerate(model)
    parametrizations.orthogonal(model[0])
    with pytest.raises(RuntimeError, match=r"cannot undo 0: got .*Parametrized"):
        done.undo()
    assert type(model[1]) is nn.Linear


def test_twice_is_once():
    model = small()
    first, second = accelerate(model), accelerate(model)
    assert second.changed == [] == second.skipped
    second.undo()
    assert rule_of(model[1]) is not None
    first.undo()
    assert rule_of(model[1]) is None


def test_a_shared_module_is_changed_once():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    done = accelerate(model)
    assert [name for name, _ in done.changed] == ["0"]
    done.undo()
    assert type(layer) is nn.Linear


def test_hooks_fire():
    model = small()
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append("forward"))
    accelerate(model)
    model[1].register_forward_pre_hook(lambda module, args: seen.append("before"))
    model[1].register_full_backward_hook(lambda module, grads, outputs: seen.append("backward"))
    model(TOKENS).sum().backward()
    assert seen == ["before", "forward", "backward"]


def _with_forward(module):
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Odd(2, 2), "a class of its own, tests.test_accelerate.Odd"),
        (lambda: nn.MultiheadAttention(4, 2).out_proj, "a class of its own"),
        (lambda: parametrizations.weight_norm(nn.Linear(2, 2)), "parametrized"),
        (lambda: torch.compile(nn.Linear(2, 2)), "compiled"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "compiled"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "weight is complex64"),
        (lambda: _with_forward(nn.Linear(2, 2)), "a forward of its own"),
        (lambda: nn.LayerNorm([2, 2]), "normalizes over 2 dimensions"),
        (lambda: nn.RMSNorm([2, 2]), "normalizes over 2 dimensions"),
        (lambda: nn.Embedding(3, 2, max_norm=1.0, sparse=True), "max_norm and sparse set"),
        (lambda: nn.Embedding(3, 2, scale_grad_by_freq=True), "scale_grad_by_freq set"),
        (lambda: nn.SiLU(inplace=True), "works in place"),
        (lambda: nn.LazyLinear(2), "a class of its own"),
    ],
)
def test_what_is_left_alone_is_said(make, reason):
    module = make()
    kind = type(module)
    done = accelerate(nn.Sequential(module))
    assert done.changed == []
    ((_, text),) = [entry for entry in done.skipped if entry[0] == "0"]
    assert reason in text
    assert type(module) is kind


def test_a_tensor_subclass_is_left_alone():
    class Wrapped(torch.Tensor):
        pass

    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Wrapped))
    assert accelerate(module).skipped == [("", "its weight is a Wrapped")]


def test_the_table():
    done = accelerate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), Odd(2, 2)))
    first, changed, skipped = str(done).splitlines()
    assert first == "accelerated 2 modules, skipped 1"
    assert changed.split()[:2] == ["*", "×2"]
    assert skipped.split()[:2] == ["skipped", "*"]
    assert str(Acceleration()) == "accelerated 0 modules, skipped 0"


def test_no_module():
    with pytest.raises(TypeError, match=r"model: expected an nn.Module, got list"):
        accelerate([nn.Linear(1, 1)])


# --- calls that bring what the operators do not take -----------------------------------------------------------


def _both(make, *args, **kwargs):
    torch.manual_seed(0)
    plain = make()
    swapped = copy.deepcopy(plain)
    assert len(accelerate(swapped).changed) == 1
    results = []
    for module in (plain, swapped):
        try:
            results.append(module(*args, **kwargs))
        except Exception as error:
            results.append(error)
    return results


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Linear(4, 3), torch.ones(2, 4).double()),  # both refuse
        (lambda: nn.Linear(4, 3), torch.ones(2, 5)),
        (lambda: nn.RMSNorm(4), torch.ones(2, 5)),
        (lambda: nn.LayerNorm(4), torch.tensor(1.0)),
        (lambda: nn.Embedding(3, 2), torch.ones(2)),
        (lambda: nn.GELU(), torch.ones(2, dtype=torch.int64)),
        (lambda: nn.LayerNorm(4), [1.0, 2.0, 3.0, 4.0]),
        (lambda: nn.Linear(4, 3), None),
    ],
)
def test_errors_are_the_modules_own(make, x):
    plain, swapped = _both(make, x)
    assert isinstance(plain, Exception)
    assert type(swapped) is type(plain)
    assert str(swapped) == str(plain)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4)])
def test_norms_of_mixed_dtypes_give_what_torch_gives(make):
    plain, swapped = _both(make, torch.linspace(-1, 2, 8).reshape(2, 4).bfloat16())
    assert plain.dtype == swapped.dtype
    assert torch.equal(plain, swapped)


@pytest.mark.parametrize("make", [lambda: nn.GELU(), lambda: nn.SiLU(), lambda: nn.GELU("tanh")])
def test_activations_keep_the_order_in_memory(make):
    plain, swapped = _both(make, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert plain.stride() == swapped.stride()
    torch.testing.assert_close(plain, swapped)


@pytest.mark.parametrize(
    ("make", "name"), [(lambda: nn.Linear(4, 4), "input"), (lambda: nn.RMSNorm(4), "x"), (lambda: nn.GELU(), "input")]
)
def test_arguments_by_name(make, name):
    plain, swapped = _both(make, **{name: torch.ones(2, 4)})
    torch.testing.assert_close(plain, swapped)


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(4), lambda: nn.GELU(), lambda: nn.Linear(4, 4)])
def test_function_transforms(make):
    module = make()
    x, tangent = torch.randn(3, 4), torch.randn(3, 4)
    wanted = torch.func.vmap(module)(x), torch.func.jvp(module, (x,), (tangent,))[1]
    accelerate(module)
    assert torch.equal(torch.func.vmap(module)(x), wanted[0])
    assert torch.equal(torch.func.jvp(module, (x,), (tangent,))[1], wanted[1])
    with torch.autograd.forward_ad.dual_level():
        dual = module(torch.autograd.forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, wanted[1])


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm, lambda *a, **k: nn.Linear(4, *a, **k)])
def test_tensors_without_data(make):
    module = make(4, device="meta", dtype=torch.bfloat16)
    accelerate(module)
    assert module(torch.empty(2, 4, device="meta", dtype=torch.bfloat16)).is_meta


def test_options_set_later_count():
    module = nn.Embedding(5, 4)
    accelerate(module)
    module.sparse = True
    module(torch.tensor([1, 1])).sum().backward()
    assert module.weight.grad.is_sparse


def test_rms_norm_without_an_epsilon():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.full((2, 4), 1e-4, dtype=dtype)
        module = nn.RMSNorm(4, dtype=dtype)
        wanted = module(x)
        accelerate(module)
        torch.testing.assert_close(module(x), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype, x_dtype):
    for make in (lambda: nn.Linear(4, 3), lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4), nn.GELU, nn.SiLU):
        with torch.autocast("cpu", torch.bfloat16):
            plain, swapped = _both(lambda make=make: make().to(dtype), torch.randn(5, 4, dtype=x_dtype))
        assert type(plain) is type(swapped)
        if isinstance(plain, torch.Tensor):
            assert plain.dtype == swapped.dtype
            torch.testing.assert_close(plain, swapped)


# --- three states, and gradients of gradients ------------------------------------------------------------------


@pytest.mark.parametrize("live", range(8))
def test_gradients_of_float64(live):
    """gradcheck with every combination of trainable norms and linear layers."""
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU("tanh"), nn.LayerNorm(4), nn.Linear(4, 4), nn.SiLU(), nn.RMSNorm(4))
    model.double()
    accelerate(model)
    for bit, parts in enumerate(((0,), (2, 5), (3,))):
        for part in parts:
            model[part].requires_grad_(bool(live >> bit & 1))
    parameters = [p for p in model.parameters() if p.requires_grad]
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, *p: model(x), (x, *parameters))
    torch.autograd.gradgradcheck(lambda x, *p: model(x), (x, *parameters))


def test_nothing_needed_keeps_nothing():
    model = small().requires_grad_(False)
    accelerate(model)
    assert model(TOKENS).grad_fn is None
