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

from bench.record import compare, interleave, interleave_all, record
from bench.workloads import Workload, mlp_stages, normal_batch
from timelyfreeze import AsyncPipeline, FreezeConfig, FreezingPipeline
from timelyfreeze.runtime.memory import count_saved_bytes

NUM_STAGES = 2
NUM_BATCHES = 12  # a measured round

NUM_PROCESSES = 3  # a side, whose peak memory is looked at


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

    def __init__(self, work: Workload, freeze: FreezeConfig | None = None) -> None:
        stages, self.batch = work.build()
        self.pipe = FreezingPipeline(
            stages, num_microbatches=work.num_microbatches, loss_fn=work.loss_fn, freeze=freeze
        )
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

    def __init__(self, work: Workload, freeze: FreezeConfig | None = None) -> None:
        stages, self.batch = work.build()
        self.pipe = AsyncPipeline(
            stages,
            freeze=freeze,
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


def uneven(blocks: tuple[int, ...], num_microbatches: int) -> Workload:
    """As ``workload``, with so many blocks in each stage and half the samples."""

    def make_stages() -> list[nn.Module]:
        return [stage for number in blocks for stage in mlp_stages(1, number, 128)]

    return Workload(
        make_stages, partial(normal_batch, num_microbatches * 256, 128), nn.functional.mse_loss, num_microbatches
    )


def freeze_until_steady(side: Flush | Stream) -> None:
    """Rounds until a plan is in force."""
    while side.pipe.plan is None or phase_of(side) != "steady":
        side.round()


def phase_of(side: Flush | Stream) -> str:
    report = side.pipe.report()
    return str(report["phase"] if isinstance(side, Flush) else report["freezing"]["phase"])


@pytest.mark.parametrize("blocks", [(3, 6), (6, 3)])
def test_freezing_without_a_flush(blocks: tuple[int, int]) -> None:
    """One stage is twice as heavy: without bubbles freezing can only take from that one."""
    work = uneven(blocks, 4)
    freeze = FreezeConfig(max_ratio=0.5, replan_drift_ratio=None)
    sides = {
        "flush": Flush(work),
        "flush_freezing": Flush(work, freeze),
        "stream": Stream(work),
        "stream_freezing": Stream(work, freeze),
    }
    frozen = sides["stream_freezing"]
    for side in (sides["flush_freezing"], frozen):
        freeze_until_steady(side)
    seconds = interleave_all({name: side.round for name, side in sides.items()}, rounds=7, warmup=1)
    flush_report, report = sides["flush_freezing"].pipe.report(), frozen.pipe.report()["freezing"]
    for side in sides.values():
        side.pipe.close()
    against = {f"flush_against_{name}": compare(seconds["flush"], seconds[name]) for name in list(sides)[1:]}
    gain = compare(seconds["stream"], seconds["stream_freezing"])
    period_s = gain.b_s / NUM_BATCHES / work.num_microbatches
    error_ratio = report["predicted_period_s"] / period_s - 1.0
    print(f"\nblocks {blocks}, cap {freeze.max_ratio}:")
    for name, comparison in against.items():
        print(f"  {name}: {comparison}")
    print(
        f"  stream against frozen stream: {gain}\n  period predicted {1e3 * report['predicted_period_s']:.2f} ms, "
        f"measured {1e3 * period_s:.2f} ms ({100 * error_ratio:+.1f} %); unfrozen predicted "
        f"{1e3 * report['unfrozen_period_s']:.2f} ms; ratios planned {report['planned_stage_ratios']}, "
        f"drawn {report['stage_ratios']}"
    )
    record(
        "async_freezing",
        blocks=list(blocks),
        num_microbatches=work.num_microbatches,
        max_ratio=freeze.max_ratio,
        **against,
        stream_against_stream_freezing=gain,
        predicted_period_s=report["predicted_period_s"],
        unfrozen_period_s=report["unfrozen_period_s"],
        measured_period_s=period_s,
        prediction_error_ratio=error_ratio,
        planned_stage_s=report["planned_stage_s"],
        planned_stage_ratios=report["planned_stage_ratios"],
        stage_ratios=report["stage_ratios"],
        flush_mean_freeze_ratio=flush_report["mean_freeze_ratio"],
    )
