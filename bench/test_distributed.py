"""Ranks as gloo processes: as fast as torch.distributed.pipelining's, and as the plan says?

The model is the main job's. All take turns in one run; the plain pipelines with and without the package's operators, so
that what the runtime does shows apart from them.
"""

from __future__ import annotations

from statistics import median

import pytest

from bench.baselines.torch_pipelining import TorchPipelining
from bench.namespaces import SlowLink, are_possible
from bench.our_processes import OurProcesses
from bench.ours import OurPipeline
from bench.record import Comparison, interleave, record
from bench.workers import Hosts
from bench.workloads import language_model
from timelyfreeze import FreezeConfig


def test_plain_step() -> None:
    workload = language_model()
    with (
        TorchPipelining(workload) as torch_pipelining,
        OurProcesses(workload) as ours,
        OurProcesses(workload, accelerate=False) as not_accelerated,
        OurPipeline(workload) as threads,
    ):
        against_torch = interleave(ours.step, torch_pipelining.step, rounds=30)
        runtime_alone = interleave(not_accelerated.step, torch_pipelining.step, rounds=30)
        against_threads = interleave(ours.step, threads.step, rounds=30)
        assert ours.loss == pytest.approx(torch_pipelining.loss, rel=1e-5)
        assert not_accelerated.loss == pytest.approx(torch_pipelining.loss, rel=1e-6)
    print(f"\n/ torch.distributed.pipelining: {against_torch}; with torch's operators: {runtime_alone}")
    print(f"/ threads: {against_threads}")
    record(
        "distributed",
        what="plain",
        over_torch_pipelining=against_torch,
        with_torch_operators_over_torch_pipelining=runtime_alone,
        over_threads=against_threads,
    )


@pytest.mark.parametrize("max_ratio", [0.5, 0.8])
def test_planned_step(max_ratio: float) -> None:
    measure_planned("one host", max_ratio, None)


@pytest.mark.skipif(not are_possible(), reason="needs root, ip and tc")
@pytest.mark.parametrize("rate", ["100mbit"])
def test_slow_link(rate: str) -> None:
    with SlowLink(rate) as link:
        measure_planned(f"two namespaces, {rate}", 0.5, link.hosts)


def measure_planned(where: str, max_ratio: float, hosts: Hosts | None) -> None:
    """Planned against plain against torch's, and what the plan promised."""
    workload = language_model()
    freeze = FreezeConfig(max_ratio=max_ratio)
    with (
        TorchPipelining(workload, hosts=hosts) as torch_pipelining,
        OurProcesses(workload, hosts=hosts) as plain,
        OurProcesses(workload, hosts=hosts, freeze=freeze) as planned,
    ):
        planned.step_until_planned()
        times_s: list[float] = []

        def step() -> float:
            seconds = planned.step()
            assert planned.last is not None
            times_s.append(planned.last.step_time_s)
            return seconds

        planned_over_torch = interleave(step, torch_pipelining.step, rounds=20)
        plain_over_torch: Comparison = interleave(plain.step, torch_pipelining.step, rounds=20)
        planned_over_plain = interleave(step, plain.step, rounds=20)
        assert planned.last is not None
        predicted_s = planned.last.planned_s
        transfers_s = planned.last.transfers_s
    assert predicted_s is not None
    error = predicted_s / median(times_s) - 1
    print(
        f"\n{where}, cap {max_ratio}: planned / torch: {planned_over_torch}; plain / torch: {plain_over_torch}; "
        f"planned / plain: {planned_over_plain}; predicted {predicted_s * 1e3:.1f} ms ({error:+.1%}); "
        f"transfers {transfers_s}"
    )
    record(
        "distributed",
        what=where,
        max_ratio=max_ratio,
        planned_over_torch_pipelining=planned_over_torch,
        plain_over_torch_pipelining=plain_over_torch,
        planned_over_plain=planned_over_plain,
        predicted_s=predicted_s,
        prediction_error=error,
        transfers_s=transfers_s,
    )
