"""torch.distributed.pipelining on the same workload: Schedule1F1B, one gloo process a stage, one thread each."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from bench.workers import Hosts, Workers
from bench.workloads import Workload


class TorchPipelining:
    """Worker processes that live until ``close`` and sleep between steps, so that other runs may come in between::

    with TorchPipelining(workload) as baseline:
        seconds = baseline.step()
    """

    def __init__(self, workload: Workload, num_ranks: int = 2, hosts: Hosts | None = None) -> None:
        self.loss = float("nan")
        self._workers = Workers(_serve, num_ranks, workload, hosts=hosts)

    def step(self) -> float:
        """Seconds of one step: the slowest rank's own time. ``loss`` is then the batch's mean loss."""
        replies = self._workers.call("step")
        self.loss = replies[-1][1]
        return max(float(seconds) for seconds, _ in replies)

    def close(self) -> None:
        """Ends the workers; safe to call twice."""
        self._workers.close()

    def __enter__(self) -> TorchPipelining:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(rank: int, num_ranks: int, workload: Workload) -> Callable[[str], tuple[float, float | None]]:
    stages, (x, y) = workload.build()
    stage = PipelineStage(stages[rank], rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, workload.num_microbatches, loss_fn=workload.loss_fn)
    arguments = (x,) if rank == 0 else ()
    last = rank == num_ranks - 1

    def step(_: str) -> tuple[float, float | None]:
        stages[rank].zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        distributed.barrier()
        start = time.perf_counter()
        schedule.step(*arguments, target=y if last else None, losses=losses, return_outputs=False)
        seconds = time.perf_counter() - start
        return seconds, float(torch.stack(losses).detach().mean()) if last else None

    return step
