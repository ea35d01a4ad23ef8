"""What does the host cost where there is next to no work? 2 stages of Linear(4, 4), 64 micro-batches, 1F1B."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.baselines.plain_loop import PlainLoop
from bench.baselines.torch_pipelining import TorchPipelining
from bench.ours import OurPipeline
from bench.record import ROOT, interleave, record
from bench.workloads import host_overhead
from timelyfreeze.runtime import engine


def test_against_torch_pipelining_and_a_plain_loop() -> None:
    workload = host_overhead()
    loop = PlainLoop(workload)
    with TorchPipelining(workload) as torch_pipelining, OurPipeline(workload) as ours:
        against_torch = interleave(ours.step, torch_pipelining.step, rounds=100)
        against_loop = interleave(ours.step, loop.step, rounds=200)
        assert ours.loss == pytest.approx(loop.loss)
    print("\nours / torch.distributed.pipelining:", against_torch, "\nours / plain loop:", against_loop)
    record("host_overhead", against_torch_pipelining=against_torch, against_plain_loop=against_loop)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 8])
def test_where_threads_begin_to_pay(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker for all ranks against one a rank, over the length of an action: sets engine.INLINE_BELOW_S."""
    workload = host_overhead(num_layers)

    def run(pipeline: OurPipeline, below_s: float) -> float:
        monkeypatch.setattr(engine, "INLINE_BELOW_S", below_s)
        return pipeline.step()

    with OurPipeline(workload) as ours:
        inline_over_threaded = interleave(lambda: run(ours, float("inf")), lambda: run(ours, 0.0), rounds=60)
        run(ours, float("inf"))
        mean_action_us = ours.last.times.mean_action_s * 1e6
    print(f"\n{mean_action_us:.0f} us an action, inline / threaded:", inline_over_threaded)
    record("inline_or_threads", mean_action_us=mean_action_us, inline_over_threaded=inline_over_threaded)


def test_scheduler_alone(tmp_path: Path) -> None:
    """Microseconds that the C++ scheduler takes for an action that does nothing."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja", "-DTIMELYFREEZE_TESTS_ONLY=ON"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(tmp_path)], check=True, capture_output=True)
    program = tmp_path / "timelyfreeze_core_tests"
    printed = subprocess.run([str(program), "--benchmark"], check=True, capture_output=True, text=True).stdout
    print("\nscheduler alone:", printed)
    record("scheduler_alone", **json.loads(printed))
