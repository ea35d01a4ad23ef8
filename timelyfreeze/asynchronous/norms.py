"""The whole model's gradient norm, without waiting for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch


class DelayedNorm:
    """The norm of the gradients of all stages, ``lag`` updates late.

    When a stage makes its update j, every other has made its update j - lag: at most ``num_stages`` micro-batches are
    between the first stage's forward and its backward. So nobody waits, and the same norm is used in every run. A
    stage's first ``lag`` updates go by its own norm.

    Args:
        num_stages: that update.
        lag: see ``lag_of``.

    >>> norms = DelayedNorm(2, lag=1)
    >>> [float(norms.exchange(stage, torch.tensor(9.0))) for stage in (0, 1)]
    [3.0, 3.0]
    >>> round(float(norms.exchange(1, torch.tensor(1.0))) ** 2, 3)
    18.0
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
            return torch.stack([self._square(other, wanted) for other in range(self._num_stages)]).sum().sqrt()

    def state_dict(self) -> dict[str, Any]:
        """When drained, the squares that the next updates go by, a list a place."""
        return {"counts": list(self._counts), "squares": [[float(one) for one in own] for own in self._squares]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.reset()
        self._counts = list(state["counts"])
        for own, saved in zip(self._squares, state["squares"], strict=True):
            own.extend(torch.tensor(one, dtype=torch.float64) for one in saved)

    def _square(self, place: int, index: int) -> torch.Tensor:
        squares = self._squares[place]
        return squares[index - self._counts[place] + len(squares)]


def lag_of(num_stages: int, accumulation: int) -> int:
    """After how many updates every stage's norm is known to all; one more than the drift, for the last, partial window.

    >>> lag_of(2, 1), lag_of(4, 4)
    (2, 2)
    """
    return -(-(num_stages - 1) // accumulation) + 1
