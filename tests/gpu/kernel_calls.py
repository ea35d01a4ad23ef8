"""Calls every kernel once for each small shape and dtype, for compute-sanitizer: ``python -m tests.gpu.kernel_calls``.

Tensors are made on the CPU and copied, so that next to no kernels but ours run. Results are compared with those of the
CPU's kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from timelyfreeze import ops as ops  # registers the operators

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLS = (1, 7, 64, 1000, 8208)
CALLS = torch.ops.timelyfreeze


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    return torch.randn(shape, generator=generator).to(dtype)


def norm_calls(cols: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    x, r, dy = (normal(*shape, dtype=dtype)[:3] for shape in ((3, cols), (4, cols), (5, cols)))
    w, b = normal(cols, dtype=dtype), normal(cols, dtype=torch.float32).to(dtype)
    for centered in (False, True):
        for residual in (None, r):
            yield "norm_forward", CALLS.norm_forward, (x, residual, w, b if centered else None, 1e-5, centered, True)
        _, _, mean, rstd = CALLS.norm_forward(x, None, w, b if centered else None, 1e-5, centered, True)
        for trains in (False, True):
            yield (
                "norm_backward",
                CALLS.norm_backward,
                (dy, r if trains else None, x, w, mean, rstd, centered, trains, trains and centered),
            )


def other_calls(cols: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    x, dy = normal(3, 2 * cols, dtype=dtype), normal(3, cols, dtype=dtype)
    for name in ("silu", "gelu", "gelu_tanh"):
        yield name, CALLS.activation, (x, name, False)
        yield f"gated {name}", CALLS.activation, (x, name, True)
        yield f"{name}, backward", CALLS.activation_backward, (x, x, name, False)
        yield f"gated {name}, backward", CALLS.activation_backward, (dy, x, name, True)
    target = torch.tensor([0, -100, cols - 1])
    # The kernel behind products with a single factor: logits and their gradients are those of the classes' weights.
    head = (normal(3, 1, dtype=dtype), normal(cols, 1, dtype=dtype), None, target, -100, 0.1, 0.01)
    yield "cross_entropy", CALLS.linear_cross_entropy_forward, (*head, 3, False, False, False)
    yield "cross_entropy, backward", CALLS.linear_cross_entropy_forward, (*head, 2, True, True, False)


def rope_calls(dtype: torch.dtype) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    for width in (2, 6, 64, 128):
        angles = torch.arange(9.0)[:, None] / torch.arange(1.0, width // 2 + 1)
        qkv = normal(2, 5, 8 * width, dtype=dtype)
        heads = qkv.unflatten(-1, (8, width)).transpose(1, 2)
        yield "rope", CALLS.rope_turn, (heads, angles.cos(), angles.sin(), 3, True)
        yield "rope_qkv", CALLS.rope_qkv_forward, (qkv, angles.cos(), angles.sin(), 4, 2, 0)
        parts = tuple(part.contiguous() for part in heads.split([4, 2, 2], dim=1))
        yield "rope_qkv, backward", CALLS.rope_qkv_backward, (*parts, angles.cos(), angles.sin(), 0)


def calls() -> Iterator[tuple[str, torch.dtype, Callable[..., Any], tuple[Any, ...]]]:
    """What is called, in which dtype, and the arguments on the CPU."""
    for dtype in DTYPES:
        for cols in COLS:
            for name, call, args in [*norm_calls(cols, dtype), *other_calls(cols, dtype)]:
                yield f"{name} of {cols}", dtype, call, args
        for name, call, args in rope_calls(dtype):
            yield name, dtype, call, args


def tensors_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def is_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Within some last bits of the dtype, of what is added up: inputs are about 1, and sums have another order."""
    scale = max(1.0, float(expected.double().abs().max()) if expected.numel() else 0.0)
    tolerance = 16 * max(torch.finfo(dtype).eps, 1e-6)
    return torch.allclose(found.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance * scale)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    num_calls, wrong = 0, []
    with torch.no_grad():
        for name, dtype, call, args in calls():
            expected = tensors_of(call(*args))
            moved = [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]
            found = tensors_of(call(*moved))
            num_calls += 1
            if not all(is_close(a, b, dtype) for a, b in zip(found, expected, strict=True)):
                wrong.append(f"{name}, {dtype}")
    for name in wrong:
        print(f"FAULT {name}: not what the CPU's kernel gives")
    print(f"{num_calls} calls, {len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
