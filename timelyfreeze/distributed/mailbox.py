"""Messages between ranks through a ``torch.distributed`` store, and calls to it that do not wait for ever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

T = TypeVar("T")

# What a store raises when it cannot be reached or does not answer: its own errors are RuntimeErrors.
STORE_ERRORS = (RuntimeError, OSError, TimeoutError)
# A wait that ends without a message logs two warnings on stderr, so it is long; poll(2) takes at most 24 days.
WAIT_S = 7 * 24 * 3600.0
POLL_S = 0.2


def own_connection(store: Store) -> Store:
    """A connection to the same store: a call on it does not stand behind one that waits on another.

    Stores that cannot be cloned are given back as they are.
    """
    with suppress(AttributeError, NotImplementedError):
        return cast(Store, cast(Any, store).clone())
    return store


class QueueMailbox:
    """One queue a rank in the store; whoever receives is woken by the store."""

    def __init__(self, prefix: str, rank: int) -> None:
        self._prefix = prefix
        self._rank = rank

    def post(self, store: Store, to: int, message: str) -> None:
        """Send a message to a rank, which may be this one."""
        store.queue_push(f"{self._prefix}mail/{to}", message)

    def receive(self, store: Store, closed: threading.Event) -> str | None:
        """The next message to this rank; None once ``closed`` is set and a last message has come."""
        key = f"{self._prefix}mail/{self._rank}"
        while not closed.is_set():
            try:
                store.wait([key], timedelta(seconds=WAIT_S))
                return store.queue_pop(key, False).decode()
            except dist.DistNetworkError:
                raise
            except dist.DistStoreError:  # no message came in all this time
                continue
        return None


class PollingMailbox:
    """The same for other stores (``HashStore``, ``FileStore``, TCPStore without libuv): one key a message, looked for.

    Every sender counts its own messages: one that is stopped while it sends holds up nobody else's.
    """

    def __init__(self, prefix: str, rank: int, num_ranks: int) -> None:
        self._prefix = prefix
        self._rank = rank
        self._sent = [0] * num_ranks
        self._received = [0] * num_ranks
        self._lock = threading.Lock()

    def post(self, store: Store, to: int, message: str) -> None:
        """Send a message to a rank, which may be this one."""
        with self._lock:
            store.set(f"{self._prefix}mail/{to}/{self._rank}/{self._sent[to]}", message)
            self._sent[to] += 1

    def receive(self, store: Store, closed: threading.Event) -> str | None:
        """The next message to this rank; None soon after ``closed`` is set."""
        while not closed.is_set():
            for sender, count in enumerate(self._received):
                key = f"{self._prefix}mail/{self._rank}/{sender}/{count}"
                if store.check([key]):
                    self._received[sender] += 1
                    message = store.get(key).decode()
                    store.delete_key(key)
                    return message
            closed.wait(POLL_S)
        return None


def create_mailbox(store: Store, prefix: str, rank: int, num_ranks: int) -> QueueMailbox | PollingMailbox:
    """The kind of mailbox that the store can hold; the same on all ranks.

    Only TCPStore's queues will do: HashStore wakes one of those who wait, who may wait for another queue.
    """
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if isinstance(base, TCPStore):
        with suppress(NotImplementedError):
            store.queue_len(f"{prefix}mail/{rank}")
            return QueueMailbox(prefix, rank)
    return PollingMailbox(prefix, rank, num_ranks)


class _Call:
    """A call on its way to the store, and what came of it."""

    def __init__(self, function: Callable[[Store], object]) -> None:
        self.function = function
        self.done = threading.Event()
        self.is_given_up = False
        self.value: object = None
        self.error: BaseException | None = None

    def run(self, store: Store) -> None:
        if not self.is_given_up:
            try:
                self.value = self.function(store)
            except BaseException as error:  # handed to whoever waits
                self.error = error
        self.done.set()


class StoreCalls:
    """Calls to a store from any thread, with a limit on how long the caller waits.

    The store's own calls know no limit while its server is stopped (SIGSTOP, a hung machine), and Ctrl-C does not
    interrupt them; so a daemon thread makes them, one after the other, on a connection of its own.

    >>> calls = StoreCalls(dist.HashStore())
    >>> calls(lambda store: store.add("count", 3), timeout_s=10)
    3
    >>> calls.close(timeout_s=10)
    """

    def __init__(self, store: Store) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # re-entered where the collector closes while this thread calls
        self._is_closed = False
        self._thread = threading.Thread(
            target=_make_calls, args=(store, self._calls), name="timelyfreeze-store", daemon=True
        )
        self._thread.start()

    def __call__(self, function: Callable[[Store], T], timeout_s: float) -> T:
        """What ``function`` gives for the store.

        Raises:
            TimeoutError: there was no answer in time; the call may still happen, if it has begun.
            RuntimeError: closed, or the store's own error.
        """
        call = _Call(function)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the connection to the store is closed")
            self._calls.put(call)
        if not call.done.wait(timeout_s):
            call.is_given_up = True
            raise TimeoutError(f"the store did not answer within {timeout_s:g} s")
        if call.error is not None:
            raise call.error
        return cast(T, call.value)

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller runs inside a call; it must not wait for another."""
        return threading.current_thread() is self._thread

    def close(self, timeout_s: float) -> None:
        """End the thread after the calls before this; wait for it so long at the most. May be called again."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._calls.put(None)
        if not self.is_this_thread:
            self._thread.join(timeout_s)


def _make_calls(store: Store, calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.run(store)
        del call  # what it holds may live no longer than the call
