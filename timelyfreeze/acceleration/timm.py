"""The blocks of timm's vision transformers; known by their full names, as in ``huggingface``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from timelyfreeze.acceleration.modules import GELU, GELU_TANH, LAYER_NORM, add_and_norm, norm_stream, refuse_norm
from timelyfreeze.acceleration.swap import BLOCK, RULES, Rule, only_uses


def _refuse_layer_norm(module: Any) -> str | None:
    if module._fast_norm:
        return "fast norm is on, which computes in another dtype"
    return refuse_norm(module)


def _block(self: Any, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Any:
    y, stream = norm_stream(self.norm1, x)
    mixed = self.attn(y, attn_mask=attn_mask, is_causal=is_causal)
    y, stream = add_and_norm(self.norm2, self.drop_path1(self.ls1(mixed)), stream)
    return stream + self.drop_path2(self.ls2(self.mlp(y)))


RULES |= {
    "timm.layers.norm.LayerNorm": Rule(LAYER_NORM.kind, LAYER_NORM.what, LAYER_NORM.forward, _refuse_layer_norm),
    "timm.layers.activations.GELU": Rule(GELU.kind, GELU.what, GELU.forward, only_uses(("input",), "F gelu")),
    "timm.layers.activations.GELUTanh": Rule(
        GELU_TANH.kind, GELU_TANH.what, GELU_TANH.forward, only_uses(("input",), "F gelu")
    ),
    "timm.models.vision_transformer.Block": Rule(
        BLOCK,
        "residual sums within the norms",
        _block,
        only_uses(("x", "attn_mask", "is_causal"), "attn drop_path1 drop_path2 ls1 ls2 mlp norm1 norm2"),
        {"norm1": "layer_norm", "norm2": "layer_norm"},
    ),
}
