"""The command's model: its arithmetic, and what its weights depend on."""

from __future__ import annotations

import math

import pytest
import torch

from timelyfreeze.cli.config import ModelConfig
from timelyfreeze.cli.model import build_model, byte_loss, rotary_table, rotate

SMALL = ModelConfig(width=16, num_layers=2, num_heads=2, sequence_length=12)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def test_no_position_sees_what_comes_after_it() -> None:
    model = build_model(SMALL, seed=0)
    x = tokens(1, 12)
    changed = x.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


def test_weights_depend_on_config_and_seed_alone() -> None:
    torch.manual_seed(1)
    first = build_model(SMALL, seed=5).state_dict()
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    second = build_model(SMALL, seed=5).state_dict()
    assert torch.equal(torch.random.get_rng_state(), state), "the global random state moved"
    other = build_model(SMALL, seed=6).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if "norm" not in name)


def test_children_run_one_after_the_other_are_the_model() -> None:
    model = build_model(SMALL, seed=0)
    x = tokens(2, 12)
    value = x
    for child in model.children():
        value = child(value)
    assert torch.equal(value, model(x))


def test_tied_head_uses_the_embedding() -> None:
    model = build_model(ModelConfig(width=16, num_layers=1, num_heads=2, sequence_length=8, tied=True), seed=0)
    assert model.head.projection.weight is model.embedding.weight
    num_tied = sum(parameter.numel() for parameter in model.parameters())
    untied = build_model(ModelConfig(width=16, num_layers=1, num_heads=2, sequence_length=8), seed=0)
    assert sum(parameter.numel() for parameter in untied.parameters()) - num_tied == 256 * 16


def test_rotation_makes_scores_depend_on_distance_alone() -> None:
    cos, sin = rotary_table(10, 8)
    query, key = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turned_query = rotate(query.expand(10, 8), cos.double(), sin.double())
    turned_key = rotate(key.expand(10, 8), cos.double(), sin.double())
    scores = turned_query @ turned_key.T
    for distance in range(-9, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-6, rtol=0)
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm().expand(10), atol=1e-6, rtol=0)


def test_an_untrained_model_knows_nothing() -> None:
    model = build_model(SMALL, seed=0)
    x = tokens(4, 12)
    loss = byte_loss(model(x), tokens(4, 12, seed=1))
    assert abs(float(loss.detach()) - math.log(256)) < 0.05


def test_residual_layers_start_smaller() -> None:
    model = build_model(ModelConfig(width=64, num_layers=8, num_heads=2, sequence_length=8), seed=0)
    block = model.block3
    assert float(block.mlp.down.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.1)
    assert float(block.mlp.up.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_every_parameter_gets_a_gradient() -> None:
    model = build_model(SMALL, seed=0)
    byte_loss(model(tokens(2, 12)), tokens(2, 12, seed=1)).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_shorter_sequences_than_the_table_work() -> None:
    model = build_model(SMALL, seed=0)
    x = tokens(1, 12)
    torch.testing.assert_close(model(x)[:, :5], model(x[:, :5]), atol=1e-6, rtol=1e-5)


def test_every_bad_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"(?s)2 problems.*width.*got 0.*layers.*got -1"):
        build_model(ModelConfig(width=0, num_layers=-1), seed=0)
    with pytest.raises(ValueError, match=r"multiple of 2 \* heads = 6.*got 16.*--width 18"):
        build_model(ModelConfig(width=16, num_heads=3), seed=0)
