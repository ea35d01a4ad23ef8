"""What does training without a flush cost in quality? ``python -m bench.async_quality [SEED ...]``.

The main job's language model, at a quarter of its width and half its sequence length, by flush 1F1B and asynchronously,
on the same batches with as many updates: a batch is 16 sequences in ``accumulation`` micro-batches, and every stage
updates once a batch. So runs differ in their drift alone. Leaves a row a run in bench/results/async_quality.jsonl; a
run takes about ten seconds on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from bench.record import record
from timelyfreeze import AsyncPipeline
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import Corpus, read_corpus, training_batch, validation_batch
from timelyfreeze.cli.model import build_model, byte_loss
from timelyfreeze.cli.stream_trainer import RateByBatches
from timelyfreeze.cli.trainer import CLIP_NORM, Trainer, make_optimizer
from timelyfreeze.schedule import create_schedule

WIDTH, SEQUENCE_LENGTH = 64, 64
# Drift costs more the further an update goes. The main job's own rate is the best of those tried for a flush.
LEARNING_RATES = (2.5e-4, TrainConfig.learning_rate)
NUM_POINTS = 5  # validations, evenly over the steps, the last after the last step


@dataclass(frozen=True)
class Case:
    """An asynchronous run."""

    schedule: str
    num_stages: int
    accumulation: int
    predict_weights: bool = False


CASES = [
    *(Case("paci", num_stages, accumulation) for num_stages in (4, 8) for accumulation in (1, 2, 4, 8)),
    *(Case("paci", num_stages, accumulation, True) for num_stages in (4, 8) for accumulation in (2, 4, 8)),
    *(Case("pipedream", num_stages, 1) for num_stages in (4, 8)),
]


def points(config: TrainConfig) -> list[int]:
    return [config.steps * (index + 1) // NUM_POINTS for index in range(NUM_POINTS)]


def flush_losses(config: TrainConfig, corpus: Corpus) -> list[float]:
    """Validation losses of 1F1B with a flush, an optimizer step a batch."""
    schedule = create_schedule("1f1b", num_ranks=config.stages, num_microbatches=config.microbatches)
    losses = []
    with Trainer(config, corpus, schedule, name="flush") as trainer:
        for step in range(1, config.steps + 1):
            trainer.update(step)
            if step in points(config):
                losses.append(trainer.validate(step))
    return losses


def batches(config: TrainConfig, corpus: Corpus, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of the steps from ``first`` to ``last``, as the main job draws them."""
    for step in range(first, last + 1):
        yield training_batch(
            corpus.train,
            batch_size=config.batch_size,
            sequence_length=config.sequence_length,
            seed=config.seed,
            step=step,
        )


def make_pipe(config: TrainConfig, case: Case) -> AsyncPipeline:
    model = build_model(config.model, config.seed)
    return AsyncPipeline(
        model,
        case.num_stages,
        case.accumulation,
        accumulation=case.accumulation,
        optimizer=lambda parameters: make_optimizer(parameters, config),
        lr_scheduler=lambda optimizer: RateByBatches(optimizer, config.learning_rate_at),
        loss_fn=byte_loss,
        schedule=case.schedule,
        predict_weights=case.predict_weights,
        max_grad_norm=CLIP_NORM,
        split_points=[len(model) * stage // case.num_stages for stage in range(1, case.num_stages)],
        seed=config.seed,
    )


def validate(pipe: AsyncPipeline, config: TrainConfig, corpus: Corpus) -> float:
    x, y = validation_batch(
        corpus.validation, batch_size=config.validation_sequences, sequence_length=config.sequence_length
    )
    return float(pipe.evaluate(x, target=y))


def stream_losses(config: TrainConfig, corpus: Corpus, case: Case) -> tuple[list[float], int]:
    """Validation losses of an asynchronous run, which goes on without a drain in between, and its largest drift."""
    losses, first = [], 1
    with make_pipe(config, case) as pipe:
        for last in points(config):
            for _ in pipe.run(batches(config, corpus, first, last), drain=last == config.steps):
                pass
            losses.append(validate(pipe, config, corpus))
            first = last + 1
        return losses, pipe.ledger.max_drift


def main(seeds: Sequence[int] = (0, 1, 2)) -> None:
    torch.set_num_threads(1)
    for rate, seed in product(LEARNING_RATES, seeds):
        config = TrainConfig(seed=seed, width=WIDTH, sequence_length=SEQUENCE_LENGTH, learning_rate=rate)
        corpus = read_corpus(sequence_length=config.sequence_length)
        flush = flush_losses(config, corpus)
        print(f"rate {rate}, seed {seed}: flush {flush[-1]:.4f}", flush=True)
        for case in CASES:
            losses, drift = stream_losses(config, corpus, case)
            excess = losses[-1] / flush[-1] - 1
            print(f"rate {rate}, seed {seed}: {case}: {losses[-1]:.4f}, {excess:+.2%} at drift {drift}", flush=True)
            record(
                "async_quality",
                schedule=case.schedule,
                num_stages=case.num_stages,
                accumulation=case.accumulation,
                predict_weights=case.predict_weights,
                seed=seed,
                learning_rate=rate,
                width=config.width,
                sequence_length=config.sequence_length,
                num_steps=config.steps,
                batch_size=config.batch_size,
                text_fingerprint=corpus.fingerprint,
                max_drift=drift,
                validation_losses=losses,
                flush_validation_losses=flush,
                excess_ratio=excess,
            )


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or (0, 1, 2))
