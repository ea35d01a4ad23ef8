"""The whole model's gradient norm, without waiting for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from timelyfreeze import _C


class DelayedNorm:
    """The norm of the gradients of all stages: a stage's own of this update, the others' ``lag`` updates late.

    When a stage makes its update j, every other has made its update j - lag: at most ``num_stages`` micro-batches are
    between the first stage's forward and its backward. So nobody waits, and the same norm is used in every run. A
    stage's first ``lag`` updates go by its own norm.

    The own norm is of this update, because what clipping is for, a single large gradient, would otherwise be let
    through and the updates after it made small instead. Main job, 2 stages, 200 updates of 2 micro-batches: validation
    loss 2.37, all norms late 2.47, no clipping 2.45 (with a flush 2.25 and, not clipped, 2.29).

    Args:
        num_stages: that update.
        lag: see ``lag_of``.

    >>> norms = DelayedNorm(2, lag=1)
    >>> [float(norms.exchange(stage, torch.tensor(9.0))) for stage in (0, 1)]
    [3.0, 3.0]
    >>> round(float(norms.exchange(1, torch.tensor(1.0))) ** 2, 3)
    10.0
    """

    def __init__(self, num_stages: int, lag: int) -> None:
        self.lag = lag
        self._num_stages = num_stages
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Begin anew, as after an error, which leaves the stages at different updates."""
        # Stages are at most `lag` updates apart, and the slowest looks `lag` back.
        self._squares: list[deque[torch.Tensor]] = [deque(maxlen=2 * self.lag + 2) for _ in range(self._num_stages)]
        self._counts = [0] * self._num_stages

    def exchange(self, place: int, square: torch.Tensor) -> torch.Tensor:
        """Tell the square of a stage's own norm in this update; get the norm to go by.

        Args:
            place: of the stage among those that update.
            square: 0-dimensional.
        """
        with self._lock:
            self._squares[place].append(square)
            wanted = self._counts[place] - self.lag
            self._counts[place] += 1
            if wanted < 0:
                return square.sqrt()
            others = [self._square(other, wanted) for other in range(self._num_stages) if other != place]
            return torch.stack([square, *others]).sum().sqrt()

    def known(self, place: int) -> tuple[int, list[float]]:
        """How many updates a stage has told of, and the squares of the last of them."""
        with self._lock:
            return self._counts[place], [float(square) for square in self._squares[place]]

    def restore(self, place: int, count: int, squares: Sequence[float]) -> None:
        """Go on where ``known`` was taken."""
        with self._lock:
            self._counts[place] = count
            self._squares[place].clear()
            self._squares[place].extend(torch.tensor(square, dtype=torch.float64) for square in squares)

    def _square(self, place: int, index: int) -> torch.Tensor:
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
    >>> float(norms.exchange(0, torch.tensor(9.0, dtype=torch.float64)))
    5.0
    """

    def __init__(self, num_stages: int, lag: int) -> None:
        self.board = _C.NormBoard(num_stages)
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

    def exchange(self, place: int, square: torch.Tensor) -> torch.Tensor:
        """As ``DelayedNorm`` has it."""
        wanted = self.board.count(place) - self.lag
        self.board.add(place, float(square))
        if wanted < 0:
            return square.sqrt()
        others = [self.board.at(stage, wanted) for stage in self.updating if stage != place]
        return torch.tensor([float(square), *others], dtype=square.dtype).sum().sqrt()


def lag_of(num_stages: int, accumulation: int) -> int:
    """After how many updates every stage's norm is known to all; one more than the drift, for the last, partial window.

    >>> lag_of(2, 1), lag_of(4, 4)
    (2, 2)
    """
    return -(-(num_stages - 1) // accumulation) + 1
