"""The fused operators against eager torch: one thread, turn by turn in one process, float32 where nothing else is said.

A frozen layer's backward: the weights do not require grad, the input does.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.baselines.torch_pipelining import TorchPipelining
from bench.ours import OurPipeline
from bench.record import Comparison, interleave, record
from bench.workloads import language_model
from timelyfreeze import FreezeConfig, accelerate, ops
from timelyfreeze.cli.model import Block, ModelConfig
from timelyfreeze.runtime.memory import count_saved_bytes

NUM_ELEMENTS = 2 * 1024 * 1024
EPS = 1e-5
Pair = tuple[Callable[[], float], Callable[[], float]]  # fused, eager


def timed(function: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return run


def backward_of(outputs: list[Tensor], inputs: list[Tensor]) -> Callable[[], float]:
    grads = [torch.randn_like(output) for output in outputs]

    return timed(lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True))


def norm_case(centered: bool, width: int, dtype: torch.dtype) -> Pair:
    x, r = (torch.randn(NUM_ELEMENTS // width, width, dtype=dtype, requires_grad=True) for _ in range(2))
    w, b = torch.randn(width, dtype=dtype), torch.randn(width, dtype=dtype)
    fused = ops.layer_norm(x, w, b, EPS, residual=r) if centered else ops.rms_norm(x, w, EPS, residual=r)
    h = x + r  # one sum for the norm and the stream, as models have it
    normed = F.layer_norm(h, (width,), w, b, EPS) if centered else F.rms_norm(h, (width,), w, EPS)
    return backward_of(list(fused), [x, r]), backward_of([normed, h], [x, r])


def activation_case(fused: Callable[..., Tensor], eager: Callable[..., Tensor], width: int, dtype: torch.dtype) -> Pair:
    x = torch.randn(NUM_ELEMENTS // width, width, dtype=dtype, requires_grad=True)
    return backward_of([fused(x)], [x]), backward_of([eager(x)], [x])


def swiglu_case(width: int, packed_eager: bool, dtype: torch.dtype) -> Pair:
    """Eager has gate and up packed as well, or apart, as the layers of models give them."""
    packed = torch.randn(NUM_ELEMENTS // width, 2 * width, dtype=dtype, requires_grad=True)
    if packed_eager:
        halves = packed.chunk(2, dim=-1)
        eager = F.silu(halves[0]) * halves[1]
        return backward_of([ops.swiglu(packed)], [packed]), backward_of([eager], [packed])
    gate, up = (torch.randn(NUM_ELEMENTS // width, width, dtype=dtype, requires_grad=True) for _ in range(2))
    return backward_of([ops.swiglu(packed)], [packed]), backward_of([F.silu(gate) * up], [gate, up])


def forward_case(fused: Callable[[], object], eager: Callable[[], object]) -> Pair:
    def without_graph(function: Callable[[], object]) -> Callable[[], float]:
        def run() -> object:
            with torch.no_grad():
                return function()

        return timed(run)

    return without_graph(fused), without_graph(eager)


def make_cases(width: int, dtype: torch.dtype = torch.float32) -> dict[str, Pair]:
    x, r = (torch.randn(NUM_ELEMENTS // width, width, dtype=dtype) for _ in range(2))
    w, packed = torch.randn(width, dtype=dtype), torch.randn(NUM_ELEMENTS // width, 2 * width, dtype=dtype)
    return {
        "rms_norm and residual, backward": norm_case(False, width, dtype),
        "layer_norm and residual, backward": norm_case(True, width, dtype),
        "swiglu, backward": swiglu_case(width, True, dtype),
        "swiglu, backward, eager's halves apart": swiglu_case(width, False, dtype),
        "gelu (tanh), backward": activation_case(
            lambda x: ops.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), width, dtype
        ),
        "gelu, backward": activation_case(ops.gelu, F.gelu, width, dtype),
        "rms_norm and residual, forward": forward_case(
            lambda: ops.rms_norm(x, w, EPS, residual=r), lambda: (F.rms_norm(x + r, (width,), w, EPS), x + r)
        ),
        "rms_norm, forward": forward_case(lambda: ops.rms_norm(x, w, EPS), lambda: F.rms_norm(x, (width,), w, EPS)),
        "swiglu, forward": forward_case(
            lambda: ops.swiglu(packed), lambda: F.silu(packed[:, :width]) * packed[:, width:]
        ),
    }


@pytest.mark.parametrize("width", [1024, 4096])
def test_kernels(width: int) -> None:
    for name, (fused, eager) in make_cases(width).items():
        found = interleave(eager, fused, rounds=60)
        print(f"{name}, width {width}: eager / fused {found}")
        record("fused_kernels", op=name, width=width, eager_over_fused=found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_in_half_precision(dtype: torch.dtype) -> None:
    """For information: CPUs without instructions for these types spend their time on conversions."""
    name_of_dtype = str(dtype).removeprefix("torch.")
    for name, (fused, eager) in make_cases(1024, dtype).items():
        found = interleave(eager, fused, rounds=10, warmup=1)
        print(f"{name}, width 1024, {name_of_dtype}: eager / fused {found}")
        record("fused_kernels_half", op=name, width=1024, dtype=name_of_dtype, eager_over_fused=found)


def test_linear_cross_entropy() -> None:
    """Forward and backward of a frozen head over 32,000 classes; memory: what is allocated at the peak."""
    x = torch.randn(1024, 512, requires_grad=True)
    w, target = torch.randn(32000, 512) / 20, torch.randint(32000, (1024,))

    def run(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def step() -> None:
            x.grad = None
            loss().backward()

        return step

    fused = run(lambda: ops.linear_cross_entropy(x, w, target))
    eager = run(lambda: F.cross_entropy(F.linear(x, w), target))
    found = interleave(timed(fused), timed(eager), rounds=10, warmup=1)
    peaks = [peak_bytes(function) for function in (fused, eager)]
    print(f"linear_cross_entropy: {found}; peak memory {peaks[0] / 2**20:.0f} of {peaks[1] / 2**20:.0f} MiB")
    record("linear_cross_entropy", fused_over_eager=found, peak_ratio=peaks[0] / peaks[1])


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that torch's allocator had handed out at once, above what it had before."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def block_step(block: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], float]:
    def run() -> None:
        x.grad = None
        block.zero_grad()
        block(x).backward(grad)

    return timed(run)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("width", [256, 1024])
def test_block(width: int, trains: bool) -> None:
    """Forward and backward of the main job's LLaMA block."""
    config = ModelConfig(width=width)
    torch.manual_seed(0)
    eager = Block(config).requires_grad_(trains)
    fused = copy.deepcopy(eager)
    accelerate(fused, pack=True)
    x = torch.randn(2, config.sequence_length, width, requires_grad=True)
    grad = torch.randn_like(x)
    found = interleave(block_step(eager, x, grad), block_step(fused, x, grad), rounds=100 if width == 256 else 25)
    trainable = Block(config)
    saved = []
    for block in (fused, trainable):
        with count_saved_bytes(block.parameters()) as counted:
            block(x)
        saved.append(counted.peak_bytes)
    print(f"block, width {width}, {'trained' if trains else 'frozen'}: eager / fused {found}; saved {saved}")
    record(
        "fused_block", width=width, trains=trains, eager_over_fused=found, saved_over_eager_trained=saved[0] / saved[1]
    )


