"""The whole model's gradient norm, without waiting for it."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from timelyfreeze import _C

NUM_SHARES = 32
"""Updates over which a stage's share of the model's norm is taken."""


class DelayedNorm:
    """The norm of the gradients of all stages, by a stage's own: the model's is as many times as large as it was in the
    last updates that are known of all stages.

    When a stage makes its update j, every other has made its update j - ``lag``: at most ``num_stages`` micro-batches
    are between the first stage's forward and its backward. So nobody waits, and the same norm is used in every run. A
    stage's first ``lag`` updates go by equal shares.

    A batch makes the gradients of all stages large or small together. The late norm itself would let a single large
    gradient through, which clipping is there for, and make the updates after it small instead.

    Args:
        num_stages: that update.
        lag: see ``lag_of``.

    >>> norms = DelayedNorm(2, lag=1)
    >>> [round(norms.exchange(place, square) ** 2) for place, square in ((0, 9.0), (1, 27.0), (0, 1.0))]
    [18, 54, 4]
    """

    def __init__(self, num_stages: int, lag: int) -> None:
        self.lag = lag
        self._num_stages = num_stages
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Begin anew, as after an error, which leaves the stages at different updates."""
        capacity = capacity_of(self.lag)
        self._squares: list[deque[float]] = [deque(maxlen=capacity) for _ in range(self._num_stages)]
        self._counts = [0] * self._num_stages

    def exchange(self, place: int, square: float) -> float:
        """Tell the square of a stage's own norm in this update; get the model's norm to go by.

        Args:
            place: of the stage among those that update.
        """
        with self._lock:
            self._squares[place].append(square)
            self._counts[place] += 1
            index = self._counts[place] - 1
            return estimate(square, place, range(self._num_stages), index - self.lag, self._square)

    def known(self, place: int) -> tuple[int, list[float]]:
        """How many updates a stage has told of, and the squares of the last of them."""
        with self._lock:
            return self._counts[place], list(self._squares[place])

    def restore(self, place: int, count: int, squares: Sequence[float]) -> None:
        """Go on where ``known`` was taken."""
        with self._lock:
            self._counts[place] = count
            self._squares[place].clear()
            self._squares[place].extend(squares)

    def _square(self, place: int, index: int) -> float:
        squares = self._squares[place]
        return squares[index - self._counts[place] + len(squares)]


class RemoteNorm:
    """The same where each stage is a process: the squares of the others come with the micro-batches.

    Args:
        num_stages: all of them.
        lag: see ``lag_of``.

    Attributes:
        board: what is known of them; see csrc/runtime/norm_board.h.
        updating: the stages that update.

    >>> norms = RemoteNorm(num_stages=2, lag=0)
    >>> norms.updating = [0, 1]
    >>> norms.board.add(1, 16.0)
    >>> norms.exchange(0, 9.0)
    5.0
    """

    def __init__(self, num_stages: int, lag: int) -> None:
        self.board = _C.NormBoard(num_stages, capacity_of(lag))
        self.lag = lag
        self.updating: list[int] = []
        self._num_stages = num_stages

    def reset(self) -> None:
        """Begin anew, on all ranks."""
        for stage in range(self._num_stages):
            self.board.set(stage, 0, [])

    def known(self, place: int) -> tuple[int, list[float]]:
        """As ``DelayedNorm`` has it; the place is the number of the stage, here and below."""
        return self.board.count(place), self.board.squares(place)

    def restore(self, place: int, count: int, squares: Sequence[float]) -> None:
        """As ``DelayedNorm`` has it."""
        self.board.set(place, count, squares)

    def exchange(self, place: int, square: float) -> float:
        """As ``DelayedNorm`` has it."""
        self.board.add(place, square)
        index = self.board.count(place) - 1
        return estimate(square, place, self.updating, index - self.lag, self.board.at)


def estimate(square: float, place: int, places: Sequence[int], last: int, at: Callable[[int, int], float]) -> float:
    """The model's norm by the square of one stage's, and the shares up to update ``last``.

    Args:
        at: the square of a place's update.

    >>> estimate(4.0, 0, range(2), last=0, at=lambda place, index: [1.0, 3.0][place])
    4.0
    """
    if last < 0:
        return math.sqrt(square * len(places))
    updates = range(max(0, last + 1 - NUM_SHARES), last + 1)
    own = math.fsum(at(place, index) for index in updates)
    total = math.fsum(at(other, index) for other in places for index in updates)
    # Own gradients were all left out, or 0: what the others had is the best that is known.
    return math.sqrt(square * total / own if own > 0.0 else square + total / len(updates))


def capacity_of(lag: int) -> int:
    """How many squares of a stage are kept: stages are at most ``lag`` updates apart, and look ``lag`` back, and over
    the shares from there.

    >>> capacity_of(2)
    38
    """
    return NUM_SHARES + 2 * lag + 2


def lag_of(num_stages: int, accumulation: int) -> int:
    """After how many updates every stage's norm is known to all; one more than the drift, for the last, partial window.

    >>> lag_of(2, 1), lag_of(4, 4)
    (2, 2)
    """
    return -(-(num_stages - 1) // accumulation) + 1
