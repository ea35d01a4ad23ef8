"""Counts the bytes that autograd keeps between forward and backward."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SavedBytes:
    """Bytes of the storages that saved tensors hold now and at the most; parameters are not counted.

    Attributes:
        live_bytes: held at this moment.
        peak_bytes: the most that was held at once.
        total_bytes: all that was ever saved, a storage counted once while it is held.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.total_bytes = 0
        self._holders: dict[int, int] = {}
        self._lock = threading.Lock()

    def _hold(self, storage: int, num_bytes: int) -> None:
        with self._lock:
            self._holders[storage] = self._holders.get(storage, 0) + 1
            if self._holders[storage] == 1:
                self.total_bytes += num_bytes
                self.live_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, storage: int, num_bytes: int) -> None:
        with self._lock:
            self._holders[storage] -= 1
            if not self._holders[storage]:
                del self._holders[storage]
                self.live_bytes -= num_bytes


class _Saved:
    """A saved tensor; its end is the end of the bytes it counts for."""

    __slots__ = ("_counter", "_num_bytes", "_storage", "tensor")

    def __init__(self, tensor: torch.Tensor, counter: SavedBytes) -> None:
        storage = tensor.untyped_storage()
        self.tensor = tensor
        self._counter = counter
        self._storage = storage.data_ptr()
        self._num_bytes = storage.nbytes()
        counter._hold(self._storage, self._num_bytes)

    def __del__(self) -> None:
        self._counter._release(self._storage, self._num_bytes)


@contextmanager
def count_saved_bytes(parameters: Iterable[torch.Tensor] = ()) -> Iterator[SavedBytes]:
    """Count what is saved for backward by all that runs inside, on the pipeline's threads too.

    Args:
        parameters: tensors whose storages are not counted (they are there anyway).

    >>> w = torch.ones(4, requires_grad=True)
    >>> with count_saved_bytes([w]) as saved:
    ...     loss = (torch.ones(4) * w).sum()
    >>> saved.peak_bytes
    16
    """
    ignored = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    counter = SavedBytes()

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.untyped_storage().data_ptr() in ignored:
            return tensor
        return _Saved(tensor, counter)

    def unpack(packed: Any) -> torch.Tensor:
        return packed.tensor if isinstance(packed, _Saved) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield counter
