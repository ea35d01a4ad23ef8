"""Ctrl-C that waits for the step's end, so that what is saved is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from timelyfreeze.cli.errors import StoppedError


class StopRequest:
    """While entered, SIGINT and SIGTERM are noted down; a second one raises KeyboardInterrupt where it arrives.

    A step ends within its own time, and the weights are then whole; between the halves of an optimizer step they are
    not. Outside the main thread, where Python delivers no signals, entering does nothing.

    >>> with StopRequest() as stop:
    ...     stop.check()
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        self._on_request = on_request
        self._signal_number: int | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    @property
    def requested(self) -> bool:
        """Whether an end was asked for."""
        return self._signal_number is not None

    def check(self) -> None:
        """Raise ``StoppedError`` if an end was asked for."""
        if self._signal_number is not None:
            raise StoppedError("stopped by a signal", self._signal_number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self._signal_number = number
        self._on_request()
