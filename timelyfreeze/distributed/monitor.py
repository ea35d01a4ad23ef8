"""Every rank learns quickly which rank failed and why; a rank that cannot speak any more is found by asking it."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING

from timelyfreeze.distributed.failure import MAX_TEXT_BYTES, Failure, cut_middle
from timelyfreeze.distributed.mailbox import (
    STORE_ERRORS,
    PollingMailbox,
    QueueMailbox,
    StoreCalls,
    create_mailbox,
    own_connection,
)
from timelyfreeze.errors import problem

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# A round trip takes well below a millisecond; a store that needs longer than this is as good as gone.
ANSWER_S = 10.0
END_S = 2.0
_CLOSE = json.dumps({"what": "close"})
_NO_FAILURE = "none"


class _Ends:
    """What the monitor's thread shares with whoever ends it, apart from the monitor: that may be collected first."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.store_lost = threading.Event()
        self.epochs: SimpleQueue[bool] = SimpleQueue()  # after a loss: True a new epoch, False the end
        self.process_id = os.getpid()


class FailureMonitor:
    """Agrees with the monitors of all other ranks on the first failure of an epoch, through a store.

    A daemon thread waits for messages to this rank on a connection of its own, so that it learns of a failure while
    the other threads compute. A second one makes this rank's calls to the store, because those cannot be interrupted.

    Args:
        store: reachable from all ranks. A ``TCPStore`` (with libuv, as by default) wakes the thread; others are
            asked every 0.2 s.
        rank, num_ranks: of this process.
        name: the same on all ranks, and used once in the life of the store.
        on_failure: called from the monitor's thread, once an epoch, when another rank's report came first or the
            store went away. Must not wait for a thread that calls ``next_epoch``.
        status: what this rank is doing just now, in a line; called from the monitor's thread, must not block.
        store_rank: the rank whose process hosts the store; None where no rank does, as under torchrun.

    The last rank that needs the store has to be its host: ranks that are not closed when it goes report it as lost.
    In a forked child a monitor is inert: nothing is sent and closing does nothing.

    >>> import torch.distributed
    >>> store = torch.distributed.HashStore()
    >>> with FailureMonitor(store, 0, 1, "example", on_failure=print, status=lambda: "idle") as monitor:
    ...     monitor.report(Failure("stage", rank=0, text="RuntimeError: boom")).reporter
    0
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        name: str,
        *,
        on_failure: Callable[[Failure], None],
        status: Callable[[], str],
        store_rank: int | None = None,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(problem("rank", expected=f"0 to {num_ranks - 1}", got=rank))
        self._rank = rank
        self._num_ranks = num_ranks
        self._prefix = f"timelyfreeze/{name}/"
        self._on_failure = on_failure
        self._status = status
        self._store_rank = -1 if store_rank is None else store_rank

        self._changed = threading.Condition()  # guards what follows
        self._epoch = 0
        self._failure: Failure | None = None
        self._is_agreed = False  # the failure is the one in the store, or there is no store any more
        self._is_told = False  # on_failure was called
        self._met_epoch = -1  # the last one that all ranks have come to
        self._past_epochs: list[int] = []  # whose record may still be in the store; rank 0 alone
        self._probes: dict[int, dict[int, str | None]] = {}
        self._num_probes = 0
        self._telling = threading.RLock()  # held while on_failure runs

        listening = own_connection(store)
        self._mailbox = create_mailbox(listening, self._prefix, rank, num_ranks)
        self._calls = StoreCalls(own_connection(store))
        self._ends = _Ends()
        listener = threading.Thread(
            target=_listen,
            args=(weakref.ref(self), listening, self._mailbox, self._ends),
            name="timelyfreeze-monitor",
            daemon=True,
        )
        # It holds the store: where this process hosts it, it goes after the threads that wait for it.
        # At exit too: a thread that comes back from the store while the interpreter ends would abort the process.
        self._close = weakref.finalize(self, _end, self._ends, self._calls, self._mailbox, rank, listener, store)
        listener.start()

    @property
    def failure(self) -> Failure | None:
        """The failure of this epoch, as far as it is known here."""
        with self._changed:
            return self._failure

    def report(self, failure: Failure) -> Failure:
        """Tell all ranks of a failure; the first report of an epoch holds for all. Any thread may call.

        Returns:
            The failure that holds. Where the store cannot be reached (or this monitor is closed), the one that is known
            here: the given one, if none was.
        """
        failure = replace(failure, reporter=self._rank)
        with self._changed:
            epoch = self._epoch
            if self._failure is not None and self._is_agreed:
                return self._failure
        if self._is_usable:
            with suppress(*STORE_ERRORS):
                return self._learn(epoch, self._calls(partial(self._settle, epoch, failure), ANSWER_S))
        with self._changed:
            if epoch != self._epoch:
                return failure
            self._failure = self._failure or failure
            self._changed.notify_all()
            return self._failure

    def meet(self, timeout_s: float) -> Failure | None:
        """Wait until every rank has come here in this epoch; where there is a failure instead, that.

        Raises:
            TimeoutError: some rank did not come.
        """
        with self._changed:
            epoch = self._epoch
        if self._is_usable:
            with suppress(*STORE_ERRORS):
                self._calls(partial(self._arrive, epoch), min(timeout_s, ANSWER_S))
        with self._changed:
            if not self._changed.wait_for(lambda: self._failure or self._met_epoch == epoch, timeout_s):
                raise TimeoutError("not every rank has come here")
            return self._failure

    def look(self) -> Failure | None:
        """The failure of this epoch, asked from the store now: one round trip, 10 s at the most."""
        with self._changed:
            epoch, known = self._epoch, self._failure
            if self._is_agreed:
                return known
        found = None
        if self._is_usable:
            with suppress(*STORE_ERRORS):
                found = self._calls(partial(self._find, epoch), ANSWER_S)
        return known if found is None else self._learn(epoch, found)

    def probe(self, timeout_s: float) -> dict[int, str | None]:
        """What every other rank is doing, by its own word; None for a rank that did not answer within ``timeout_s``."""
        deadline_s = monotonic() + timeout_s
        answers: dict[int, str | None] = dict.fromkeys(rank for rank in range(self._num_ranks) if rank != self._rank)
        if not self._is_usable:
            return answers
        with self._changed:
            self._num_probes += 1
            number = self._num_probes
            self._probes[number] = answers
        try:
            message = json.dumps({"what": "ping", "id": number, "from": self._rank})
            self._calls(partial(self._post_to, list(answers), message), timeout_s)
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._is_usable or None not in answers.values(), deadline_s - monotonic()
                )
        except STORE_ERRORS:
            pass  # nobody can be asked
        finally:
            with self._changed:
                del self._probes[number]
        return answers

    def next_epoch(self, epoch: int) -> None:
        """Go on after a failure that was handled; reports of earlier epochs no longer count.

        A report that another rank made in the new epoch already is found. ``on_failure`` is not called for an earlier
        epoch once this has returned. Where the store is gone the new epoch begins with that failure.

        Raises:
            ValueError: the epoch is not a later one.
        """
        with self._telling, self._changed:
            if epoch <= self._epoch:
                raise ValueError(problem("epoch", expected=f"above {self._epoch}, the one so far", got=epoch))
            # The record of the epoch that ends here is kept for ranks that have yet to read it.
            done, self._past_epochs = self._past_epochs, [self._epoch]
            self._epoch, self._failure, self._is_agreed, self._is_told = epoch, None, False, False
        if self._ends.store_lost.is_set():
            self._ends.epochs.put(True)
            return
        if self._is_usable:
            with suppress(*STORE_ERRORS):
                self._calls(partial(self._enter, epoch, done), ANSWER_S)

    def close(self) -> None:
        """End the threads, within a moment also while they wait. May be called again."""
        self._close()

    def __enter__(self) -> FailureMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The rest runs with a store at hand: in the thread that makes the calls, or in the one that listens.

    @property
    def _is_usable(self) -> bool:
        ends = self._ends
        return ends.process_id == os.getpid() and not ends.closed.is_set() and not ends.store_lost.is_set()

    def _settle(self, epoch: int, failure: Failure, store: Store) -> Failure:
        """Record the failure unless there is one, and wake all who have to hear of the one that holds."""
        winner = _read(store.compare_set(self._key(epoch), "", failure.to_json()).decode())
        # A rank that came second wakes the others too: the first may have been killed before it could.
        ranks = [rank for rank in range(self._num_ranks) if rank != winner.reporter]
        with suppress(*STORE_ERRORS):
            self._post_to(ranks, _failed(epoch), store)
        return winner

    def _find(self, epoch: int, store: Store) -> Failure | None:
        """The failure in the store. One that this thread did not know is also left for the monitor's thread to tell."""
        # Unlike get, this does not wait for a key that is not there: it gives back what was expected.
        text = store.compare_set(self._key(epoch), _NO_FAILURE, _NO_FAILURE).decode()
        if text == _NO_FAILURE:
            return None
        found = _read(text)
        if self._calls.is_this_thread and found.reporter != self._rank:
            self._mailbox.post(store, self._rank, _failed(epoch))
        return found

    def _enter(self, epoch: int, done: list[int], store: Store) -> None:
        if self._rank == 0:
            for old in done:
                store.delete_key(self._key(old))
                store.delete_key(self._here(old))
        # Other ranks may have been here, and failed, before this one; their message was dropped then.
        self._mailbox.post(store, self._rank, _failed(epoch))

    def _arrive(self, epoch: int, store: Store) -> None:
        if store.add(self._here(epoch), 1) == self._num_ranks:
            self._post_to(list(range(self._num_ranks)), json.dumps({"what": "met", "epoch": epoch}), store)

    def _post_to(self, ranks: list[int], message: str, store: Store) -> None:
        for rank in ranks:
            self._mailbox.post(store, rank, message)

    def _key(self, epoch: int) -> str:
        return f"{self._prefix}failure/{epoch}"

    def _here(self, epoch: int) -> str:
        return f"{self._prefix}here/{epoch}"

    def _learn(self, epoch: int, failure: Failure) -> Failure:
        with self._changed:
            if epoch == self._epoch:
                self._failure, self._is_agreed = failure, True
                self._changed.notify_all()
            return failure

    def _tell(self, epoch: int, failure: Failure) -> None:
        """Call ``on_failure`` if this epoch has not seen it called."""
        with self._telling:
            with self._changed:
                if epoch != self._epoch or self._is_told or self._ends.closed.is_set():
                    return
                self._is_told = True
            try:
                self._on_failure(failure)
            except Exception as error:  # shown as any thread's; the monitor itself goes on
                thread = threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))

    def _handle(self, message: str, store: Store) -> None:
        """What the monitor's thread does about a message."""
        values = json.loads(message)
        if values["what"] == "failure":
            with self._changed:
                epoch = self._epoch
            found = self._find(epoch, store) if values["epoch"] == epoch else None
            if found is not None:
                self._learn(epoch, found)
                if found.reporter != self._rank:
                    self._tell(epoch, found)
        elif values["what"] == "met":
            with self._changed:
                self._met_epoch = values["epoch"]
                self._changed.notify_all()
        elif values["what"] == "ping":
            try:
                status = str(self._status())
            except Exception as error:
                status = f"alive, but its status raised {type(error).__name__}: {error}"
            status = cut_middle(status, MAX_TEXT_BYTES)
            answer = {"what": "pong", "id": values["id"], "from": self._rank, "status": status}
            self._mailbox.post(store, values["from"], json.dumps(answer))
        elif values["what"] == "pong":
            with self._changed:
                self._probes.get(values["id"], {})[values["from"]] = values["status"]
                self._changed.notify_all()

    def _lose_store(self, error: BaseException) -> None:
        """The monitor's thread has no store any more, in this epoch or a later one."""
        lines = str(error).splitlines() or [type(error).__name__]
        text = f"the store through which the ranks talk went away: {cut_middle(lines[0], 300)}"
        lost = Failure("lost", rank=self._store_rank, text=text, reporter=self._rank)
        with self._changed:
            self._ends.store_lost.set()
            epoch, is_news = self._epoch, self._failure is None
            if is_news:
                self._failure = lost
            self._is_agreed = True
            self._changed.notify_all()
        if is_news:
            self._tell(epoch, lost)


