"""Where masks get their randomness from: evenly spread points and keyed generators. No global state.

A point is a function of (seed, step, stage, micro-batch) alone, uniform in [0, 1) over seeds. Over steps, and over the
micro-batches of a step, points of one seed follow a Kronecker sequence: multiples of an irrational number that
fractions approximate badly. Then every interval of length p gets p n points out of n, give or take two, where
independent draws stray by sqrt(p n): at p = 0.05 and n = 200 that is 10 ± 3, too much to promise that nothing starves.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

_WORD = 1 << 64

# (sign * offset + sqrt(d)) / q with continued fractions of small periodic terms. Roots of different square-free numbers
# are independent over the rationals, so that the points of different stages never lock into step with each other.
_QUADRATICS = (
    (-1, 5, 2),  # [1 ...], the golden ratio: the hardest of all to approximate
    (-1, 2, 1),  # [2 ...]
    (-1, 3, 1),  # [1, 2 ...]
    (-3, 13, 2),  # [3 ...]
    (-3, 17, 2),  # [1, 1, 3 ...]
    (-2, 10, 2),  # [1, 1, 2 ...]
    (-3, 21, 2),  # [1, 3 ...]
    (-3, 15, 2),  # [2, 3 ...]
    (-2, 6, 1),  # [2, 4 ...]
    (-2, 7, 1),  # [1, 1, 1, 4 ...]
)


def _fraction(offset: int, radicand: int, divisor: int) -> int:
    return (offset * _WORD + isqrt(radicand << 128)) // divisor % _WORD


_STRIDES = tuple(_fraction(*terms) for terms in _QUADRATICS)

# Streams that belong to no stage count down from the largest stage number.
RAMP = (1 << 32) - 1


def keyed_generator(seed: int, stream: int, index: int) -> np.random.Generator:
    """A Philox generator (Salmon et al., SC 2011) that depends on its key only: the same on every rank.

    >>> bool(keyed_generator(7, 0, 3).random() == keyed_generator(7, 0, 3).random())
    True
    """
    # Draws advance the low words of the counter; the high ones tell streams and indices apart.
    counter = (stream << 192) | (index % _WORD << 128)
    return np.random.Generator(np.random.Philox(key=seed % _WORD, counter=counter))


class PointSequence:
    """The points of one stage (or of another stream) for all steps.

    >>> points = PointSequence(seed=0, stream=2)
    >>> bool((points.at(step=5, num=4)[:2] == points.at(step=5, num=2)).all())
    True
    """

    def __init__(self, seed: int, stream: int) -> None:
        self._start = int(keyed_generator(seed, stream, _WORD - 1).bit_generator.random_raw())
        self._step_stride = _STRIDES[stream % len(_STRIDES)]
        self._microbatch_stride = _STRIDES[(stream + 1) % len(_STRIDES)]

    def at(self, step: int, num: int) -> NDArray[np.float64]:
        """The points of micro-batches 0..num-1 in a step, float64 in [0, 1) ``[num]``."""
        # Whole numbers modulo 2^64 repeat exactly on every machine; float64 would lose digits as steps grow.
        first = np.uint64((self._start + step * self._step_stride) % _WORD)
        words = first + np.arange(num, dtype=np.uint64) * np.uint64(self._microbatch_stride)
        return np.asarray((words >> np.uint64(11)) * 2.0**-53)
