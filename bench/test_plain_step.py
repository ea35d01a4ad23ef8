"""Is a plain pipelined step as fast as torch.distributed.pipelining's (two gloo processes), on the main job's model?"""

from __future__ import annotations

import pytest

from bench.baselines.plain_loop import PlainLoop
from bench.baselines.torch_pipelining import TorchPipelining
from bench.ours import OurPipeline
from bench.record import interleave, record
from bench.workloads import Workload, language_model, mlp


@pytest.mark.parametrize("name", ["language_model", "mlp"])
def test_plain_step(name: str) -> None:
    workload: Workload = {"language_model": language_model, "mlp": mlp}[name]()
    loop = PlainLoop(workload)
    with TorchPipelining(workload) as torch_pipelining, OurPipeline(workload) as ours:
        against_torch = interleave(ours.step, torch_pipelining.step, rounds=40)
        against_loop = interleave(ours.step, loop.step, rounds=10)
        assert ours.loss == pytest.approx(torch_pipelining.loss, rel=1e-5)
    print(f"\n{name}: ours / torch.distributed.pipelining:", against_torch, "\nours / plain loop:", against_loop)
    record("plain_step", workload=name, against_torch_pipelining=against_torch, against_plain_loop=against_loop)
