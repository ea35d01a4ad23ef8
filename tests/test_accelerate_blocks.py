"""Blocks that are registered by their class, their children, and weights laid behind each other in memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.fused_nodes import fused_nodes
from timelyfreeze import accelerate
from timelyfreeze.acceleration import can_rotate, gated, register_block
from timelyfreeze.acceleration.swap import RULES, full_name


class Odd(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


# --- blocks of one's own ---------------------------------------------------------------------------------------


class Doubler(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x, times=2):
        return times * self.inner(x)


def _double(self, x, times=2):
    return NotImplemented if times != 2 else self.inner(x).mul(2).clone()


def test_a_registered_block():
    register_block(Doubler, _double, what="doubles", parts={"inner": "linear"})
    try:
        model = Doubler()
        done = accelerate(model)
        assert done.changed[-1] == ("", "doubles")
        x = torch.ones(1, 2)
        assert model(x).grad_fn.name() == "CloneBackward0"
        assert model(x, times=3).grad_fn.name() == "MulBackward0"
        assert torch.equal(model(x, times=3) * 2, model(x) * 3)
        other = Doubler()
        other.inner = Odd(2, 2)
        assert accelerate(other).skipped[-1] == ("", "its inner is no linear that was swapped")
    finally:
        del RULES[full_name(Doubler)]


# --- packed weights, and compiled models -------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.gate, self.up = nn.Linear(4, 6, bias=bias), nn.Linear(4, 6, bias=bias)

    def forward(self, x):
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)


@pytest.fixture
def gated_rule():
    register_block(
        Gated,
        lambda self, x: gated(x, self.gate, self.up),
        what="packs",
        parts={"gate": "linear", "up": "linear"},
        packs=(("gate", "up"),),
    )
    yield
    del RULES[full_name(Gated)]


@pytest.mark.parametrize("bias", [False, True])
def test_packing_moves_data_alone(gated_rule, bias):
    model = Gated(bias)
    plain = copy.deepcopy(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = accelerate(model, pack=True)
    assert done.packed == [f"{child}.{kind}" for kind in ("weight", "bias")[: 1 + bias] for child in ("gate", "up")]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.up.weight.data_ptr() - model.gate.weight.data_ptr() == 6 * 4 * 4
    x = torch.randn(3, 4)
    for m in (model, plain):
        m(x).square().sum().backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert accelerate(model, pack=True).skipped == []  # they lie there already
    done.undo()
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: m.up.to(torch.float64), "several dtypes or devices"),
        (lambda m: setattr(m.up, "weight", m.gate.weight), "one weight is used twice"),
        (lambda m: setattr(m.up, "weight", nn.Parameter(torch.ones(12, 4)[6:])), "part of a larger storage"),
        (lambda m: setattr(m.up, "weight", nn.Parameter(torch.ones(4, 6).t())), "part of a larger storage"),
        (lambda m: m.to("meta"), "no plain tensor"),
    ],
)
def test_weights_that_stay_where_they_are(gated_rule, spoil, reason):
    model = Gated()
    spoil(model)
    done = accelerate(model, pack=True)
    assert done.packed == []
    ((name, text),) = done.skipped
    assert name == "gate.weight and 1 more"
    assert reason in text


def test_children_that_are_watched_are_called(gated_rule):
    model, seen = Gated(), []
    accelerate(model)
    x = torch.ones(1, 4)
    assert fused_nodes(model(x)) == {"linear": 1, "activation": 1}
    handle = model.up.register_forward_hook(lambda module, args, output: seen.append("up"))
    wanted = model(x)
    assert seen == ["up"]
    assert fused_nodes(wanted) == {"linear": 2}
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append("any"))
    model(x)
    handle.remove()
    assert seen.count("any") == 3
    model.gate = Odd(4, 6)  # put in later, as adapters are
    assert torch.equal(model(x), Gated.forward(model, x))


def test_an_input_of_another_width_meets_the_modules_own_error(gated_rule):
    model, plain = Gated(), Gated()
    accelerate(model)
    messages = []
    for m in (model, plain):
        with pytest.raises(RuntimeError) as caught:
            m(torch.ones(2, 5))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_rotary_tables_that_train_are_refused():
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    accelerate(model)
    x, tables = torch.ones(1, 3, 4), [torch.ones(3, 1) for _ in range(2)]
    assert can_rotate(x, tuple(model), tuple(tables), 2)
    assert can_rotate(x, tuple(model), tuple(torch.ones(5, 1) for _ in range(2)), 2)
    for spoiled in (
        tables[0].clone().requires_grad_(),
        tables[0].double(),
        torch.ones(2, 1),
        torch.ones(3, 2),
        torch.ones(3, 1, device="meta"),
    ):
        assert not can_rotate(x, tuple(model), (tables[0], spoiled), 2)
    assert not can_rotate(x[0], tuple(model), tuple(tables), 2)
    assert not can_rotate(x, tuple(model), tuple(tables), 3)


def test_compiled_models_run_the_operators(gated_rule):
    model = nn.Sequential(nn.Linear(8, 4), Gated(), nn.GELU(), nn.RMSNorm(6), nn.Embedding(3, 2))[:4]
    x = torch.randn(3, 8)
    wanted = model(x)
    accelerate(model)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)
    (graph,) = graphs
    assert sum("timelyfreeze" in str(node.target) for node in graph.graph.nodes) == 3
