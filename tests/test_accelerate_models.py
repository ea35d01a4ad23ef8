"""Models of Hugging Face transformers and timm give what they gave, their gradients too, whatever is frozen."""

from __future__ import annotations

import copy
import importlib
import math
import random

import pytest
import torch
from torch import nn

from tests.fused_nodes import fused_nodes
from tests.known_models import LANGUAGE, MODELS, batch, build, loss_of, outputs_of, transformers
from timelyfreeze import accelerate
from timelyfreeze.acceleration.swap import RULES, rule_of

# What two layers and what stands around them are made of.
FUSED = {
    "llama": {"embedding": 1, "norm": 5, "linear": 9, "activation": 2, "rope_qkv": 2},
    "mistral": {"embedding": 1, "norm": 5, "linear": 9, "activation": 2, "rope_qkv": 2},
    "qwen2": {"embedding": 1, "norm": 5, "linear": 9, "activation": 2, "rope_qkv": 2},
    "qwen3": {"embedding": 1, "norm": 9, "linear": 9, "activation": 2, "rope": 4},
    "gpt2": {"embedding": 2, "norm": 5, "linear": 9, "activation": 2},
    "vit": {"norm": 5, "linear": 9, "activation": 2},
    "vit_scaled": {"norm": 5, "linear": 9, "activation": 2},  # its queries and keys are not contiguous
}

FROZEN = {
    "nothing": lambda name: False,
    "all but norms": lambda name: "norm" not in name and "ln_" not in name,
    "norms": lambda name: "norm" in name or "ln_" in name,
    "queries and gates": lambda name: "q_proj" in name or "gate_proj" in name,
    "keys, values and ups": lambda name: any(part in name for part in ("k_proj", "v_proj", "up_proj", "qkv")),
    "first layer and embedding": lambda name: ".0." in name or "emb" in name or "wte" in name or "wpe" in name,
    "all but the first query": lambda name: not ("0.self_attn.q_proj" in name or "0.attn" in name),
    "all but biases": lambda name: "bias" not in name,
} | {f"half, draw {seed}": lambda name, seed=seed: random.Random(f"{seed} {name}").random() < 0.5 for seed in range(4)}


def results(model, x, **kwargs):
    """Logits, and gradients by name."""
    model.zero_grad()
    outputs = outputs_of(model, x, **kwargs)
    if outputs.requires_grad:
        loss_of(model, x, **kwargs).backward()
    return {"logits": outputs.detach()} | {name: p.grad for name, p in model.named_parameters()}


def assert_as_good(found, plain, exact):
    """Together no farther from float64 than twice what plain torch is, and each as well, but for a few last bits."""
    assert [name for name in found if found[name] is None] == [name for name in plain if plain[name] is None]
    names = [name for name in plain if plain[name] is not None]
    errors = {name: [(t[name].double() - exact[name]).norm().item() for t in (found, plain)] for name in names}
    scale = max(exact[name].norm().item() for name in names)
    for name, (error, allowed) in errors.items():
        assert found[name].dtype == plain[name].dtype, name
        last_bits = 4 * torch.finfo(plain[name].dtype).eps * max(exact[name].norm().item(), 0.1 * scale)
        assert error <= 2 * allowed + last_bits, (name, error, allowed)
    error, allowed = (math.hypot(*sums) for sums in zip(*errors.values(), strict=True))
    assert error <= 2 * allowed


def three(name, dtype, frozen=lambda name: False, **config):
    """The accelerated model, the plain one, and the plain one in float64."""
    models = [build(name, dtype, **config), build(name, dtype, **config), build(name, torch.float64, **config)]
    with torch.no_grad():
        for p, q in zip(models[1].parameters(), models[2].parameters(), strict=True):
            q.copy_(p)
    for model in models:
        for parameter, p in model.named_parameters():
            p.requires_grad_(not frozen(parameter))
    done = accelerate(models[0])
    assert done.skipped == []
    return models


def check(name, dtype=torch.float32, frozen=lambda name: False, train=True, kwargs=None, **config):
    found, plain, exact = (model.train(train) for model in three(name, dtype, frozen, **config))
    x = batch(name, dtype)
    wide = x if x.dtype == torch.int64 else x.double()
    assert_as_good(*(results(m, y, **(kwargs or {})) for m, y in ((found, x), (plain, x), (exact, wide))))
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("frozen", FROZEN)
def test_gradients_whatever_is_frozen(name, frozen):
    check(name, frozen=FROZEN[frozen])


