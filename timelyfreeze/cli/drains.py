"""After which steps a pipeline without a flush is drained: to validate, to save, and to count. No torch.

Draining changes the order of forwards and updates. So where it happens follows from a run's options alone, and not from
when someone wants to stop or to save: a run that is resumed has the numbers of one that was never interrupted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MOST_LOST = 0.01  # share of a stream's time that it may take to fill and drain the pipeline


def shortest_stream(num_stages: int, num_microbatches: int, accumulation: int) -> int:
    """Batches of which filling and draining, ``num_stages - 1`` micro-batches, is one in a hundred at most.

    They end with an update, which no drain has to make of a part of the micro-batches.

    >>> shortest_stream(2, 8, 8), shortest_stream(2, 8, 16), shortest_stream(1, 8, 8)
    (13, 14, 1)
    """
    num_batches = max(1, math.ceil((num_stages - 1) / num_microbatches / _MOST_LOST))
    window = accumulation // math.gcd(accumulation, num_microbatches)
    return math.ceil(num_batches / window) * window


@dataclass(frozen=True)
class Drains:
    """When a run is drained: after validations, in equal parts between them that are no shorter than ``shortest``, and
    before the last batches, of which bytes are counted.

    Attributes:
        num_steps: of the run.
        evaluation_interval: steps between validations.
        shortest: see ``shortest_stream``.
        num_counted: the last batches.

    >>> drains = Drains(num_steps=100, evaluation_interval=40, shortest=13, num_counted=2)
    >>> step, steps = 0, []
    >>> while step < 100:
    ...     steps.append(step := drains.next_after(step))
    >>> steps
    [14, 28, 40, 54, 68, 80, 94, 98, 100]
    """

    num_steps: int
    evaluation_interval: int
    shortest: int
    num_counted: int

    @property
    def longest(self) -> int:
        """The most batches between two drains."""
        num_parts = max(1, self.evaluation_interval // self.shortest)
        return min(self.num_steps, math.ceil(self.evaluation_interval / num_parts))

    def next_after(self, step: int) -> int:
        """The first step after ``step`` that ends with a drain."""
        evaluated = step // self.evaluation_interval * self.evaluation_interval
        part_ends = evaluated + ((step - evaluated) // self.longest + 1) * self.longest
        ends = [part_ends, evaluated + self.evaluation_interval, self.num_steps]
        return min(end for end in [*ends, self.num_steps - self.num_counted] if end > step)

    def counts(self, step: int) -> bool:
        """Whether the batches after ``step`` are those of which bytes are counted."""
        return step >= self.num_steps - self.num_counted