def _failed(epoch: int) -> str:
    return json.dumps({"what": "failure", "epoch": epoch})


def _read(text: str) -> Failure:
    try:
        return Failure.from_json(text)
    except ValueError as error:
        return Failure("lost", rank=-1, text="a rank failed; its report cannot be read", detail=str(error))


def _listen(
    monitor: weakref.ref[FailureMonitor], store: Store, mailbox: QueueMailbox | PollingMailbox, ends: _Ends
) -> None:
    """The monitor's thread. Holds the monitor only while a message is handled."""
    lost: BaseException
    try:
        while (message := mailbox.receive(store, ends.closed)) is not None and not ends.closed.is_set():
            if (alive := monitor()) is not None:
                alive._handle(message, store)
            del alive
        return
    except Exception as error:  # whatever it was: this rank hears nothing any more
        lost = error
    while not ends.closed.is_set():
        if (alive := monitor()) is not None:
            alive._lose_store(lost)
        del alive
        if not ends.epochs.get():
            return


_KEPT: list[Store] = []  # in a forked child: to take a store down there would wait for threads that it does not have


def _end(
    ends: _Ends,
    calls: StoreCalls,
    mailbox: QueueMailbox | PollingMailbox,
    rank: int,
    listener: threading.Thread,
    store: Store,
) -> None:
    if ends.process_id != os.getpid():
        _KEPT.append(store)
        return
    ends.closed.set()
    ends.epochs.put(False)
    if not ends.store_lost.is_set() and not calls.is_this_thread:
        with suppress(*STORE_ERRORS):
            calls(lambda store: mailbox.post(store, rank, _CLOSE), END_S)
    calls.close(END_S)
    if threading.current_thread() is not listener:
        listener.join(END_S)
