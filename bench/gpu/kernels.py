"""How near to a copy's bandwidth do the memory-bound kernels come? ``python -m bench.gpu.kernels --device cuda``.

Each kernel takes turns with a copy of as many bytes; what is claimed is the share of the copy's bandwidth. Bytes are
those that csrc/kernels/<op>.h counts. One row a kernel goes to results/fused_kernels_cuda.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import record as rows
from bench.gpu import baselines
from bench.gpu.timing import Call, device_fields, kernel_seconds, timed
from bench.record import interleave
from timelyfreeze import ops as ops  # registers the operators

OPS = torch.ops.timelyfreeze
EPS = 1e-5
WANTED_SHARE = 0.85


@dataclass(frozen=True)
class Kernel:
    """A call, and the bytes that it must read and write."""

    name: str
    call: Call
    num_bytes: int


def norm_kernels(x: Tensor, r: Tensor, dy: Tensor) -> Iterator[Kernel]:
    """Norms of ``[rows, cols]``; the bytes are those of arrays that size, and the small ones beside them."""
    rows_, cols = x.shape
    unit, w = x.nbytes, torch.ones(cols, dtype=x.dtype, device=x.device)
    for name, centered in (("rms_norm", False), ("layer_norm", True)):
        b = torch.zeros_like(w) if centered else None
        statistics = rows_ * 4 * (2 if centered else 1)
        _, h, mean, rstd = OPS.norm_forward(x, r, w, b, EPS, centered, True)
        forward = (w, b, EPS, centered, True)
        yield Kernel(
            f"{name}, forward", lambda forward=forward: OPS.norm_forward(x, None, *forward), 2 * unit + statistics
        )
        yield Kernel(
            f"{name} and residual, forward",
            lambda forward=forward: OPS.norm_forward(x, r, *forward),
            4 * unit + statistics,
        )
        kept = (h, w, mean, rstd, centered)
        yield Kernel(
            f"{name}, frozen backward",
            lambda kept=kept: OPS.norm_backward(dy, None, *kept, False, False),
            3 * unit + statistics,
        )
        yield Kernel(
            f"{name} and residual, frozen backward",
            lambda kept=kept: OPS.norm_backward(dy, r, *kept, False, False),
            4 * unit + statistics,
        )
        yield Kernel(
            f"{name} and residual, trained backward",
            lambda kept=kept, centered=centered: OPS.norm_backward(dy, r, *kept, True, centered),
            4 * unit + statistics,
        )


def activation_kernels(x: Tensor, dy: Tensor, packed: Tensor) -> Iterator[Kernel]:
    unit = x.nbytes
    for name in ("silu", "gelu", "gelu_tanh"):
        yield Kernel(f"{name}, forward", lambda name=name: OPS.activation(x, name, False), 2 * unit)
        yield Kernel(f"{name}, backward", lambda name=name: OPS.activation_backward(dy, x, name, False), 3 * unit)
    for title, name in (("swiglu", "silu"), ("geglu", "gelu"), ("geglu_tanh", "gelu_tanh")):
        yield Kernel(f"{title}, forward", lambda name=name: OPS.activation(packed, name, True), 3 * unit)
        yield Kernel(f"{title}, backward", lambda name=name: OPS.activation_backward(dy, packed, name, True), 5 * unit)


def rope_kernels(x: Tensor, length: int, width: int) -> Iterator[Kernel]:
    """Of ``x`` as [batch, length, heads, width]: as many heads of queries as of keys and values together."""
    total = x.shape[-1] // width
    heads, kv_heads = total // 2, total // 4
    qkv = x.view(-1, length, x.shape[-1])
    angles = torch.arange(length, device=x.device)[:, None] / torch.arange(1, width // 2 + 1, device=x.device)
    cos, sin = angles.cos(), angles.sin()
    split = qkv.unflatten(-1, (total, width)).transpose(1, 2)
    parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in split.split([heads, kv_heads, kv_heads], 1)]
    turned = x.nbytes * (heads + kv_heads) // total
    yield Kernel("rope", lambda: OPS.rope_turn(split, cos, sin, 0, False), 2 * x.nbytes)
    yield Kernel("rope_qkv, forward", lambda: OPS.rope_qkv_forward(qkv, cos, sin, heads, kv_heads, 0), 2 * turned)
    yield Kernel("rope_qkv, backward", lambda: OPS.rope_qkv_backward(*parts, cos, sin, 0), 2 * x.nbytes)


def measured(kernel: Kernel, device: torch.device, rounds: int, repeats: int) -> dict[str, Any]:
    """The fields of a kernel's row."""
    source = torch.empty(kernel.num_bytes // 2, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source), device, repeats)
    found = interleave(copy, timed(kernel.call, device, repeats), rounds=rounds, warmup=2)
    return {
        "num_bytes": kernel.num_bytes,
        "gb_per_s": kernel.num_bytes / found.b_s / 1e9,
        "copy_gb_per_s": kernel.num_bytes / found.a_s / 1e9,
        "share_of_copy": found.ratio,
        "copy_over_kernel": found,
    }


def cross_entropy(device: torch.device, dtype: torch.dtype, rounds: int, repeats: int) -> dict[str, Any] | None:
    """The kernel within the head's chunks, by the profiler: it has no operator of its own.

    Each logit counts as read once and written once: a row's second reading can come from the cache.
    """
    num_rows, num_classes = 8192, 32000
    x = torch.randn(num_rows, 64, dtype=dtype, device=device)
    w = torch.randn(num_classes, 64, dtype=dtype, device=device)
    target = torch.arange(num_rows, device=device) % num_classes
    head = (x, w, None, target, -100, 0.0, 0.0, num_rows, True, False, False)
    seconds = kernel_seconds(lambda: OPS.linear_cross_entropy_forward(*head), "cross_entropy_kernel")
    if seconds is None:
        return None
    num_bytes = 2 * num_rows * num_classes * x.itemsize
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device)
    target_bytes = torch.empty_like(source)
    copy = timed(lambda: target_bytes.copy_(source), device, repeats)
    copy_s = sorted(copy() for _ in range(rounds))[rounds // 2]
    return {
        "num_bytes": num_bytes,
        "gb_per_s": num_bytes / seconds / 1e9,
        "copy_gb_per_s": num_bytes / copy_s / 1e9,
        "share_of_copy": copy_s / seconds,
    }


def table(device: torch.device, num_elements: int, rounds: int, repeats: int) -> Iterator[dict[str, Any]]:
    """One row a kernel, dtype and width."""
    for dtype, width in ((torch.bfloat16, 4096), (torch.bfloat16, 1024), (torch.float32, 4096)):
        fields = {"dtype": str(dtype).removeprefix("torch."), "width": width}
        shape = (num_elements * 2 // dtype.itemsize // width, width)  # as many bytes of either dtype
        x, r, dy = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
        kernels = [*norm_kernels(x, r, dy), *activation_kernels(x, dy, torch.cat([x, r], -1))]
        kernels += rope_kernels(x, min(shape[0], 512), 64)
        for kernel in kernels:
            yield {"op": kernel.name, **fields, **measured(kernel, device, rounds, repeats)}
        if device.type == "cuda" and width == 4096:
            row = cross_entropy(device, dtype, rounds, repeats)
            if row is not None:
                yield {"op": "cross_entropy with gradient", **fields, "width": 32000, **row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=2**27, help="of an array in bfloat16; several times the cache")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--wanted-share", type=float, default=WANTED_SHARE, help="of the copy's; less is a failure")
    parser.add_argument("--results", type=Path, default=rows.RESULTS)
    parser.add_argument("--no-baselines", action="store_true", help="leave out torch.compile and Liger-Kernel")
    args = parser.parse_args()
    device = torch.device(args.device)
    rows.RESULTS = args.results
    about = device_fields(device)
    below, num_kernels = [], 0
    for row in table(device, args.elements, args.rounds, args.repeats):
        num_kernels += 1
        text = f"{row['op']:<42} {row['dtype']:<9}{row['width']:>6}"
        numbers = f"{row['gb_per_s']:8.0f} GB/s of {row['copy_gb_per_s']:6.0f}: {row['share_of_copy']:.3f}"
        is_below = row["share_of_copy"] < args.wanted_share
        below += [row["op"]] if is_below else []
        print(f"{text} {numbers}{'  BELOW' if is_below else ''}", flush=True)
        rows.record("fused_kernels_cuda", **about, **row)
    if not args.no_baselines:
        for row in baselines.table(device, args.elements, args.rounds, args.repeats):
            print(baselines.as_text(row), flush=True)
            rows.record("fused_kernels_cuda", **about, **row)
    print(f"{num_kernels - len(below)} of {num_kernels} kernels at {args.wanted_share:.0%} of the copy or more")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
