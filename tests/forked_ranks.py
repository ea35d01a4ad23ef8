"""Ranks as processes that are forked from one which has imported torch, so that a launch takes well below a second.

A rank is stopped, killed or told to go on when it says that it has come to a certain place (``event``); nothing sleeps.
Where interpreters have to begin and end as they do under torchrun, use ``tests.processes`` instead.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import free_port

_PRELOADED = ["tests.lost_ranks", "torch._dynamo", "torch.distributed.checkpoint"]
_own_end: Any = None  # in a rank: its connection to the test


@dataclass
class Ended:
    """What became of a rank.

    Attributes:
        result: what its function returned; None if it did not.
        error: the traceback of what it raised.
        stderr: with every thread's stack where it was still there at the end of the test's patience.
        exitcode: as ``multiprocessing`` has it: -9 after SIGKILL.
        seconds: from the launch on.
        notes: what it has sent by ``note``; also there where it was killed afterwards.
    """

    result: Any = None
    error: str = ""
    stderr: str = ""
    exitcode: int | None = None
    seconds: float = 0.0
    notes: list[Any] = field(default_factory=list)


class Launch:
    """The ranks' processes, for what the test does when one of them says where it is."""

    def __init__(self, num_ranks: int, function: Callable[..., Any], args: tuple[Any, ...], agent_store: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        # Alive until the ranks have ended.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if agent_store else None
        port = free_port() if self._store is None else self._store.port
        self.began_s = time.monotonic()
        self.ended = [Ended() for _ in range(num_ranks)]
        self.processes = []
        self._ends: dict[Any, int] = {}
        for rank in range(num_ranks):
            end, other = context.Pipe()
            stderr = os.path.join(self._folder.name, str(rank))
            place = (rank, num_ranks, port, agent_store, stderr)
            process = context.Process(target=_run, args=(other, place, function, args), daemon=True)
            process.start()
            other.close()
            self.processes.append(process)
            self._ends[end] = rank

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def tell(self, rank: int, value: Any = None) -> None:
        """Let a rank go on that waits in ``event``."""
        next(end for end, other in self._ends.items() if other == rank).send(value)

    def wait(self, timeout_s: float, on_event: Mapping[str, Callable[[Launch, int], None]], gone: set[int]) -> bool:
        """Until every rank has ended, apart from those that ``gone`` tells not to wait for."""
        open_ends = dict(self._ends)
        sentinels = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        while any(rank not in gone for rank in sentinels.values()):
            left_s = self.began_s + timeout_s - time.monotonic()
            ready = multiprocessing.connection.wait([*open_ends, *sentinels], max(left_s, 0.0))
            if not ready:
                return False
            for one in ready:
                if one in sentinels:
                    self.ended[sentinels.pop(one)].seconds = time.monotonic() - self.began_s
                    continue
                rank = open_ends[one]
                try:
                    kind, value = one.recv()
                except (EOFError, ConnectionResetError):
                    del open_ends[one]
                    continue
                if kind == "event":
                    on_event[value](self, rank)
                elif kind == "note":
                    self.ended[rank].notes.append(value)
                else:
                    setattr(self.ended[rank], kind, value)
        # What was sent last may still lie there.
        for end, rank in open_ends.items():
            while rank not in gone and end.poll():
                try:
                    kind, value = end.recv()
                except (EOFError, ConnectionResetError):
                    break
                if kind == "note":
                    self.ended[rank].notes.append(value)
                elif kind != "event":
                    setattr(self.ended[rank], kind, value)
        return True

    def end(self, in_time: bool) -> list[Ended]:
        if not in_time:
            for number in (signal.SIGABRT, signal.SIGCONT):  # faulthandler prints on SIGABRT
                for process in self.processes:
                    if process.is_alive():
                        os.kill(process.pid, number)
            for process in self.processes:
                process.join(5)
        for rank, process in enumerate(self.processes):
            process.kill()
            process.join()
            self.ended[rank].exitcode = process.exitcode
            stderr = Path(self._folder.name, str(rank))
            self.ended[rank].stderr = stderr.read_text(errors="replace") if stderr.exists() else ""
        self._folder.cleanup()
        return self.ended


def launch(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 100.0,
    agent_store: bool = True,
    on_event: Mapping[str, Callable[[Launch, int], None]] | None = None,
    gone: tuple[int, ...] = (),
) -> list[Ended]:
    """``function(rank, num_ranks, *args)`` in each rank's process, after ``init_process_group``.

    Args:
        agent_store: the test hosts the store, as torchrun's agent does; else rank 0.
        on_event: what to do when a rank calls ``event(name)``: gets the launch and the rank.
        gone: ranks that are not waited for: they are stopped.

    Raises:
        AssertionError: not done in time; shows every rank's stacks.
    """
    started = Launch(num_ranks, function, args, agent_store)
    in_time = False
    try:
        in_time = started.wait(timeout_s, on_event or {}, set(gone))
    finally:
        ended = started.end(in_time)
    assert in_time, f"{function.__name__}{args} did not end within {timeout_s:g} s\n{shown(ended)}"
    return ended


def results(ended: list[Ended]) -> list[Any]:
    """What the ranks returned; all must have ended well."""
    assert [one.exitcode for one in ended] == [0] * len(ended), shown(ended)
    return [one.result for one in ended]


def shown(ended: list[Ended]) -> str:
    return "\n".join(
        f"--- rank {rank}: exit code {one.exitcode}, notes {one.notes}\n{one.error}\n{one.stderr[-20000:]}"
        for rank, one in enumerate(ended)
    )


def event(name: str, wait: bool = True) -> Any:
    """In a rank, from any thread: say where it is; waits until the test tells it to go on, and gives what it tells."""
    _own_end.send(("event", name))
    return _own_end.recv() if wait else None


def note(value: Any) -> None:
    """In a rank: leave something that the test finds in ``notes``."""
    _own_end.send(("note", value))


def _run(end: Any, place: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _own_end
    rank, num_ranks, port, agent_store, stderr = place
    _own_end = end
    descriptor = os.open(stderr, os.O_CREAT | os.O_WRONLY)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(agent_store),
    }
    try:
        dist.init_process_group("gloo")
        end.send(("result", function(rank, num_ranks, *args)))
    except BaseException:
        end.send(("error", traceback.format_exc()))
        raise
