"""Blocks of Hugging Face transformers: Llama, Mistral, Qwen2, Qwen3 and GPT-2.

Nothing of the library is imported: classes are known by their full name. A version whose forward does more than what is
stood in for is left alone, since it names something that is not expected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from timelyfreeze import ops
from timelyfreeze.acceleration.blocks import can_rotate, gated, rotary_tables, rotated_heads
from timelyfreeze.acceleration.guards import fits
from timelyfreeze.acceleration.modules import GELU_TANH, LINEAR, RMS_NORM, SILU, add_and_norm, norm_stream
from timelyfreeze.acceleration.swap import BLOCK, RULES, Rule, only_uses

_OLD_CACHE = "past_key_values"  # its name before "cache"


# --- Llama and its relatives ----------------------------------------------------------------------------------


def _gated_layer(self: Any, x: Tensor) -> Any:
    return self.down_proj(gated(x, self.gate_proj, self.up_proj, self.act_fn))


def _layer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    position_ids: Any = None,
    cache: Any = None,
    use_cache: Any = False,
    position_embeddings: Any = None,
    **others: Any,
) -> Any:
    if _OLD_CACHE in others:
        return NotImplemented
    y, stream = norm_stream(self.input_layernorm, hidden_states)
    mixed, _ = self.self_attn(
        hidden_states=y,
        attention_mask=attention_mask,
        position_ids=position_ids,
        cache=cache,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **others,
    )
    y, stream = add_and_norm(self.post_attention_layernorm, mixed, stream)
    return stream + self.mlp(y)


def _attention(options: Callable[[Any], dict[str, Any]], normed: bool) -> Callable[..., Any]:
    """An attention's forward; ``options`` are what this family's passes on to the attention function."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
        **others: Any,
    ) -> Any:
        tables = _half_tables(position_embeddings)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        norms = (self.q_norm, self.k_norm) if normed else None
        if tables is None or _OLD_CACHE in others:
            return NotImplemented
        if not can_rotate(hidden_states, projections, tables, self.head_dim, norms):
            return NotImplemented
        q, k, v = rotated_heads(hidden_states, projections, tables, self.head_dim, norms)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=others)
        library = sys.modules[type(self).__module__]
        attend = library.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, library.eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        mixed, weights = attend(
            self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **options(self), **others
        )
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    return forward


def _half_tables(position_embeddings: Any) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines ``[length, head_dim / 2]`` of tables ``[batch, length, head_dim]`` with two equal halves.

    None where rows of the batch may have positions of their own; comparing them would make a GPU wait.
    """
    if not isinstance(position_embeddings, tuple) or len(position_embeddings) != 2:
        return None
    cos, sin = position_embeddings
    if cos.ndim != 3 or sin.shape != cos.shape or not all(t.shape[0] == 1 or t.stride(0) == 0 for t in (cos, sin)):
        return None
    half = cos.shape[-1] // 2
    return rotary_tables(cos[0, :, :half], sin[0, :, :half])


_ATTENTION_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask", "cache")
_ATTENTION_NAMES = (
    "ALL_ATTENTION_FUNCTIONS _attn_implementation apply_rotary_pos_emb attention_dropout config contiguous "
    "eager_attention_forward get_interface head_dim k_proj layer_idx o_proj q_proj reshape scaling shape training "
    "transpose update v_proj view "
)
_LAYER_ARGUMENTS = ("hidden_states", "attention_mask", "position_ids", "cache", "use_cache", "position_embeddings")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def _add_family(name: str, prefix: str, options: Callable[[Any], dict[str, Any]], names: str, normed: bool) -> None:
    place = f"transformers.models.{name}.modeling_{name}.{prefix}"
    RULES[place + "RMSNorm"] = Rule(
        RMS_NORM.kind,
        RMS_NORM.what,
        RMS_NORM.forward,
        only_uses(("hidden_states",), "dtype float32 mean pow rsqrt to torch variance_epsilon weight"),
    )
    RULES[place + "MLP"] = Rule(
        BLOCK,
        "gate and up projected at once, SwiGLU in one pass",
        _gated_layer,
        only_uses(("x",), "act_fn down_proj gate_proj up_proj"),
        {"gate_proj": "linear", "up_proj": "linear", "act_fn": "silu"},
        (("gate_proj", "up_proj"),),
    )
    norms = {"q_norm": "rms_norm", "k_norm": "rms_norm"} if normed else {}
    RULES[place + "Attention"] = Rule(
        BLOCK,
        "queries, keys and values projected at once, rotary positions in one pass",
        _attention(options, normed),
        only_uses(_ATTENTION_ARGUMENTS, _ATTENTION_NAMES + names),
        dict.fromkeys(_PROJECTIONS, "linear") | norms,
        (_PROJECTIONS,),
    )
    RULES[place + "DecoderLayer"] = Rule(
        BLOCK,
        "residual sums within the norms",
        _layer,
        only_uses(_LAYER_ARGUMENTS, "input_layernorm mlp post_attention_layernorm self_attn"),
        {"input_layernorm": "rms_norm", "post_attention_layernorm": "rms_norm"},
    )


def _own_window(attention: Any) -> dict[str, Any]:
    return {"sliding_window": attention.sliding_window}


_add_family("llama", "Llama", lambda attention: {}, "", normed=False)
_add_family(
    "mistral",
    "Mistral",
    lambda attention: {"sliding_window": getattr(attention.config, "sliding_window", None)},
    "getattr",
    normed=False,
)
_add_family("qwen2", "Qwen2", _own_window, "sliding_window", normed=False)
_add_family("qwen3", "Qwen3", _own_window, "sliding_window q_norm k_norm", normed=True)


# --- GPT-2 ----------------------------------------------------------------------------------------------------


def _gpt2_block(
    self: Any,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    use_cache: Any = False,
    **others: Any,
) -> Any:
    if encoder_hidden_states is not None or _OLD_CACHE in others:
        return NotImplemented
    y, stream = norm_stream(self.ln_1, hidden_states)
    mixed, _ = self.attn(y, cache=cache, attention_mask=attention_mask, use_cache=use_cache, **others)
    y, stream = add_and_norm(self.ln_2, mixed, stream)
    return stream + self.mlp(y)


def _conv1d(self: Any, x: Tensor) -> Any:
    if not fits(x, self) or x.shape[-1:] != self.weight.shape[:1] or not x.is_contiguous():
        return NotImplemented
    return ops.packed_linear(x, (self.weight,), (self.bias,), transposed=True)


RULES["transformers.pytorch_utils.Conv1D"] = Rule(
    "conv1d", LINEAR.what, _conv1d, only_uses(("x",), "addmm bias nf size torch view weight")
)
RULES["transformers.models.gpt2.modeling_gpt2.GPT2Block"] = Rule(
    BLOCK,
    "residual sums within the norms",
    _gpt2_block,
    only_uses(
        ("hidden_states", "cache", "attention_mask", "encoder_hidden_states", "encoder_attention_mask", "use_cache"),
        "ValueError attn crossattention hasattr ln_1 ln_2 ln_cross_attn mlp",
    ),
    {"ln_1": "layer_norm", "ln_2": "layer_norm"},
)
_ACTIVATIONS = "transformers.activations."
RULES |= {
    _ACTIVATIONS + "SiLUActivation": Rule(
        SILU.kind, SILU.what, SILU.forward, only_uses(("input",), "nn functional silu")
    ),
    _ACTIVATIONS + "NewGELUActivation": Rule(
        GELU_TANH.kind, GELU_TANH.what, GELU_TANH.forward, only_uses(("input",), "math sqrt pi torch tanh pow")
    ),
}