def pipeline_ratio(**options: object) -> Comparison:
    workload = language_model()
    with OurPipeline(workload, **options) as fused, OurPipeline(workload, accelerate=False, **options) as eager:
        for pipeline in (fused, eager):
            for _ in range(3):
                pipeline.step()

        def step(pipeline: OurPipeline) -> Callable[[], float]:
            def run() -> float:
                pipeline.step()
                return float(pipeline.last.step_time_s)

            return run

        return interleave(step(fused), step(eager), rounds=30)


def test_main_job() -> None:
    """The plain step, and the step of one fixed plan, with the operators and without; the plain step with them over
    that of torch.distributed.pipelining."""
    plain = pipeline_ratio()
    with OurPipeline(language_model(), freeze=FreezeConfig(max_ratio=0.5), accelerate=False) as planned:
        planned.step_until_planned()
        plan = planned.pipe.plan
    under_plan = pipeline_ratio(freeze=FreezeConfig(plan=plan, ramp_steps=0))
    with OurPipeline(language_model()) as fused, TorchPipelining(language_model()) as torch_pipelining:
        over_torch = interleave(fused.step, torch_pipelining.step, rounds=20)
    print(
        f"main job: fused / eager {plain}; under one plan {under_plan}; "
        f"plain / torch.distributed.pipelining {over_torch}"
    )
    record("fused_main_job", plain=plain, under_one_plan=under_plan, plain_over_torch_pipelining=over_torch)
