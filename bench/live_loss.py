"""Does training with k live micro-batches of M reach the loss of plain training with k? ``python -m bench.live_loss``.

Runs ``timelyfreeze train --live-microbatches k`` for some seeds and leaves a row each in bench/results/live_loss.jsonl:
the validation losses after equal steps. Takes about 40 s a seed and k on two cores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean, stdev

from bench.record import record
from timelyfreeze.cli.main import main as command
from timelyfreeze.cli.metrics import read_rows
from timelyfreeze.cli.table import FREEZE, PLAIN

SEEDS = (0, 1, 2)
LIVE = (2, 4)
STEPS = 100


def final_losses(live: int, seed: int) -> dict[str, float]:
    """Validation loss of each run after its last step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        options = {"live-microbatches": live, "steps": STEPS, "seed": seed, "out": out}
        code = command(["train", *(word for name, value in options.items() for word in (f"--{name}", str(value)))])
        if code != 0:
            raise SystemExit(code)
        rows = read_rows(out / "metrics.jsonl", [(PLAIN, STEPS), (FREEZE, STEPS)])
    return {row.run: row.validation_loss for row in rows if row.step == STEPS and row.validation_loss is not None}


def main() -> None:
    for live in LIVE:
        found = [final_losses(live, seed) for seed in SEEDS]
        for seed, losses in zip(SEEDS, found, strict=True):
            record(
                "live_loss",
                live_microbatches=live,
                seed=seed,
                num_steps=STEPS,
                plain_loss=losses[PLAIN],
                frozen_loss=losses[FREEZE],
            )
        plain, frozen = ([losses[run] for losses in found] for run in (PLAIN, FREEZE))
        print(
            f"k = {live}: plain {mean(plain):.4f} (seeds' deviation {stdev(plain):.4f}), "
            f"timelyfreeze {mean(frozen):.4f} ({stdev(frozen):.4f})"
        )


if __name__ == "__main__":
    main()
