"""Timing calls on a device, and what a row says of the device."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import torch

from bench.record import package_version

Call = Callable[[], object]


def timed(call: Call, device: torch.device, repeats: int) -> Callable[[], float]:
    """Seconds of one call, the mean of ``repeats`` in a row."""

    def on_cpu() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    def on_gpu() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The host queues all calls while the GPU is kept busy, so that no gap between launches is measured.
        torch.cuda._sleep(4_000_000)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    return on_gpu if device.type == "cuda" else on_cpu


def kernel_seconds(call: Call, kernel: str) -> float | None:
    """Seconds of one launch of the kernels with ``kernel`` in their name, by CUDA's profiler; None: none was seen."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    launches = [event for event in profile.events() if kernel in event.name]
    return sum(event.time_range.elapsed_us() for event in launches) / len(launches) / 1e6 if launches else None


def device_fields(device: torch.device) -> dict[str, object]:
    """The device and its software, for a row."""
    fields: dict[str, object] = {"cuda": torch.version.cuda} | {
        package: package_version(package) for package in ("triton", "liger-kernel")
    }
    if device.type != "cuda":
        return {"device": "cpu", **fields}
    properties = torch.cuda.get_device_properties(device)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = None
    capability = f"{properties.major}.{properties.minor}"
    return {"device": properties.name, "capability": capability, "driver": driver, **fields}
