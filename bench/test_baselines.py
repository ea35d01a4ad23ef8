"""Do the baselines train the model that they are compared on? (A baseline that does less is no baseline.)"""

from __future__ import annotations

import pytest
import torch

from bench.baselines.plain_loop import PlainLoop
from bench.baselines.torch_pipelining import TorchPipelining
from bench.record import interleave
from bench.workloads import Workload, host_overhead, mlp


@pytest.mark.parametrize("workload", [host_overhead(), mlp()], ids=["host_overhead", "mlp"])
def test_baselines_compute_the_same_loss(workload: Workload) -> None:
    loop = PlainLoop(workload)
    with TorchPipelining(workload) as torch_pipelining:
        print("\nplain loop against torch.distributed.pipelining:", interleave(loop.step, torch_pipelining.step, 20))
        assert torch_pipelining.loss == loop.loss


@pytest.mark.parametrize("by_stage", [False, True])
def test_plain_loop_leaves_the_batch_mean_gradient(by_stage: bool) -> None:
    workload = mlp()
    loop = PlainLoop(workload, by_stage)
    loop.step()
    stages, (x, y) = workload.build()
    model = torch.nn.Sequential(*stages)
    torch.autograd.backward(workload.loss_fn(model(x), y))
    for ours, whole in zip(loop.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, whole.grad)


def fail() -> list[torch.nn.Module]:
    raise ValueError("no such stages")


def test_a_failing_worker_is_reported() -> None:
    workload = host_overhead()
    broken = Workload(fail, workload.make_batch, workload.loss_fn, workload.num_microbatches)
    with pytest.raises(RuntimeError, match="no such stages"):
        TorchPipelining(broken)
