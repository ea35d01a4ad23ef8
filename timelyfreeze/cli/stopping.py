"""Ctrl-C that waits for the step's end, so that what is saved is whole."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType

from timelyfreeze.cli.errors import StoppedError

_ECHO_S = 1.0  # torchrun's own Ctrl-C follows the terminal's within milliseconds; a person's second one takes longer


class StopRequest:
    """While entered, SIGINT and SIGTERM are noted down; a second one raises KeyboardInterrupt where it arrives.

    A step ends within its own time, and the weights are then whole; between the halves of an optimizer step they are
    not. Outside the main thread, where Python delivers no signals, entering does nothing.

    Where ranks are processes, a signal reaches them at different moments: ``requested`` is what they have agreed on.
    torchrun passes a Ctrl-C on that the terminal has sent to all processes already, so one that comes close upon the
    first is the same.

    Args:
        on_request: called at the first signal.
        is_shared: whether several processes are to stop together, by ``agree``.

    >>> with StopRequest() as stop:
    ...     stop.check()
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None, *, is_shared: bool = False) -> None:
        self._on_request = on_request
        self._is_shared = is_shared
        self._signal_number: int | None = None
        self._began_s = 0.0
        self.own_signal: int | None = None
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

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While processes wait for each other to make connections: a signal ends this one at once.

        They cannot agree then, and where one of them is gone, the others would wait long. In one process it is without
        effect.
        """
        if not (self._is_shared and self._previous):
            yield
            return
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)
        yield
        for number in self._previous:
            signal.signal(number, self._handle)

    @property
    def requested(self) -> bool:
        """Whether an end was asked for."""
        return self._signal_number is not None

    def agree(self, signals: Sequence[int | None]) -> None:
        """Take in the ``own_signal`` of every process; all of them do so with the same."""
        self._signal_number = next((number for number in signals if number is not None), None)

    def check(self) -> None:
        """Raise ``StoppedError`` if an end was asked for."""
        if self._signal_number is not None:
            raise StoppedError("stopped by a signal", self._signal_number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.own_signal is not None:
            if self._is_shared and now_s - self._began_s < _ECHO_S:
                return
            raise KeyboardInterrupt
        self.own_signal, self._began_s = number, now_s
        if not self._is_shared:
            self._signal_number = number
        self._on_request()
