"""How much sooner is flush's final loss reached without a flush? ``python -m bench.async_time_to_loss [SEED ...]``.

The main job's language model in 2 stages, 2 micro-batches a batch: flush and stream take turns, some steps each, and
are validated in between, outside the time. Leaves a row a seed in bench/results/async_time_to_loss.jsonl; a seed takes
about two minutes on two cores, which should be idle otherwise.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from bench.async_quality import Case, batches, make_pipe, validate
from bench.record import record
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import Corpus, read_corpus
from timelyfreeze.cli.trainer import Trainer
from timelyfreeze.schedule import create_schedule

NUM_STAGES, NUM_MICROBATCHES = 2, 2
# At the main job's own rate, 7e-4, drift costs so much that the loss is not reached: see async_quality.
LEARNING_RATE = 2e-4
TURN = 10  # steps until it is the other's turn
MOST = 1.2  # how many times as many steps the stream may take

Curve = list[tuple[float, float]]  # seconds trained, validation loss


def reached_at_s(curve: Curve, loss: float) -> float | None:
    """When a curve gets down to a loss for the first time, between its points along a line; None: it does not.

    >>> reached_at_s([(0.0, 5.0), (10.0, 3.0), (20.0, 2.0)], 2.5)
    15.0
    """
    for (begin_s, before), (end_s, after) in pairwise(curve):
        if after <= loss:
            return begin_s + (end_s - begin_s) * (before - loss) / (before - after)
    return None


def race(config: TrainConfig, corpus: Corpus) -> tuple[Curve, Curve]:
    """Both curves, the stream's until it has reached the other's end or has done ``MOST`` times as many steps."""
    case = Case("paci", NUM_STAGES, NUM_MICROBATCHES)
    split = [(config.layers + 2) // NUM_STAGES]
    schedule = create_schedule("1f1b", num_ranks=NUM_STAGES, num_microbatches=NUM_MICROBATCHES)
    flush_s = stream_s = 0.0
    with Trainer(config, corpus, schedule, split=split, name="flush") as trainer, make_pipe(config, case) as pipe:
        start = trainer.validate(0)
        flush, stream = [(0.0, start)], [(0.0, start)]
        for first in range(1, int(config.steps * MOST), TURN):
            turn = range(first, first + TURN)
            if first <= config.steps:
                begin_s = time.perf_counter()
                for step in turn:
                    trainer.update(step)
                flush_s += time.perf_counter() - begin_s
                flush.append((flush_s, trainer.validate(turn[-1])))
            elif stream[-1][1] <= flush[-1][1]:
                break
            begin_s = time.perf_counter()
            for result in pipe.run(batches(config, corpus, turn[0], turn[-1]), drain=False):
                float(result.loss)
            pipe.settle()
            stream_s += time.perf_counter() - begin_s
            stream.append((stream_s, validate(pipe, config, corpus)))
    return flush, stream


def main(seeds: Sequence[int] = (0, 1, 2)) -> None:
    torch.set_num_threads(1)
    for seed in seeds:
        config = TrainConfig(seed=seed, stages=NUM_STAGES, microbatches=NUM_MICROBATCHES, learning_rate=LEARNING_RATE)
        # As many sequences a batch as in the main job.
        size = TrainConfig.microbatches * TrainConfig.microbatch_size // NUM_MICROBATCHES
        config = replace(config, microbatch_size=size)
        corpus = read_corpus(sequence_length=config.sequence_length)
        flush, stream = race(config, corpus)
        end_s, loss = flush[-1]
        reached_s = reached_at_s(stream, loss)
        sooner = None if reached_s is None else end_s / reached_s
        per_step = (end_s / len(flush)) / (stream[-1][0] / len(stream))
        print(
            f"seed {seed}: flush {loss:.4f} after {end_s:.1f} s, the stream after {reached_s} s: {sooner}", flush=True
        )
        record(
            "async_time_to_loss",
            seed=seed,
            num_stages=NUM_STAGES,
            num_microbatches=NUM_MICROBATCHES,
            learning_rate=config.learning_rate,
            num_steps=config.steps,
            batch_size=config.batch_size,
            text_fingerprint=corpus.fingerprint,
            flush_curve=flush,
            stream_curve=stream,
            flush_final_loss=loss,
            flush_s=end_s,
            stream_reached_s=reached_s,
            times_sooner=sooner,
            times_faster_a_step=per_step,
        )


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or (0, 1, 2))
