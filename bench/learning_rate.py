"""Which learning rate is best for the plain run of the main job? ``python -m bench.learning_rate [RATE ...]``.

Takes about two minutes a rate on two cores. Each leaves a row in bench/results/learning_rate.jsonl; the best one is
the default of ``timelyfreeze train``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from rich.console import Console

from bench.record import record
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.data import Corpus, read_corpus
from timelyfreeze.cli.metrics import MetricsLog, validation_curve
from timelyfreeze.cli.progress import make_reporter
from timelyfreeze.cli.runs import Job, RunSpec, TrainingRun
from timelyfreeze.cli.stopping import StopRequest
from timelyfreeze.cli.table import PLAIN
from timelyfreeze.schedule import create_schedule

RATES = (3e-4, 5e-4, 7e-4, 1e-3, 2e-3)


def validation_losses(config: TrainConfig, corpus: Corpus) -> list[float]:
    """Held-out losses of a plain run, before its first step and after each tenth of it."""
    schedule = create_schedule(config.schedule, num_ranks=config.stages, num_microbatches=config.microbatches)
    log = MetricsLog()
    with StopRequest() as stop:
        job = Job(config, corpus, schedule, None, None, log, make_reporter(Console()), stop)
        TrainingRun(job, RunSpec(PLAIN, schedule)).train(None)
    return [loss for _, loss in validation_curve(log.rows)]


def main(rates: Sequence[float] = RATES) -> float:
    """Try the rates and return the best."""
    torch.set_num_threads(1)
    corpus = read_corpus(sequence_length=TrainConfig.sequence_length)
    final: dict[float, float] = {}
    for rate in rates:
        config = TrainConfig(learning_rate=rate)
        losses = validation_losses(config, corpus)
        final[rate] = losses[-1]
        record(
            "learning_rate",
            learning_rate=rate,
            num_steps=config.steps,
            batch_size=config.batch_size,
            sequence_length=config.sequence_length,
            text_fingerprint=corpus.fingerprint,
            validation_losses=losses,
        )
        print(f"rate {rate}: validation loss {losses[-1]:.4f}")
    best = min(final, key=final.__getitem__)
    print(f"best: {best}; the default is {TrainConfig.learning_rate}")
    return best


if __name__ == "__main__":
    main([float(rate) for rate in sys.argv[1:]] or RATES)