@pytest.mark.parametrize("name", MODELS)
def test_half_precision(name):
    check(name, torch.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation(name):
    model = check(name, train=False)
    plain = build(name).eval()
    with torch.no_grad():
        torch.testing.assert_close(outputs_of(model, batch(name)), outputs_of(plain, batch(name)))
    model.requires_grad_(False)
    assert outputs_of(model, batch(name)).grad_fn is None


@pytest.mark.parametrize("name", MODELS)
def test_our_operators_run(name):
    model = build(name)
    done = accelerate(model)
    assert done.skipped == []
    assert fused_nodes(outputs_of(model, batch(name))) == FUSED[name]
    done.undo()
    assert all(rule_of(module) is None for module in model.modules())
    assert fused_nodes(outputs_of(model, batch(name))) == {}
    plain = build(name)
    assert torch.equal(outputs_of(model, batch(name)), outputs_of(plain, batch(name)))


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name):
    found, plain, exact = three(name, torch.float32)
    x = batch(name)
    with torch.autocast("cpu", torch.bfloat16):
        halves = results(found, x), results(plain, x)
        nodes = fused_nodes(outputs_of(found, x))
    for kind in FUSED[name].keys() - {"rope"}:  # where norms come before it, their dtype is not that of the projections
        assert nodes[kind] > 0, kind
    reference = results(exact, x if x.dtype == torch.int64 else x.double())
    for half in halves:  # gradients are float32, errors those of bfloat16
        for key, tensor in half.items():
            half[key] = tensor.bfloat16()
    assert_as_good(*halves, reference)


@pytest.mark.parametrize("name", MODELS)
def test_weights_laid_together(name):
    model, plain = build(name), build(name)
    done = accelerate(model, pack=True)
    assert done.skipped == []
    assert bool(done.packed) == (name in ("llama", "mistral", "qwen2", "qwen3"))
    torch.testing.assert_close(results(model, batch(name)), results(plain, batch(name)), rtol=1e-4, atol=2e-5)
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("name", MODELS)
def test_float64(name):
    """In float64 a plain model's RMSNorm computes in float32; ours does not."""
    model, plain = build(name, torch.float64), build(name, torch.float64)
    accelerate(model)
    x = batch(name, torch.float64)
    torch.testing.assert_close(results(model, x), results(plain, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradcheck(name):
    """A decoder layer in float64, tiny, against differences."""
    layer = build(name, torch.float64).model.layers[0]
    assert layer.mlp.down_proj.weight.shape == (32, 48)
    accelerate(layer)
    x = 0.3 * torch.randn(1, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(2.0)[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1])
    table = torch.cat((angles, angles), -1)[None]
    tables = table.cos(), table.sin()  # float32, as the library computes them
    weights = [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
    assert fused_nodes(layer(x.requires_grad_(), position_embeddings=tables)).keys() > {"norm", "activation"}
    torch.autograd.gradcheck(lambda x, *w: layer(x, position_embeddings=tables), (x, *weights), fast_mode=True)


# --- attention's many ways ------------------------------------------------------------------------------------

DECODERS = [name for name in LANGUAGE if name != "gpt2"]


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_functions_and_masks(name, attention):
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    model = check(name, kwargs={"attention_mask": mask}, _attn_implementation=attention)
    plain = build(name, _attn_implementation=attention)
    kwargs = {"attention_mask": mask, "output_hidden_states": True, "output_attentions": attention == "eager"}
    found, wanted = (m(batch(name), **kwargs) for m in (model, plain))
    torch.testing.assert_close(found.hidden_states, wanted.hidden_states, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.attentions, wanted.attentions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_positions_of_each_row(name):
    """Rows with positions of their own go through the attention's own forward."""
    positions = torch.stack([torch.arange(9), torch.arange(2, 11), torch.arange(9)])
    model = check(name, kwargs={"position_ids": positions})
    nodes = fused_nodes(outputs_of(model, batch(name), position_ids=positions))
    assert not {"rope", "rope_qkv"} & nodes.keys()
    shifted = torch.arange(5, 14)[None]
    check(name, kwargs={"position_ids": shifted})
    assert {"rope", "rope_qkv"} & fused_nodes(outputs_of(model, batch(name), position_ids=shifted)).keys()


@pytest.mark.parametrize("name", LANGUAGE)
def test_generation_with_a_cache(name):
    model, plain = build(name).eval(), build(name).eval()
    accelerate(model)
    x = batch(name)
    found, wanted = (m.generate(x, max_new_tokens=12, do_sample=False, pad_token_id=0) for m in (model, plain))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_second_half_of_a_cached_sequence(name):
    model, plain = build(name).eval(), build(name).eval()
    accelerate(model)
    x, halves = batch(name), []
    for m in (model, plain):
        cache = transformers.DynamicCache(config=m.config)
        outputs_of(m, x[:, :5], cache=cache, use_cache=True)
        halves.append(outputs_of(m, x[:, 5:], cache=cache, use_cache=True))
    torch.testing.assert_close(*halves, rtol=1e-4, atol=1e-5)
    wanted = {"gpt2": set(), "qwen3": {"rope"}}.get(name, {"rope_qkv"})
    assert fused_nodes(halves[0]).keys() & {"rope", "rope_qkv"} == wanted


@pytest.mark.parametrize("name", LANGUAGE)
def test_attention_functions_get_what_they_got(name):
    calls = []

    def recording(module, query, key, value, mask, **kwargs):
        calls.append({"shapes": [t.shape for t in (query, key, value)], "mask": mask is None} | kwargs)
        repeated = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
        return nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=True).transpose(1, 2), None

    transformers.AttentionInterface.register("recording", recording)
    model, plain = (build(name, _attn_implementation="recording") for _ in range(2))
    accelerate(model)
    for m in (model, plain):
        outputs_of(m, batch(name), use_cache=False)
    assert str(calls[:2]) == str(calls[2:])
    assert ("sliding_window" in calls[0]) == (name in ("mistral", "qwen2", "qwen3"))


@pytest.mark.parametrize("name", LANGUAGE)
def test_dropout_draws_the_same(name):
    model, plain = build(name), build(name)
    for m in (model, plain):
        m.config.attention_dropout = 0.3
        for module in m.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
        m.train()
    accelerate(model)
    outputs = []
    for m in (model, plain):
        torch.manual_seed(5)
        outputs.append(outputs_of(m, batch(name)))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs[1], outputs_of(plain, batch(name)), atol=1e-3)


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name, reentrant):
    model, plain = build(name), build(name)
    accelerate(model)
    for m in (model, plain):
        m.train()
        m.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    layer = model.get_submodule("transformer.h.0.mlp" if name == "gpt2" else "model.layers.0.mlp")
    layer.register_forward_pre_hook(lambda *args: calls.append(1))
    found, wanted = results(model, batch(name)), results(plain, batch(name))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)
    assert len(calls) == 3  # for the logits, for the loss, and again in its backward


