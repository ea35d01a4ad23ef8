"""torch.distributed.pipelining on the same workload: Schedule1F1B, one gloo process a stage, one thread each."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from bench.workloads import Workload

_TIMEOUT_S = 300.0


class _Reply(NamedTuple):
    seconds: float
    loss: float | None  # of the last rank
    error: str | None = None


class TorchPipelining:
    """Worker processes that live until ``close`` and sleep between steps, so that other runs may come in between::

    with TorchPipelining(workload) as baseline:
        seconds = baseline.step()
    """

    def __init__(self, workload: Workload, num_ranks: int = 2) -> None:
        self.loss = float("nan")
        self._store = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(
                target=_serve,
                args=(rank, num_ranks, Path(self._store.name) / "store", workload, theirs),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that a worker's end shows as the end of its pipe
        self._collect()

    def step(self) -> float:
        """Seconds of one step: the slowest rank's own time. ``loss`` is then the batch's mean loss."""
        for connection in self._connections:
            connection.send("step")
        replies = self._collect()
        self.loss = next(reply.loss for reply in replies if reply.loss is not None)
        return max(reply.seconds for reply in replies)

    def close(self) -> None:
        """Ends the workers; safe to call twice."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._store.cleanup()

    def __enter__(self) -> TorchPipelining:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self) -> list[_Reply]:
        """One reply of each rank; the first error that any rank reports ends the baseline."""
        replies: list[_Reply] = []
        pending = list(self._connections)
        while pending:
            ready = wait(pending, timeout=_TIMEOUT_S)
            for connection in [c for c in pending if c in ready]:
                pending.remove(connection)
                try:
                    reply = connection.recv()
                except EOFError:
                    reply = _Reply(0.0, None, "a worker ended")
                if reply.error is not None:
                    self.close()
                    raise RuntimeError(reply.error)
                replies.append(reply)
            if not ready:
                self.close()
                raise TimeoutError(f"no answer from {len(pending)} worker(s) in {_TIMEOUT_S} s")
        return replies


def _serve(rank: int, num_ranks: int, store: Path, workload: Workload, connection: Connection) -> None:
    """A worker: sets up its stage, then runs one step for each message until the pipe ends."""
    try:
        torch.set_num_threads(1)
        distributed.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=num_ranks)
        stages, (x, y) = workload.build()
        stage = PipelineStage(stages[rank], rank, num_ranks, torch.device("cpu"))
        schedule = Schedule1F1B(stage, workload.num_microbatches, loss_fn=workload.loss_fn)
        arguments = (x,) if rank == 0 else ()
        last = rank == num_ranks - 1
        connection.send(_Reply(0.0, None))
        while connection.recv() == "step":
            stages[rank].zero_grad(set_to_none=True)
            losses: list[torch.Tensor] = []
            distributed.barrier()
            start = time.perf_counter()
            schedule.step(*arguments, target=y if last else None, losses=losses, return_outputs=False)
            seconds = time.perf_counter() - start
            connection.send(_Reply(seconds, float(torch.stack(losses).detach().mean()) if last else None))
    except EOFError:
        pass  # closed by the parent
    except Exception:
        with suppress(OSError):  # another rank's report came first, and the parent closed
            connection.send(_Reply(0.0, None, f"rank {rank} failed:\n{traceback.format_exc()}"))
