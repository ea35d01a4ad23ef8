"""From repeated measurements to one number and its spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from timelyfreeze.errors import problem, raise_all
from timelyfreeze.schedule import Action


class Measured(NamedTuple):
    """One action's measured duration: median and interquartile range, in seconds, and of how many samples."""

    median_s: float
    spread_s: float
    num_samples: int


def summarize(samples: Mapping[Action, Sequence[float]]) -> dict[Action, Measured]:
    """Summarise repeated durations by action. Median and quartiles: a step that the system disturbed moves neither.

    Raises:
        ValueError: an action has no samples, or some that are not finite seconds of at least 0.

    >>> summarize({Action.parse("0F0"): [1.0, 2.0, 3.0, 4.0, 100.0]})[Action.parse("0F0")]
    Measured(median_s=3.0, spread_s=2.0, num_samples=5)
    """
    measured = {}
    faults = []
    for action, values in samples.items():
        array = np.asarray(values, dtype=np.float64)
        if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all() or (array < 0).any():
            faults.append(
                problem("samples", expected="finite seconds, at least 0, and at least one", where=str(action))
            )
            continue
        low, median, high = (float(value) for value in np.quantile(array, (0.25, 0.5, 0.75)))
        measured[action] = Measured(median, high - low, array.size)
    raise_all(ValueError, faults)
    return measured
