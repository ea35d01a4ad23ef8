"""How fast a device multiplies matrices and moves bytes: two numbers that turn shapes into seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

_GEMM_SIZE = {"cpu": 384, "cuda": 4096}  # 113 MFLOP: 2 ms on a CPU core; 137 GFLOP: below 1 ms in bfloat16 on a GPU
_COPY_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}  # beyond the second-level cache
_REPEATS = 3


class Rates(NamedTuple):
    """What a device does in a second, in one dtype: floating-point operations of a matrix product, bytes of a copy."""

    flops_per_s: float
    bytes_per_s: float


NOMINAL_CPU = Rates(5e10, 1e10)
NOMINAL_GPU = Rates(4e14, 3e12)

_measured: dict[tuple[torch.device, torch.dtype], Rates] = {}
_lock = threading.Lock()


def nominal_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Round numbers of a CPU core or a GPU: no clock, so that works, and with them masks, repeat from run to run."""
    return NOMINAL_CPU if device.type == "cpu" else NOMINAL_GPU


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure once a process and (device, dtype): about 15 ms on a CPU core, on one thread. No random numbers.

    A device that is neither CPU nor CUDA, or a dtype that it cannot multiply, gets ``nominal_rates``.

    >>> measured_rates(torch.device("cpu"), torch.float32).flops_per_s > 1e8
    True
    """
    key = (torch.device(device), dtype)
    with _lock:  # two stages that measured at once would slow each other
        if key not in _measured:
            try:
                _measured[key] = _measure(*key)
            except (RuntimeError, NotImplementedError):
                _measured[key] = nominal_rates(*key)
        return _measured[key]


def _measure(device: torch.device, dtype: torch.dtype) -> Rates:
    if device.type not in _GEMM_SIZE or not dtype.is_floating_point:
        return nominal_rates(device, dtype)
    size = _GEMM_SIZE[device.type]
    num_bytes = _COPY_BYTES[device.type]
    num_threads = torch.get_num_threads()
    if device.type == "cpu" and num_threads != 1:
        torch.set_num_threads(1)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            a = torch.full((size, size), 0.5, device=device, dtype=dtype)
            b = torch.full((size, size), 0.25, device=device, dtype=dtype)
            product = torch.empty_like(a)
            gemm_s = _best_s(lambda: torch.mm(a, b, out=product), device)
            source = torch.ones(num_bytes, device=device, dtype=torch.uint8)
            copy = torch.zeros_like(source)
            copy_s = _best_s(lambda: copy.copy_(source), device)
    finally:
        if device.type == "cpu" and num_threads != 1:
            torch.set_num_threads(num_threads)
    return Rates(2.0 * size**3 / gemm_s, 2.0 * num_bytes / copy_s)


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few runs after one that does not count: what the device does undisturbed."""
    run()
    times: list[float] = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            stream = torch.cuda.current_stream(device)
            start.record(stream)
            run()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        else:
            start_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - start_s)
    return max(min(times), 1e-9)
