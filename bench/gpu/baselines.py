"""The fused operators beside eager torch, torch.compile and, where it is installed, Liger-Kernel, on one device.

Backward is that of frozen weights. Liger-Kernel 0.8 writes some gradients over what it saved; its times hold all the
same, as no kernel's time depends on the numbers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional as F

from bench.gpu.timing import timed
from timelyfreeze import ops

EPS = 1e-5


@dataclass(frozen=True)
class Contest:
    """One computation in several ways; all take the same tensors.

    Attributes:
        inputs: require grad; frozen: do not.
        liger: the name of Liger-Kernel's autograd function, and a call of it.
        liger_inputs: what it takes instead of ``inputs``.
    """

    name: str
    fused: Callable[..., Any]
    eager: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    frozen: tuple[Tensor, ...] = field(default=())
    liger: tuple[str, Callable[..., Any]] | None = None
    liger_inputs: tuple[Tensor, ...] | None = None


def _halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = packed.chunk(2, dim=-1)
    return gate, up


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def contests(device: torch.device, num_elements: int, width: int, dtype: torch.dtype) -> Iterator[Contest]:
    """What is compared, one at a time so that one's memory is free before the next."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    rows = num_elements // width
    w, b = made(width), made(width)
    yield Contest(
        "rms_norm and residual",
        lambda x, r, w: ops.rms_norm(x, w, EPS, residual=r),
        lambda x, r, w: (F.rms_norm(x + r, w.shape, w, EPS), x + r),
        (made(rows, width), made(rows, width)),
        (w,),
        ("LigerFusedAddRMSNormFunction", lambda f, x, r, w: f.apply(x, r, w, EPS)),
    )
    yield Contest(
        "layer_norm",
        lambda x, w, b: ops.layer_norm(x, w, b, EPS),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        (made(rows, width),),
        (w, b),
        ("LigerLayerNormFunction", lambda f, x, w, b: f.apply(x, w, b, EPS)),
    )
    yield Contest(
        "swiglu",
        ops.swiglu,
        lambda x: F.silu(_halves(x)[0]) * _halves(x)[1],
        (made(rows, 2 * width),),
        liger=("LigerSiLUMulFunction", lambda f, gate, up: f.apply(gate, up)),
        liger_inputs=(made(rows, width), made(rows, width)),
    )
    yield Contest(
        "geglu_tanh",
        lambda x: ops.geglu(x, "tanh"),
        lambda x: F.gelu(_halves(x)[0], approximate="tanh") * _halves(x)[1],
        (made(rows, 2 * width),),
        liger=("LigerGELUMulFunction", lambda f, gate, up: f.apply(gate, up)),
        liger_inputs=(made(rows, width), made(rows, width)),
    )
    yield rope_contest(made, rows, width)


def rope_contest(made: Callable[..., Tensor], rows: int, width: int) -> Contest:
    """Queries and keys of 32 and 8 heads, or as many as there are."""
    length, head_width = min(rows, 512), 64
    heads = max(1, width // head_width // 2)
    kv_heads = max(1, heads // 4)
    q = made(rows // length, length, heads, head_width).transpose(1, 2)
    k = made(rows // length, length, kv_heads, head_width).transpose(1, 2)
    angles = torch.arange(length, device=q.device)[:, None] / torch.arange(1, head_width // 2 + 1, device=q.device)
    cos, sin = angles.cos(), angles.sin()
    wide = tuple(torch.cat([table, table], -1)[None].to(q.dtype) for table in (cos, sin))
    return Contest(
        "rope of queries and keys",
        lambda q, k: ops.rope(q, k, cos, sin),
        lambda q, k: (_turn(q, cos.to(q.dtype), sin.to(q.dtype)), _turn(k, cos.to(q.dtype), sin.to(q.dtype))),
        (q, k),
        liger=("LigerRopeFunction", lambda f, q, k: f.apply(q, k, *wide)),
    )


def competitors(contest: Contest) -> dict[str, Callable[..., Any]]:
    """By name; those that are not installed are left out."""
    found: dict[str, Callable[..., Any]] = {"fused": contest.fused, "eager": contest.eager}
    if contest.inputs[0].is_cuda:
        found["torch.compile"] = torch.compile(contest.eager, dynamic=False)
    if contest.liger is not None and contest.inputs[0].is_cuda:
        name, call = contest.liger
        try:
            function = getattr(importlib.import_module("liger_kernel.ops"), name)
        except (ImportError, AttributeError):
            return found
        found["liger"] = functools.partial(call, function)
    return found


def passes_of(name: str, function: Callable[..., Any], contest: Contest) -> dict[str, Callable[[], object]]:
    """Forward without a graph, and backward through a graph that is kept."""
    given = contest.liger_inputs if name == "liger" and contest.liger_inputs is not None else contest.inputs
    inputs = [tensor.detach().requires_grad_() for tensor in given]

    def forward() -> object:
        with torch.no_grad():
            return function(*inputs, *contest.frozen)

    made = function(*inputs, *contest.frozen)
    made = list(made) if isinstance(made, tuple) else [made]
    grads = [torch.randn_like(output) for output in made]
    return {"forward": forward, "backward": lambda: torch.autograd.grad(made, inputs, grads, retain_graph=True)}


def table(device: torch.device, num_elements: int, rounds: int, repeats: int) -> Iterator[dict[str, Any]]:
    """One row a computation and pass: seconds by competitor, turn by turn; what fails says so in its place."""
    functorch_config.donated_buffer = False  # a graph that is kept cannot give its buffers away
    width = 4096
    for contest in contests(device, num_elements, width, torch.bfloat16):
        timers: dict[str, dict[str, Callable[[], float]]] = {"forward": {}, "backward": {}}
        failed: dict[str, str] = {}
        for name, function in competitors(contest).items():
            try:
                for which, call in passes_of(name, function, contest).items():
                    timers[which][name] = timed(call, device, repeats)
                    timers[which][name]()
            except Exception as error:  # another library's trouble is a field of the row, not the end of the table
                if name == "fused":
                    raise
                failed[name] = f"{type(error).__name__}: {error}"[:200]
                for which in timers:
                    timers[which].pop(name, None)
        for which, calls in timers.items():
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    times[name].append(call())
            seconds = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
            yield {
                "op": f"{contest.name}, {'frozen ' if contest.frozen and which == 'backward' else ''}{which}",
                "dtype": "bfloat16",
                "width": width,
                "seconds_by_library": seconds,
                "failed": failed,
            }


def as_text(row: dict[str, Any]) -> str:
    """A line of the table."""
    seconds = row["seconds_by_library"]
    fused = seconds["fused"]
    parts = [f"{name} {value * 1e6:.0f} us ({value / fused:.2f})" for name, value in seconds.items()]
    parts += [f"{name} failed ({why.splitlines()[0]})" for name, why in row["failed"].items()]
    return f"{row['op']:<42} {', '.join(parts)}"