# --- what is not ours to change ---------------------------------------------------------------------------------


def test_relatives_are_left_alone():
    config = transformers.GemmaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.GemmaForCausalLM(config)
    plain = copy.deepcopy(model)
    done = accelerate(model)
    assert {type(model.get_submodule(name)).__name__ for name, _ in done.changed} <= {"Linear"}
    torch.testing.assert_close(outputs_of(model, batch("llama")), outputs_of(plain, batch("llama")))


def test_another_activation_is_left_alone():
    torch.manual_seed(0)
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()
    done = accelerate(model)
    assert done.skipped == [(f"model.layers.{i}.mlp", "its act_fn is no silu that was swapped") for i in range(2)]


def test_an_adapter_put_in_later_is_called():
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(32, 2), nn.Linear(2, base.out_features)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model, plain = build("llama"), build("llama")
    accelerate(model)
    torch.manual_seed(3)
    for layer in range(2):
        for name in ("self_attn.q_proj", "mlp.up_proj"):
            adapter = Adapter(model.get_submodule(f"model.layers.{layer}.{name}"))
            other = copy.deepcopy(adapter)
            other.base = plain.get_submodule(f"model.layers.{layer}.{name}")
            model.set_submodule(f"model.layers.{layer}.{name}", adapter)
            plain.set_submodule(f"model.layers.{layer}.{name}", other)
    torch.testing.assert_close(results(model, batch("llama")), results(plain, batch("llama")), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("rule", [name for name in RULES if name.startswith(("transformers.models", "timm.models"))])
def test_another_version_is_refused(rule, monkeypatch):
    """A forward that names something unknown, or takes other arguments, is not stood in for."""
    place, name = rule.rsplit(".", 1)
    cls = getattr(importlib.import_module(place), name)
    module = cls.__new__(cls)
    assert RULES[rule].refuse(module) is None
    monkeypatch.setattr(cls, "forward", lambda self, x, scale: x * self.logit_scale)
    assert "forward takes (x, scale), expected" in RULES[rule].refuse(module)


def test_names_of_a_forward():
    model = build("llama")
    mlp = type(model.model.layers[0].mlp)
    original = mlp.forward
    try:
        mlp.forward = lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * self.multiplier
        done = accelerate(model)
        assert ("model.layers.0.mlp", "this version's forward uses multiplier, which is not known") in done.skipped
    finally:
        mlp.forward = original
