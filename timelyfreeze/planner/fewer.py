"""The honest alternative to freezing: plain training with a smaller batch."""

from __future__ import annotations

import math
from fractions import Fraction


def fewer_microbatches(num_microbatches: int, max_ratio: float) -> int:
    """How many micro-batches a plain step needs to see as many gradients a parameter: ceil(M (1 - cap)), at least 1.

    >>> fewer_microbatches(10, 0.7)  # 10 * (1 - 0.7) is above 3 in floats
    3
    """
    return max(1, math.ceil(num_microbatches * (1 - Fraction(str(max_ratio)))))
