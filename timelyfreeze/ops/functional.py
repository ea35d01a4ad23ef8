"""The operators as functions, with the signatures of torch.nn.functional where it has one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from timelyfreeze import _C
from timelyfreeze.errors import problem

_OPS = torch.ops.timelyfreeze


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, residual: Tensor | None = None, stream: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension (arXiv 1910.07467, equation 4).

    Args:
        x: ``[..., width]``.
        weight: ``[width]``, or None for ones.
        eps: added to the mean of the squares.
        residual: like ``x``; then ``h = x + residual`` is what is normalized, and is returned too.
        stream: without a residual, return ``x`` as well, to be read on from there: the gradient that comes back on that
            way is added in the same pass.

    Returns:
        ``y`` like ``x``; with ``residual`` or ``stream`` the pair ``(y, h)``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit.

    >>> rms_norm(torch.tensor([3.0, 4.0]), None, 0.0)
    tensor([0.8485, 1.1314])
    """
    return _norm(x, weight, None, eps, False, residual, stream)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    stream: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm over the last dimension (arXiv 1607.06450, equation 4); arguments as for ``rms_norm``.

    >>> layer_norm(torch.tensor([1.0, 3.0]), None, None, 0.0)
    tensor([-1.,  1.])
    """
    return _norm(x, weight, bias, eps, True, residual, stream)


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    residual: Tensor | None,
    stream: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    if stream and residual is None:
        if torch.compiler.is_compiling():
            return _OPS.norm(x, None, weight, bias, eps, centered)[0], x
        y, h = _C.norm(x, None, weight, bias, eps, centered, True)
        return y, h
    y, h = _OPS.norm(x, residual, weight, bias, eps, centered)
    return y if residual is None else (y, h)


def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))`` (arXiv 1702.03118); keeps ``x`` alone.

    >>> silu(torch.zeros(2))
    tensor([0., 0.])
    """
    return _activation(x, "silu", False)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU (arXiv 1606.08415), exact or, with ``approximate="tanh"``, by its tanh formula; keeps ``x`` alone.

    >>> gelu(torch.tensor([1.0]))
    tensor([0.8413])
    """
    return _activation(x, _gelu_name(approximate), False)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` (arXiv 2002.05202) of a packed ``[..., 2 f]``, the gate first; returns ``[..., f]``.

    >>> swiglu(torch.tensor([0.0, 5.0]))
    tensor([0.])
    """
    return _activation(gate_up, "silu", True)


