"""This package on a workload, each rank a gloo process with one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import distributed

from bench.workers import Hosts, Workers
from bench.workloads import Workload
from timelyfreeze import FreezingPipeline


class Answer(NamedTuple):
    """What a rank says of a step.

    Attributes:
        seconds: that its call took.
        step_time_s: from the first action's begin to the last one's end, on any rank.
        loss: of the batch.
        phase: see ``StepResult``.
        planned_s: what the plan predicts; None: there is no plan.
        transfers_s: the medians that the plan goes by, by "stage>stage".
    """

    seconds: float
    step_time_s: float
    loss: float
    phase: str
    planned_s: float | None
    transfers_s: dict[str, float]


class OurProcesses:
    """What ``OurPipeline`` is, with processes as ranks."""

    def __init__(self, workload: Workload, num_ranks: int = 2, hosts: Hosts | None = None, **options: Any) -> None:
        self._workers = Workers(_serve, num_ranks, workload, options, hosts=hosts)
        self.last: Answer | None = None
        self.loss = float("nan")

    def step(self) -> float:
        """Seconds of one step: the slowest rank's own time."""
        answers = [Answer(*answer) for answer in self._workers.call("step")]
        self.last = answers[0]
        self.loss = answers[0].loss
        return max(answer.seconds for answer in answers)

    def step_time(self) -> float:
        """Seconds of one step by its actions, as plans have it."""
        self.step()
        assert self.last is not None
        return self.last.step_time_s

    def step_until_planned(self, most_steps: int = 100) -> None:
        """Step until the plan is in force at full strength."""
        for _ in range(most_steps):
            self.step()
            if self.last is not None and self.last.phase == "steady" and self.last.planned_s is not None:
                return
        raise RuntimeError(f"no plan after {most_steps} steps")

    def __enter__(self) -> OurProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()


def _serve(rank: int, num_ranks: int, workload: Workload, options: dict[str, Any]) -> Callable[[str], Answer]:
    stages, (x, y) = workload.build()
    pipe = FreezingPipeline(
        stages,
        num_microbatches=workload.num_microbatches,
        loss_fn=workload.loss_fn,
        process_group=distributed.group.WORLD,
        **options,
    )

    def step(_: str) -> Answer:
        pipe.zero_grad(set_to_none=True)
        distributed.barrier()
        start = time.perf_counter()
        result = pipe.step(x, target=y)
        seconds = time.perf_counter() - start
        plan = pipe.plan
        transfers = {} if plan is None else {f"{a}>{b}": s for (a, b), s in transfers_of(plan).items()}
        return Answer(
            seconds,
            result.step_time_s,
            float(result.loss),
            result.phase,
            None if plan is None else plan.makespan_s,
            transfers,
        )

    return step


def transfers_of(plan: Any) -> dict[tuple[int, int], float]:
    """The transfers between ranks that the plan goes by."""
    transfer_s = plan.costs.transfer_s
    return dict(transfer_s) if isinstance(transfer_s, dict) else {}
