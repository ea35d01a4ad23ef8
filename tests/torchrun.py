"""Starts commands under torchrun, watches what they print, and sends signals to single ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A hang of a rank ends the test, not the suite.
TIMEOUT_S = 120


@dataclass
class Finished:
    """How a launch ended: torchrun's own exit code, and the lines of all ranks by stream."""

    returncode: int
    out: list[str] = field(default_factory=list)
    error: str = ""


class Launch:
    """A running torchrun.

    Args:
        arguments: torchrun's.
        folder: where it runs.
    """

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._error = open(folder / "stderr", "w+")  # noqa: SIM115 - closed by finish()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._error,
            text=True,
            env=environment,
            cwd=folder,
            start_new_session=True,  # a signal to the group is a Ctrl-C on a terminal
        )

    def signal_all(self, number: signal.Signals) -> None:
        """To torchrun and all ranks, as a terminal does."""
        os.killpg(self.process.pid, number)

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """To one rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for child in children:
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                os.kill(int(child), number)
                return
        raise AssertionError(f"no child is rank {rank}")

    def finish(self, on_line: Callable[[str], None] = lambda line: None) -> Finished:
        """Read on until all have ended."""
        out = []
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                out.append(line)
                on_line(line)
            code = self.process.wait(TIMEOUT_S)
        finally:
            if self.process.poll() is None:
                self.signal_all(signal.SIGKILL)
                self.process.wait()
        self._error.seek(0)
        with self._error:
            return Finished(code, out, self._error.read())


def torchrun(*arguments: object, folder: Path) -> Finished:
    """Run to the end; ``--standalone`` finds a free port."""
    return Launch(["--standalone", *map(str, arguments)], folder).finish()
