"""Tiny models of Hugging Face transformers and timm, built from their configurations; nothing is downloaded."""

from __future__ import annotations

import pytest
import torch

# Both libraries import torchvision; neither needs its operators here. Its wheels are for CUDA: beside a CPU torch
# the operators do not load, and then the import fails for want of two names.
pytest.importorskip("transformers")  # whose releases need Python 3.11
try:
    import torchvision  # noqa: F401
except RuntimeError:
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm
import transformers

VOCABULARY = 61

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def _decoder(name, **options):
    def make():
        config = getattr(transformers, name + "Config")(**(_DECODER | options))
        return getattr(transformers, name + "ForCausalLM")(config)

    return make


def _gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        **_NO_DROPOUT,
    )
    return transformers.GPT2LMHeadModel(config)


def _vit(**options):
    def make():
        return timm.models.vision_transformer.VisionTransformer(
            img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4, num_classes=7, **options
        )

    return make


LANGUAGE = {
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral", sliding_window=5),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gpt2": _gpt2,
}
VISION = {"vit": _vit(), "vit_scaled": _vit(init_values=0.1, qk_norm=True, drop_path_rate=0.0)}
MODELS = LANGUAGE | VISION


def build(name, dtype=torch.float32, **config):
    """The model with weights that do not depend on what was built before; norms' weights are not all ones."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    for key, value in config.items():
        setattr(model.config, key, value)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def batch(name, dtype=torch.float32, size=3, length=9):
    """What ``loss_of`` takes for this model."""
    generator = torch.Generator().manual_seed(2)
    if name in VISION:
        return torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(VOCABULARY, (size, length), generator=generator)


def outputs_of(model, x, **kwargs):
    """Logits."""
    result = model(x, **kwargs)
    return result if isinstance(result, torch.Tensor) else result.logits


def loss_of(model, x, **kwargs):
    """A scalar that every output has a part in, evenly weighed."""
    outputs = outputs_of(model, x, **kwargs)
    weights = torch.linspace(-1.0, 1.0, outputs.numel(), dtype=torch.float64).reshape(outputs.shape)
    return (outputs.double().tanh() * weights).sum()
