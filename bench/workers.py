"""Ranks as processes that live until they are closed; they sleep between steps, so that others may run."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

_TIMEOUT_S = 300.0


class Reply(NamedTuple):
    """What a rank answers to a command: a value, or why there is none."""

    value: Any
    error: str | None = None


class Workers:
    """Gloo processes, one a rank, each with one thread.

    Args:
        serve: ``serve(rank, num_ranks, *args)``, run in each process, returns what answers the commands.
        hosts: where the ranks are; None: on one host.
    """

    def __init__(
        self, serve: Callable[..., Callable[[str], Any]], num_ranks: int, *args: Any, hosts: Hosts | None = None
    ) -> None:
        self._store = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(num_ranks)]
        self._connections = [ours for ours, _ in pipes]
        path = Path(self._store.name) / "store"
        self._processes = [
            context.Process(target=_run, args=(serve, rank, num_ranks, path, hosts, theirs, args), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that a worker's end shows as the end of its pipe
        self._collect()

    def call(self, command: str) -> list[Any]:
        """Every rank's answer."""
        for connection in self._connections:
            connection.send(command)
        return self._collect()

    def close(self) -> None:
        """Ends the workers; safe to call twice."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._store.cleanup()

    def _collect(self) -> list[Any]:
        """One reply of each rank, by rank; the first error that any rank reports ends them all."""
        replies: dict[int, Any] = {}
        pending = list(self._connections)
        while pending:
            ready = wait(pending, timeout=_TIMEOUT_S)
            for connection in [c for c in pending if c in ready]:
                pending.remove(connection)
                try:
                    reply = connection.recv()
                except EOFError:
                    reply = Reply(None, "a worker ended")
                if reply.error is not None:
                    self.close()
                    raise RuntimeError(reply.error)
                replies[self._connections.index(connection)] = reply.value
            if not ready:
                self.close()
                raise TimeoutError(f"no answer from {len(pending)} worker(s) in {_TIMEOUT_S} s")
        return [replies[rank] for rank in range(len(self._connections))]


class Hosts(NamedTuple):
    """Network namespaces that stand for hosts.

    Attributes:
        namespaces: of each rank, by name.
        interface: its name in all of them.
    """

    namespaces: list[str]
    interface: str


def _run(
    serve: Callable[..., Callable[[str], Any]],
    rank: int,
    num_ranks: int,
    store: Path,
    hosts: Hosts | None,
    connection: Connection,
    args: tuple[Any, ...],
) -> None:
    """A worker: sets up, then answers each command until the pipe ends."""
    try:
        if hosts is not None:
            from bench.namespaces import enter

            enter(hosts.namespaces[rank], hosts.interface)
        torch.set_num_threads(1)
        distributed.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=num_ranks)
        answer = serve(rank, num_ranks, *args)
        connection.send(Reply(None))
        while True:
            connection.send(Reply(answer(connection.recv())))
    except EOFError:
        pass  # closed by the parent
    except Exception:
        with suppress(OSError):  # another rank's report came first, and the parent closed
            connection.send(Reply(None, f"rank {rank} failed:\n{traceback.format_exc()}"))
