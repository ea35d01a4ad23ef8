"""What the rows of a run without a flush add up to. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from timelyfreeze.cli.metrics import StepRow
from timelyfreeze.schedule.asynchronous import drift_bound


@dataclass(frozen=True)
class StageCounts:
    """One stage over the whole run.

    Attributes:
        drift: the most updates that fell between forward and backward of a micro-batch.
        bound: the most that may.
        updates, skipped: made, and left out because a gradient was not finite.
    """

    drift: int
    bound: int
    updates: int
    skipped: int


def stage_counts(rows: Sequence[StepRow], accumulation: int) -> list[StageCounts]:
    """By stage, from the rows of a run without a flush; those after its last drain are not counted in full.

    >>> row = StepRow("paci", 1, drift=(1, 0), updates=(2, 2), skipped_updates=(0, 1))
    >>> stage_counts([row, row], 8)[1]
    StageCounts(drift=0, bound=0, updates=4, skipped=2)
    """
    drifts = list(zip(*(row.drift for row in rows if row.drift is not None), strict=True))
    updates = list(zip(*(row.updates for row in rows if row.updates is not None), strict=True))
    skipped = list(zip(*(row.skipped_updates for row in rows if row.skipped_updates is not None), strict=True))
    return [
        StageCounts(
            max(drift),
            drift_bound(len(drifts), stage, accumulation),
            sum(updates[stage]) if updates else 0,
            sum(skipped[stage]) if skipped else 0,
        )
        for stage, drift in enumerate(drifts)
    ]


def streaming_steps(rows: Sequence[StepRow]) -> set[int]:
    """Steps that began and ended in the middle of a stream, where it neither filled nor drained."""
    drained = {row.step for row in rows if row.step == 0 or row.updates is not None}
    return {row.step for row in rows if row.timed and not {row.step, row.step - 1} & drained}
