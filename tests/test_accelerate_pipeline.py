"""Accelerated stages in the pipeline, under its masks, split backward and copies: gradients are the plain model's."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from tests.fused_nodes import fused_nodes
from tests.models import plain_step
from tests.pipelines import fixed_plan, masked_reference
from timelyfreeze import FreezeConfig, FreezingPipeline, accelerate
from timelyfreeze.acceleration.swap import rule_of
from timelyfreeze.cli.config import ModelConfig
from timelyfreeze.cli.model import build_model, byte_loss

CONFIG = ModelConfig(width=32, num_layers=4, num_heads=4, sequence_length=12)
CHUNKS = 4


def tokens(seed, rows=8):
    return torch.randint(0, 256, (rows, 12), generator=torch.Generator().manual_seed(seed))


def assert_close_grads(model, reference):
    for (name, p), (_, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_the_commands_blocks_are_recognised():
    model = build_model(CONFIG, seed=0)
    done = accelerate(model)
    assert done.skipped == []
    assert fused_nodes(model(tokens(0))) == {
        "embedding": 1,
        "norm": 9,
        "linear": 4 * 4 + 1,
        "activation": 4,
        "rope_qkv": 4,
    }
    assert len(done.changed) == 1 + 4 * (7 + 2 + 3) + 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_commands_model_in_each_dtype(dtype):
    """Cast, its rotary tables are cast too; those of float64 are more exact than the operator's."""
    plain = build_model(CONFIG, seed=0).to(dtype)
    model = copy.deepcopy(plain)
    accelerate(model)
    losses = [byte_loss(m(tokens(0)), tokens(1)) for m in (model, plain)]
    assert fused_nodes(losses[0])["activation"] == 4
    assert ("rope_qkv" in fused_nodes(losses[0])) == (dtype != torch.float64)
    tolerance = 20 * torch.finfo(dtype).eps
    torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_gradients_equal_the_plain_models_under_the_same_masks(schedule, pack, drawn):
    model = build_model(CONFIG, seed=0)
    accelerate(model, pack=pack)
    config = FreezeConfig(plan=fixed_plan(2, CHUNKS, 0.5, schedule), ramp_steps=1)
    with FreezingPipeline(model, 2, CHUNKS, schedule=schedule, loss_fn=byte_loss, freeze=config) as pipe:
        reference = None
        for step in range(5):
            x, y = tokens(2 * step), tokens(2 * step + 1)
            pipe.zero_grad()
            result = pipe.step(x, target=y)
            if reference is None:
                reference = copy.deepcopy(pipe._assembly.engine.stages)
                assert all(rule_of(module) is None for stage in reference for module in stage.modules())
            for stage in reference:
                stage.zero_grad()
            masked_reference(reference, drawn[-1], byte_loss, x, y)
            for stage, other in zip(pipe._assembly.engine.stages, reference, strict=True):
                assert_close_grads(stage, other)
        assert result.phase == "steady"
        assert result.freeze_ratio > 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_tied_weights(schedule):
    config = ModelConfig(width=32, num_layers=4, num_heads=4, sequence_length=12, tied=True)
    model, plain = build_model(config, seed=0), build_model(config, seed=0)
    accelerate(model)
    x, y = tokens(0), tokens(1)
    num_stages = 4 if schedule == "zbv" else 2
    with FreezingPipeline(model, num_stages, CHUNKS, schedule=schedule, loss_fn=byte_loss) as pipe:
        loss = pipe.step(x, target=y).loss
    torch.testing.assert_close(loss, plain_step(plain, byte_loss, x, y, CHUNKS).to(loss.dtype))
    assert_close_grads(model, plain)


def test_modules_that_stages_share():
    """A later stage works on a shallow copy of a shared module, which stays accelerated."""
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6))
    model = nn.Sequential(shared, nn.Linear(6, 6), shared, nn.Linear(6, 3))
    plain = copy.deepcopy(model)
    accelerate(model)
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    loss_fn = nn.functional.mse_loss
    with FreezingPipeline(model, 2, 2, loss_fn=loss_fn, split_points=[2]) as pipe:
        pipe.step(x, target=y)
        stages = pipe._assembly.engine.stages
        assert all(rule_of(m) is not None for stage in stages for m in stage.modules() if isinstance(m, nn.LayerNorm))
    plain_step(plain, loss_fn, x, y, 2)
    assert_close_grads(model, plain)


class Layers(nn.Module):
    """One stage of a Hugging Face decoder: its own layers, and the ends of the model where it is first or last."""

    def __init__(self, model, layers, first, last):
        super().__init__()
        self.embed = model.model.embed_tokens if first else nn.Identity()
        self.layers = nn.ModuleList(model.model.layers[i] for i in layers)
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if last else (nn.Identity(), nn.Identity())

    def forward(self, x):
        x = self.embed(x)
        tables = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=tables)
        return self.head(self.norm(x))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_decoders_of_hugging_face_in_stages(name, drawn):
    from tests.known_models import VOCABULARY, build

    decoder = build(name)
    done = accelerate(decoder)
    assert done.skipped == []
    stages = [Layers(decoder, [0], True, False), Layers(decoder, [1], False, True)]

    def loss_fn(logits, target):
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    config = FreezeConfig(plan=fixed_plan(2, CHUNKS, 0.5), ramp_steps=1)
    with FreezingPipeline(stages, 2, CHUNKS, loss_fn=loss_fn, freeze=config) as pipe:
        for step in range(4):
            x, y = (tokens(2 * step + i) % VOCABULARY for i in range(2))
            pipe.zero_grad()
            pipe.step(x, target=y)
            reference = copy.deepcopy(stages)
            for stage in reference:
                stage.zero_grad()
            masked_reference(reference, drawn[-1], loss_fn, x, y)
            for stage, other in zip(stages, reference, strict=True):
                assert_close_grads(stage, other)


def test_pipelines_accelerate_unless_told_not_to_and_give_the_model_back():
    model = build_model(CONFIG, seed=0)
    reference = copy.deepcopy(model)
    x, y = tokens(0), tokens(1)
    with FreezingPipeline(model, 2, CHUNKS, loss_fn=byte_loss, accelerate=True, freeze=FreezeConfig()) as pipe:
        pipe.step(x, target=y)  # plain modules: their work is found out
        pipe.zero_grad()
        loss = pipe.step(x, target=y).loss
        assert any(rule_of(module) is not None for module in model.modules())
        assert fused_nodes(model(x))["norm"] == 9
    assert all(rule_of(module) is None for module in model.modules())
    expected = plain_step(reference, byte_loss, x, y, CHUNKS)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert_close_grads(model, reference)


def test_a_module_put_in_later_is_accelerated_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    with FreezingPipeline(model, 2, CHUNKS, loss_fn=nn.functional.mse_loss, accelerate=True) as pipe:
        pipe.step(x, target=x)
        model[1] = nn.LayerNorm(4)
        pipe.step(x, target=x)
        assert rule_of(model[1]) is not None
    assert rule_of(model[1]) is None


def test_a_pipeline_that_is_dropped_gives_the_model_back_and_replaced_modules_are_let_go():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    x = torch.randn(8, 4)
    pipe = FreezingPipeline(model, 2, CHUNKS, loss_fn=nn.functional.mse_loss, accelerate=True)
    pipe.step(x, target=x)
    replaced = weakref.ref(model[1])
    model[1] = nn.LayerNorm(4)
    pipe.step(x, target=x)
    gc.collect()
    assert replaced() is None
    del pipe
    gc.collect()
    assert all(rule_of(module) is None for module in model)