def geglu(gate_up: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up`` (arXiv 2002.05202) of a packed ``[..., 2 f]``, the gate first; returns ``[..., f]``.

    >>> geglu(torch.tensor([1.0, 2.0]))
    tensor([1.6827])
    """
    return _activation(gate_up, _gelu_name(approximate), True)


def _activation(x: Tensor, name: str, gated: bool) -> Tensor:
    y: Tensor = _OPS.activation(x, name, gated)
    return y


def _gelu_name(approximate: str) -> str:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in names:
        raise ValueError(problem("approximate", expected="'none' or 'tanh'", got=repr(approximate)))
    return names[approximate]


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Turn pairs (i, i + width / 2) by their position's angle (arXiv 2104.09864, section 3.2.2).

    Args:
        q: ``[batch, heads, length, width]``.
        k: ``[batch, kv_heads, length, width]``.
        cos, sin: float32 tables ``[positions, width / 2]``.
        offset: the first position.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.

    >>> q = torch.ones(1, 1, 1, 2)
    >>> rope(q, q, torch.zeros(1, 1), torch.ones(1, 1))[0].flatten()
    tensor([-1.,  1.])
    """
    return _OPS.rope_turn(q, cos, sin, offset, False), _OPS.rope_turn(k, cos, sin, offset, False)


def rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, *, offset: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """``rope`` on a packed projection; backward writes all three gradients straight into one packed buffer.

    Args:
        qkv: ``[batch, length, (num_heads + 2 num_kv_heads) width]``: the queries' heads, the keys', the values'.
        cos, sin, offset: as for ``rope``.

    Returns:
        q, k and v, ``[batch, heads, length, width]``, parts of one tensor packed as ``qkv``, which is not kept.

    >>> qkv = torch.arange(6.0).reshape(1, 1, 6)
    >>> q, k, v = rope_qkv(qkv, torch.ones(1, 1), torch.zeros(1, 1), 1, 1)
    >>> k.flatten(), v.flatten()
    (tensor([2., 3.]), tensor([4., 5.]))
    """
    if torch.compiler.is_compiling():
        heads = qkv.view(*qkv.shape[:2], num_heads + 2 * num_kv_heads, -1).transpose(1, 2)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        return (*rope(q, k, cos, sin, offset=offset), v)
    made: tuple[Tensor, Tensor, Tensor] = _C.rope_qkv(qkv, cos, sin, num_heads, num_kv_heads, offset)
    return made


def packed_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, *, transposed: bool = False
) -> Tensor:
    """Several linear layers of one input as one matrix product.

    Weights that lie behind each other in memory are read in place. A trained weight's gradient goes straight into its
    ``.grad``, unless hooks wait for it; of frozen weights alone the input is not kept.

    Args:
        x: ``[..., width]``.
        weights: each ``[features, width]``.
        biases: each ``[features]`` or None, as many as weights; None: no biases.
        transposed: weights are stored ``[width, features]``, as those of GPT-2 are.

    Returns:
        Their outputs behind each other, ``[..., sum of features]``.

    >>> packed_linear(torch.ones(1, 2), [torch.ones(1, 2), torch.zeros(2, 2)])
    tensor([[2., 0., 0.]])
    """
    if not torch.compiler.is_compiling():
        return _C.packed_linear(x, weights, [None] * len(weights) if biases is None else biases, transposed)
    weights = [weight.t() for weight in weights] if transposed else weights
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    if biases is None or all(bias is None for bias in biases):
        return functional.linear(x, weight)
    parts = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
    return functional.linear(x, weight, parts[0] if len(parts) == 1 else torch.cat(parts))


def embedding(indices: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of ``weight`` by index, as torch.nn.functional.embedding gives them.

    >>> embedding(torch.tensor([1]), torch.tensor([[1.0], [2.0]]))
    tensor([[2.]])
    """
    num_rows = weight.shape[0]
    if padding_idx is not None and not -num_rows <= padding_idx < num_rows:
        raise ValueError(problem("padding_idx", expected=f"a row, {-num_rows} to {num_rows - 1}", got=padding_idx))
    if torch.compiler.is_compiling():
        return functional.embedding(indices, weight, padding_idx)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += num_rows
    return _C.embedding(indices, weight, -1 if padding_idx is None else padding_idx)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> Tensor:
    """``cross_entropy(linear(x, weight, bias), target)`` without ever holding all the logits.

    Rows are worked on in chunks; a chunk's gradients are computed while its logits are there, and scaled in backward.

    Args:
        x: ``[..., width]``.
        weight: ``[classes, width]``.
        target: ``[...]``, int64; rows of ``ignore_index`` do not count.
        bias: ``[classes]``.
        label_smoothing: the share of the target that is spread over all classes, in [0, 1].
        z_loss: times the square of log sum exp, which keeps logits near 0 (arXiv 2204.02311).
        reduction: "mean" over the rows that count, or "sum".
        chunk_rows: default: a sixteenth of the rows, at least 64.

    Returns:
        a scalar, float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError, IndexError: shapes, dtypes, or a target that is no class.

    >>> linear_cross_entropy(torch.zeros(3, 2), torch.ones(4, 2), torch.tensor([0, 1, 2]))
    tensor(1.3863)
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(problem("reduction", expected="'mean' or 'sum'", got=repr(reduction)))
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(problem("chunk_rows", expected="None, or 1 or more", got=chunk_rows))
    loss: Tensor = _OPS.linear_cross_entropy(
        x, weight, bias, target, ignore_index, label_smoothing, z_loss, reduction == "mean", chunk_rows or 0
    )
    return loss
