"""Is the pipeline without a flush as fast as flush 1F1B would be without its bubble, in no more memory?"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import median

import pytest
import torch
from torch import nn

from bench.record import interleave, record
from bench.workloads import Workload, mlp_stages, normal_batch
from timelyfreeze import AsyncPipeline, FreezingPipeline
from timelyfreeze.runtime.memory import count_saved_bytes

NUM_STAGES = 2
NUM_BATCHES = 12  # a measured round

NUM_PROCESSES = 5  # a side, whose peak memory is looked at


def workload(num_microbatches: int) -> Workload:
    """2 stages of 4 MLP blocks, so that the input gradient that the first layer is spared hardly unbalances them."""
    return Workload(
        partial(mlp_stages, NUM_STAGES, 4, 128),
        partial(normal_batch, num_microbatches * 512, 128),
        nn.functional.mse_loss,
        num_microbatches,
    )


def adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Flush:
    """1F1B: an optimizer step a batch, then the next batch."""

    def __init__(self, work: Workload) -> None:
        stages, self.batch = work.build()
        self.pipe = FreezingPipeline(stages, num_microbatches=work.num_microbatches, loss_fn=work.loss_fn)
        self.optimizer = adamw(list(self.pipe.parameters()))

    def round(self) -> float:
        start = time.perf_counter()
        for _ in range(NUM_BATCHES):
            self.pipe.step(self.batch[0], target=self.batch[1])
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - start


class Stream:
    """PACI with as many updates: one a batch in every stage. Rounds are parts of one stream."""

    def __init__(self, work: Workload) -> None:
        stages, self.batch = work.build()
        self.pipe = AsyncPipeline(
            stages,
            num_microbatches=work.num_microbatches,
            accumulation=work.num_microbatches,
            optimizer=adamw,
            loss_fn=work.loss_fn,
        )
        self.results = self.pipe.run(self._batches())

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield self.batch

    def round(self) -> float:
        next(self.results)  # the stages stand still between rounds; this brings them up to speed
        next(self.results)
        start = time.perf_counter()
        for _ in range(NUM_BATCHES):
            next(self.results)
        seconds = time.perf_counter() - start
        self.pipe.settle()
        return seconds


@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_async(num_microbatches: int) -> None:
    work = workload(num_microbatches)
    flush, stream = Flush(work), Stream(work)
    with flush.pipe, stream.pipe:
        comparison = interleave(flush.round, stream.round, rounds=8)
        stream.pipe.drain()
        peaks = []
        for run in (flush.round, lambda: list(stream.pipe.run([stream.batch] * NUM_BATCHES))):
            with count_saved_bytes([*flush.pipe.parameters(), *stream.pipe.parameters()]) as saved:
                run()
            peaks.append(saved.peak_bytes)
        ledger = stream.pipe.ledger
    bubble_free = (num_microbatches + NUM_STAGES - 1) / num_microbatches
    share = comparison.ratio / bubble_free
    print(
        f"\nM={num_microbatches}: flush / stream: {comparison}; bubble-free would be {bubble_free:.3f}: {share:.3f} of "
        f"it; peak activations {peaks[0]} and {peaks[1]} bytes; drift {ledger.max_drift}; "
        f"{ledger.num_weight_copies} weight copies"
    )
    record(
        "async",
        num_stages=NUM_STAGES,
        num_microbatches=num_microbatches,
        flush_against_stream=comparison,
        bubble_free_ratio=bubble_free,
        share_of_bubble_free=share,
        flush_peak_activation_bytes=peaks[0],
        stream_peak_activation_bytes=peaks[1],
        max_drift=ledger.max_drift,
        weight_copies=ledger.num_weight_copies,
    )


def peak_bytes(side: type[Flush] | type[Stream]) -> int:
    """The most memory that this process ever had, which should be a fresh one: after training in large micro-batches,
    so that tensors are most of it."""
    torch.set_num_threads(1)
    work = Workload(
        partial(mlp_stages, NUM_STAGES, 4, 512), partial(normal_batch, 4 * 1024, 512), nn.functional.mse_loss, 4
    )
    training = side(work)
    with training.pipe:
        for _ in range(2):
            training.round()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_peak_memory() -> None:
    peaks: dict[str, list[int]] = {"flush": [], "stream": []}
    for _ in range(NUM_PROCESSES):
        for name, side in (("flush", Flush), ("stream", Stream)):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
                peaks[name].append(fresh.submit(peak_bytes, side).result())
    flush, stream = (median(own) for own in peaks.values())
    print(f"\npeak memory of a process: {stream / 2**20:.0f} MiB of {flush / 2**20:.0f}: {stream / flush:.4f}")
    record(
        "async_memory",
        num_stages=NUM_STAGES,
        num_microbatches=4,
        flush_peak_bytes=peaks["flush"],
        stream_peak_bytes=peaks["stream"],
        ratio=stream / flush,
    )
