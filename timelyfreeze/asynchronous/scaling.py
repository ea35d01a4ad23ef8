"""The loss scale of a half-precision run, without waiting for any stage to say whether its gradients overflowed."""

from __future__ import annotations

import threading
from typing import Any

import torch


class DelayedLossScale:
    """The rule of ``torch.amp.GradScaler``, ``lag`` updates late.

    All stages make their update j of the same micro-batches, and one scale holds for these. The last stage asks for it
    when the first of their losses goes backward; by then every stage has made its update j - lag (see ``DelayedNorm``)
    and said whether its gradients were finite. So nobody waits, and every run has the same scales. Updates whose scale
    was larger than the present one cannot lower it again.

    Args:
        scaler: gives the first scale, and how it grows and backs off; ``settle`` tells it the scale.
        num_places: stages that update.
        lag: see ``lag_of``.

    >>> scale = DelayedLossScale(torch.amp.GradScaler("cpu", init_scale=8.0), num_places=1, lag=1)
    >>> scale.begin_update(), scale.end_update(0, finite=False), scale.begin_update()
    (8.0, False, 4.0)
    """

    def __init__(self, scaler: torch.amp.GradScaler, num_places: int, lag: int) -> None:
        self._scaler = scaler
        self._num_places = num_places
        self._lag = lag
        self._lock = threading.Lock()
        self.scale = float(scaler.get_scale())
        self._num_clean = 0  # updates in a row without an overflow
        self.reset()

    def reset(self) -> None:
        """Forget what is under way, as after an error; the scale stays."""
        self._scales: list[float] = []  # of the updates that have begun and were not looked at
        self._finite: list[list[bool]] = [[] for _ in range(self._num_places)]  # of those, a stage

    def begin_update(self) -> float:
        """The scale of the next update's losses."""
        with self._lock:
            while len(self._scales) >= self._lag:
                self._look_at_oldest()
            self._scales.append(self.scale)
            return self.scale

    def end_update(self, place: int, *, finite: bool) -> bool:
        """A stage tells of its gradients; returns whether an overflow would be a fault: no smaller scale mends it."""
        with self._lock:
            finites = self._finite[place]
            finites.append(finite)
            return not finite and self._scales[len(finites) - 1] <= 1.0

    def settle(self) -> None:
        """All stages have made all updates."""
        with self._lock:
            while self._scales:
                self._look_at_oldest()
        self._scaler.scale(torch.ones(()))  # a scaler that was never used takes no new scale
        self._scaler.update(self.scale)

    def state_dict(self) -> dict[str, Any]:
        """When settled, all that the next scales depend on.

        >>> DelayedLossScale(torch.amp.GradScaler("cpu", init_scale=8.0), num_places=1, lag=1).state_dict()
        {'scale': 8.0, 'num_clean': 0}
        """
        return {"scale": self.scale, "num_clean": self._num_clean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.reset()
        self.scale, self._num_clean = float(state["scale"]), int(state["num_clean"])
        self.settle()

    def _look_at_oldest(self) -> None:
        scale = self._scales.pop(0)
        finite = [finites.pop(0) for finites in self._finite]
        if not all(finite):
            if scale <= self.scale:
                self.scale = scale * self._scaler.get_backoff_factor()
            self._num_clean = 0
            return
        self._num_clean += 1
        if self._num_clean == self._scaler.get_growth_interval():
            self.scale *= self._scaler.get_growth_factor()
            self._num_clean = 0
