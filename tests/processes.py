"""Runs a function on several ranks, each a process as torchrun would start it, and can signal them at given moments.

A child prints ``EVENT name`` (``event``) and the parent calls what the test gave for that name; it may ``signal`` ranks
and ``tell`` one that it is done, which the child awaits with ``input()``. So nothing has to sleep.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
# What torch says of a peer that connects where no name server answers: see conftest.py.
_NO_NAME = re.compile(r"^.*The hostname of the client socket cannot be retrieved.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: ``result`` is what its function returned, None if it did not."""

    returncode: int
    result: Any
    stderr: str
    seconds: float


class Processes:
    """The ranks' processes, for a test that acts on an event."""

    def __init__(self, commands: list[list[str]], environments: list[dict[str, str]], folder: Path) -> None:
        self._folder = folder
        self._began_s = time.monotonic()
        self._ended_s = [0.0] * len(commands)
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            with open(folder / f"stderr-{rank}", "wb") as stderr:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        cwd=ROOT,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        start_new_session=True,  # so that what a rank starts can be killed with it
                    )
                )

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal; after SIGSTOP the process stands still when this returns, after SIGKILL it is gone."""
        pid = self._processes[rank].pid
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        elif number == signal.SIGKILL:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def tell(self, rank: int, line: str = "go on") -> None:
        """Give a line to the rank's ``input()``."""
        stdin = self._processes[rank].stdin
        assert stdin is not None
        stdin.write(line.encode() + b"\n")
        stdin.flush()

    def wait(self, timeout_s: float, on_event: Mapping[str, Callable[[Processes], None]]) -> bool:
        """Act on events until every process has ended; whether they did in time."""
        rest = dict.fromkeys(range(len(self._processes)), b"")
        with selectors.DefaultSelector() as selector:
            ends = {}
            try:
                for rank, process in enumerate(self._processes):
                    assert process.stdout is not None
                    selector.register(process.stdout, selectors.EVENT_READ, (rank, "line"))
                    ends[rank] = os.pidfd_open(process.pid)
                    selector.register(ends[rank], selectors.EVENT_READ, (rank, "end"))
                while ends:
                    left_s = self._began_s + timeout_s - time.monotonic()
                    ready = selector.select(left_s) if left_s > 0 else []
                    if not ready:
                        return False
                    for key, _ in ready:
                        rank, kind = key.data
                        if kind == "end":
                            selector.unregister(ends[rank])
                            os.close(ends.pop(rank))
                            self._ended_s[rank] = time.monotonic()
                        elif data := os.read(key.fd, 1 << 16):
                            *lines, rest[rank] = (rest[rank] + data).split(b"\n")
                            self._act(lines, on_event)
                        else:
                            selector.unregister(key.fileobj)
                return True
            finally:
                for descriptor in ends.values():
                    os.close(descriptor)

    def _act(self, lines: list[bytes], on_event: Mapping[str, Callable[[Processes], None]]) -> None:
        for line in lines:
            word, _, name = line.decode().partition(" ")
            if word == "EVENT":
                on_event[name](self)

    def dump_and_kill(self) -> None:
        """Have every process print its threads' stacks on stderr, and end it."""
        for number in (signal.SIGABRT, signal.SIGCONT):
            for process in self._processes:
                os.kill(process.pid, number)  # faulthandler prints on SIGABRT
        deadline_s = time.monotonic() + 5
        for process in self._processes:
            end = os.pidfd_open(process.pid)
            select.select([end], [], [], max(0.0, deadline_s - time.monotonic()))
            os.close(end)

    def reap(self) -> None:
        """Kill what is left, with all that the ranks started, and leave no zombie and no open pipe."""
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped so far, so the number is still this process's
            process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.close()
            with suppress(BrokenPipeError):
                process.stdin.close()

    def outcomes(self) -> list[Outcome]:
        """One a rank, once all have ended."""
        found = []
        for rank, process in enumerate(self._processes):
            result = self._folder / f"result-{rank}"
            value = json.loads(result.read_text()) if result.exists() else None
            stderr = _NO_NAME.sub("", (self._folder / f"stderr-{rank}").read_text(errors="replace"))
            found.append(Outcome(process.returncode, value, stderr, self._ended_s[rank] - self._began_s))
        return found


def run_ranks(
    function: str,
    num_ranks: int,
    *,
    timeout_s: float,
    args: Mapping[str, Any] | None = None,
    agent_store: bool = True,
    on_event: Mapping[str, Callable[[Processes], None]] | None = None,
) -> list[Outcome]:
    """Call ``function(rank, num_ranks, **args)`` on every rank and wait for all.

    Args:
        function: ``"module:function"``; gives back what JSON can hold.
        agent_store: this process hosts the store that ``init_process_group`` uses, as torchrun's agent does; else
            rank 0 hosts it.
        on_event: what to do when a rank prints ``EVENT name``.

    Raises:
        AssertionError: not done within ``timeout_s``; shows every rank's stacks. All are killed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Alive until the ranks have ended.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if agent_store else None
        port = free_port() if store is None else store.port
        begin = [sys.executable, "-X", "faulthandler", "-m", "tests.processes", function]
        values = json.dumps(dict(args or {}))
        commands = [[*begin, str(rank), str(num_ranks), values, str(folder)] for rank in range(num_ranks)]
        processes = Processes(
            commands, [_environment(rank, num_ranks, port, agent_store) for rank in range(num_ranks)], folder
        )
        in_time = False
        try:
            in_time = processes.wait(timeout_s, on_event or {})
            if not in_time:
                processes.dump_and_kill()
        finally:
            processes.reap()
        outcomes = processes.outcomes()
        if not in_time:
            raise AssertionError(f"{function} did not end within {timeout_s:g} s\n{shown(outcomes)}")
        return outcomes


def results(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; all must have ended well."""
    assert [outcome.returncode for outcome in outcomes] == [0] * len(outcomes), shown(outcomes)
    return [outcome.result for outcome in outcomes]


def shown(outcomes: list[Outcome]) -> str:
    """Return codes and stderr, for a message."""
    return "\n".join(
        f"--- rank {rank}: exit code {outcome.returncode}\n{outcome.stderr}" for rank, outcome in enumerate(outcomes)
    )


def event(name: str) -> None:
    """In a child: let the parent act."""
    print(f"EVENT {name}", flush=True)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _environment(rank: int, num_ranks: int, port: int, agent_store: bool) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(agent_store),
    }


def main(function: str, rank: str, num_ranks: str, args: str, folder: str) -> None:
    """What a child runs."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    module, _, name = function.partition(":")
    value = getattr(importlib.import_module(module), name)(int(rank), int(num_ranks), **json.loads(args))
    (Path(folder) / f"result-{rank}").write_text(json.dumps(value))


if __name__ == "__main__":
    main(*sys.argv[1:])
