"""Where stages come from: factories and models without memory give the weights that the whole model has."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from timelyfreeze import FreezingPipeline
from timelyfreeze.runtime.sources import StageSource


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.linear = nn.Linear(6, 6)


def whole():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(5, 6), Block(), Block(), nn.Linear(6, 5))


def without_memory():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(5, 6), Block(), Block(), nn.Linear(6, 5))
    torch.manual_seed(3)
    return model


def same(found, expected):
    assert found.keys() <= expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("wanted", [{0}, {1, 2}, {3}, {0, 3}])
def test_parts_of_a_model_without_memory_have_the_weights_of_the_whole(wanted):
    expected = whole().state_dict()
    root, children = StageSource(without_memory(), None).part(wanted)
    found = root.state_dict()
    assert {int(name.split(".")[0]) for name in found} == wanted
    assert same(found, expected)
    assert [child is not None for child in children] == [index in wanted for index in range(4)]


def test_a_whole_model_without_memory_is_filled_in_place():
    model, _ = StageSource(without_memory(), None).everything()
    assert same(model.state_dict(), whole().state_dict())


def test_factories_draw_alike_whichever_stages_are_wanted_and_keep_no_other():
    alive = []

    def factory():
        module = Block()
        alive.append(weakref.ref(module))
        return module

    torch.manual_seed(3)
    root, _ = StageSource(None, [factory] * 3).part({2})
    torch.manual_seed(3)
    expected = nn.ModuleList([Block(), Block(), Block()]).state_dict()
    assert sorted(root.state_dict()) == sorted(name for name in expected if name.startswith("2."))
    assert same(root.state_dict(), expected)
    gc.collect()
    assert [reference() is None for reference in alive] == [True, True, False]


def test_the_frozen_flags_and_ties_of_a_model_stay():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    source = StageSource(model, None)
    root, _ = source.part({0, 1})
    assert source.tied_names() == [["0.weight", "1.weight"]]
    assert dict(root.named_parameters())["0.bias"].requires_grad is False
    assert root.get_parameter("1.weight") is model[0].weight


def test_what_cannot_be_filled_is_named_and_init_fn_fills_it():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2, device="meta"))

    with pytest.raises(ValueError, match=r"inner \(Own\).*init_fn"):
        StageSource(nn.Sequential(nn.Sequential()), None)._filled(nn.ModuleDict({"inner": Own()}), True)
    filled = []
    source = StageSource([Own()], None, lambda module: filled.append(type(module).__name__))
    source.everything()
    assert filled == ["Own"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "one of them, got neither"),
        ({"model": nn.Sequential(nn.Linear(1, 1)), "stages": [nn.Linear]}, "one of them, got both"),
        ({"stages": []}, "non-empty list of functions"),
        ({"stages": [3]}, "non-empty list of functions"),
        ({"stages": [lambda: 3, lambda: 4]}, "functions that return a module, got int"),
    ],
)
def test_wrong_sources_are_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        FreezingPipeline(**arguments, loss_fn=nn.functional.mse_loss)


def test_a_pipeline_of_factories_trains_in_one_process():
    with FreezingPipeline(
        stages=[lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 1)], num_microbatches=2, loss_fn=nn.functional.mse_loss
    ) as pipe:
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 1))
        assert [name for name, _ in pipe.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert all(parameter.grad is not None for parameter in pipe.parameters())
