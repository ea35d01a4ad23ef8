"""Acceleration that is taken back and put on again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch import nn

from timelyfreeze.acceleration.apply import Acceleration, accelerate


class AccelerationSwitch:
    """Accelerates one model's modules, and undoes that.

    Args:
        model: its modules may be replaced while the switch is on; ``on`` again takes in the new ones.
        enabled: False: the switch does nothing.

    >>> model = nn.Sequential(nn.SiLU())
    >>> switch = AccelerationSwitch(model, enabled=True)
    >>> switch.on()
    >>> with switch.paused():
    ...     type(model[0]) is nn.SiLU
    True
    >>> type(model[0]) is nn.SiLU, switch.off(), type(model[0]) is nn.SiLU
    (False, None, True)
    """

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self._model = model
        self._enabled = enabled
        self._done: list[Acceleration] = []
        self._finalizer = weakref.finalize(self, _undo, self._done)  # a pipeline may be dropped without being closed

    def on(self) -> None:
        """Swap the forwards."""
        self.off()  # modules that were replaced since are let go
        if self._enabled:
            self._done.append(accelerate(self._model))

    def off(self) -> None:
        """Give the modules their own forwards back; one whose class the user has changed since stays as it is."""
        _undo(self._done)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While it lasts the switch is off."""
        self.off()
        try:
            yield
        finally:
            self.on()


def _undo(done: list[Acceleration]) -> None:
    while done:
        with suppress(RuntimeError):
            done.pop().undo()
