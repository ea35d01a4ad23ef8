"""Modules of torch.nn, and those of other libraries that compute the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from timelyfreeze import ops
from timelyfreeze.acceleration.guards import fits, stands_in, takes
from timelyfreeze.acceleration.swap import RULES, Rule, full_name, kind_of

_KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.LayerNorm: "layer_norm",
    nn.RMSNorm: "rms_norm",
    nn.Embedding: "embedding",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
}


def is_known(module: nn.Module) -> bool:
    """Whether somebody may expect ``module`` to be swapped: it is, or derives from, one of torch.nn that is.

    >>> is_known(nn.Linear(1, 1)), is_known(nn.Dropout())
    (True, False)
    """
    return isinstance(module, tuple(_KINDS))


# --- linear layers and embeddings -----------------------------------------------------------------------------


def _linear(self: Any, input: Tensor) -> Any:
    if not fits(input, self):
        return NotImplemented
    return ops.packed_linear(input, (self.weight,), (self.bias,))


def _embedding(self: Any, input: Tensor) -> Any:
    if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
        return NotImplemented
    if type(input) is not Tensor or input.device != self.weight.device or not takes(self.weight):
        return NotImplemented
    return ops.embedding(input, self.weight, self.padding_idx)


def _refuse_embedding(module: Any) -> str | None:
    set_options = [
        name
        for name, is_set in (
            ("max_norm", module.max_norm is not None),
            ("scale_grad_by_freq", module.scale_grad_by_freq),
            ("sparse", module.sparse),
        )
        if is_set
    ]
    return f"{' and '.join(set_options)} set" if set_options else None


# --- norms ----------------------------------------------------------------------------------------------------


def _norm(self: Any, input: Tensor) -> Any:
    if not _normalizes(self, input):
        return NotImplemented
    return call_norm(self, input)


def norm_stream(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """``(norm(x), x)``: where the second is read on from, its gradient is added within the norm's backward.

    >>> norm_stream(nn.LayerNorm(2, elementwise_affine=False), torch.tensor([[1.0, 3.0]]))
    (tensor([[-1.0000,  1.0000]]), tensor([[1., 3.]]))
    """
    if not (_is_free(norm) and _normalizes(norm, x)):
        return norm(x), x
    y, stream = call_norm(norm, x, stream=True)
    return y, stream


def add_and_norm(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)`` in one pass.

    >>> add_and_norm(nn.LayerNorm(2, elementwise_affine=False), torch.ones(1, 2), torch.tensor([[0.0, 2.0]]))
    (tensor([[-1.0000,  1.0000]]), tensor([[1., 3.]]))
    """
    alike = x.shape == residual.shape and x.dtype == residual.dtype and x.device == residual.device
    if not (alike and _is_free(norm) and _normalizes(norm, x) and takes(residual)):
        total = residual + x
        return norm(total), total
    y, h = call_norm(norm, x, residual=residual)
    return y, h


def _is_free(norm: nn.Module) -> bool:
    return stands_in(norm, "rms_norm") or stands_in(norm, "layer_norm")


def _normalizes(norm: Any, x: Tensor) -> bool:
    weight, bias = norm.weight, getattr(norm, "bias", None)
    if not takes(x, weight, bias) or not x.is_contiguous():
        return False
    # Autocast leaves norms of float32 alone; on a GPU it computes those of other dtypes in float32.
    if x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type):
        return False
    width = norm.normalized_shape[0] if weight is None else weight.shape[0]
    return x.shape[-1:] == (width,)


def call_norm(norm: Any, x: Tensor, **streams: Any) -> Any:
    """The operator for a swapped norm's own call; ``streams`` are its ``residual`` and ``stream``."""
    if kind_of(norm) == "layer_norm":
        return ops.layer_norm(x, norm.weight, norm.bias, norm.eps, **streams)
    return ops.rms_norm(x, norm.weight, norm_eps(norm, x.dtype), **streams)


def norm_eps(norm: Any, dtype: torch.dtype) -> float:
    """An RMSNorm's epsilon. Where there is none, torch takes that of what it computes in: float32, or float64.

    >>> norm_eps(nn.RMSNorm(2), torch.bfloat16) == torch.finfo(torch.float32).eps
    True
    """
    eps: float | None = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps if eps is None else eps


def refuse_norm(module: Any) -> str | None:
    """Why a norm that is set up as those of torch.nn are is left alone.

    >>> refuse_norm(nn.LayerNorm([2, 2]))
    'normalizes over 2 dimensions, not 1'
    """
    num_dims = len(module.normalized_shape)
    return None if num_dims == 1 else f"normalizes over {num_dims} dimensions, not 1"


# --- activations: where memory is not contiguous, torch keeps the order that it has ----------------------------


def _silu(self: Any, input: Tensor) -> Any:
    if getattr(self, "inplace", False) or not takes(input) or not input.is_contiguous():
        return NotImplemented
    return ops.silu(input)


def _gelu(self: Any, input: Tensor) -> Any:
    if not takes(input) or not input.is_contiguous():
        return NotImplemented
    return ops.gelu(input, getattr(self, "approximate", "none"))


def _gelu_tanh(self: Any, input: Tensor) -> Any:
    if not takes(input) or not input.is_contiguous():
        return NotImplemented
    return ops.gelu(input, "tanh")


def _refuse_inplace(module: Any) -> str | None:
    return "works in place" if module.inplace else None


LINEAR = Rule("linear", "weight gradient added in place; none, and no input kept, where frozen", _linear)
LAYER_NORM = Rule("layer_norm", "LayerNorm in one pass", _norm)
RMS_NORM = Rule("rms_norm", "RMSNorm in one pass", _norm)
SILU = Rule("silu", "SiLU in one pass", _silu)
GELU = Rule("gelu", "GELU in one pass", _gelu)
GELU_TANH = Rule("gelu_tanh", "GELU in one pass", _gelu_tanh)

RULES |= {
    full_name(nn.Linear): LINEAR,
    full_name(nn.LayerNorm): Rule("layer_norm", LAYER_NORM.what, _norm, refuse_norm),
    full_name(nn.RMSNorm): Rule("rms_norm", RMS_NORM.what, _norm, refuse_norm),
    full_name(nn.Embedding): Rule("embedding", "gradient by rows; none where frozen", _embedding, _refuse_embedding),
    full_name(nn.GELU): GELU,
    full_name(nn.SiLU): Rule(SILU.kind, SILU.what, _silu, _refuse_inplace),
}
