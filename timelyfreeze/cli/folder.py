"""The folder of a run: what lies in it, how it is begun, and how its options are read again. No torch."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timelyfreeze
from timelyfreeze.cli.config import FREE_TO_CHANGE, RESIZED, TrainConfig
from timelyfreeze.cli.errors import CommandError, user_errors
from timelyfreeze.cli.launch import Launch
from timelyfreeze.cli.metrics import as_text
from timelyfreeze.errors import problem
from timelyfreeze.files import write_atomically
from timelyfreeze.planner import MODES

if TYPE_CHECKING:
    from timelyfreeze.cli.data import Corpus


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files.

    ``schedule`` is there only where a .csv was given, ``plan_of_mode(...)`` only where modes were compared; the file
    ``.lock`` says nothing by being there, only by being locked.
    """

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    def plan_of_mode(self, mode: str) -> Path:
        """The plan of the run with the other mode, where modes are compared."""
        return self.root / f"plan-{mode}.json"

    @property
    def measured(self) -> Path:
        return self.root / "measured.json"

    @property
    def table(self) -> Path:
        return self.root / "table.txt"

    @property
    def checkpoints(self) -> Path:
        """Where the last checkpoint is, a folder of its own."""
        return self.root / "checkpoints"

    @property
    def schedule(self) -> Path:
        return self.root / "schedule.csv"

    @property
    def _files(self) -> list[Path]:
        own = [self.config, self.metrics, self.plan, self.measured, self.table, self.checkpoints, self.schedule]
        return own + [self.plan_of_mode(mode) for mode in MODES]

    @contextmanager
    def made(self) -> Iterator[None]:
        """Create the folder and keep other processes out of it while this is entered.

        Raises:
            CommandError: it cannot be made, or another process trains in it.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        with self.locked():
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in the folder while this is entered. A kill releases it, too.

        Raises:
            CommandError: another process trains in it, or it cannot be written.
        """
        try:
            lock = open(self.root / ".lock", "ab")  # noqa: SIM115 - closed below, which releases the lock
        except OSError as error:
            raise self._unwritable(error) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CommandError(
                    problem(
                        "another process is training in this folder",
                        where=f"'{self.root}'",
                        hint="Wait for its end, or stop it with Ctrl-C, which saves where it stands.",
                    )
                ) from error
            yield

    def begin(self, config: TrainConfig, corpus: Corpus, launch: Launch, *, again: bool = False) -> None:
        """Write config.json into the folder, which must hold no run yet.

        Args:
            again: it may hold the beginning of this very run.

        Raises:
            CommandError: it holds one, or cannot be written.
        """
        taken = [path.name for path in self._files if path.exists() and not again]
        if taken:
            raise CommandError(
                problem(
                    "--out holds a run already",
                    expected="a new or empty folder",
                    got=", ".join(taken),
                    where=f"'{self.root}'",
                    hint=f"Go on with --resume {self.root}, or name another --out.",
                )
            )
        try:
            write_atomically(self.config, as_text({**_description(config, corpus), "launch": launch.run_id}))
        except OSError as error:
            raise self._unwritable(error) from error

    def change_options(self, config: TrainConfig) -> None:
        """Let config.json say that the run goes on with these options; OSError where it cannot be written."""
        data = json.loads(self.config.read_text(encoding="utf-8"))
        write_atomically(self.config, as_text({**data, "options": config.to_json()}))

    def is_of(self, launch: Launch) -> bool:
        """Whether this launch has begun the run, before torchrun started its processes again."""
        try:
            data = json.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(data, dict) and launch.follows(data.get("launch"))

    def tidy(self) -> None:
        """Remove what writes that were killed left behind; the files themselves are whole.

        What is left of a checkpoint goes when the next one is written.
        """
        for file in self._files:
            for path in self.root.glob(f".{file.name}.*.tmp"):
                path.unlink(missing_ok=True)

    def read_config(self, typed: Mapping[str, Any]) -> TrainConfig:
        """The run's options, with those that were typed and may change put in.

        Raises:
            CommandError: there is no run, config.json is damaged, or a typed option differs where it may not.
        """
        try:
            data = json.loads(self.config.read_text(encoding="utf-8"))
            saved = TrainConfig.from_json(data["options"])
        except FileNotFoundError as error:
            raise CommandError(
                problem(
                    "there is no run to resume",
                    expected="a folder that `timelyfreeze train --out` wrote",
                    got="no config.json",
                    where=f"'{self.root}'",
                    hint="Check --resume for a typo.",
                )
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CommandError(
                problem(
                    "the options of the run to resume are damaged",
                    got=str(error) or type(error).__name__,
                    where=f"'{self.config}'",
                    hint="Start a new run with another --out.",
                )
            ) from error
        free = RESIZED if saved.can_be_resized else frozenset()
        self.refuse(saved.differences({name: value for name, value in typed.items() if name not in free}))
        with user_errors("the options"):
            return replace(saved, **{name: value for name, value in typed.items() if name in FREE_TO_CHANGE | free})

    def refuse(self, differences: list[str]) -> None:
        """Raise CommandError if options differ that may not when a run is resumed."""
        if differences:
            raise CommandError(
                problem(
                    "the run to resume was started with other options",
                    got="; ".join(differences),
                    where=f"'{self.root}'",
                    hint="Leave them out to go on, or start a new run with --out.",
                )
            )

    def _unwritable(self, error: OSError) -> CommandError:
        return CommandError(
            problem(
                "the folder cannot be written",
                expected="one that can be made and written to",
                got=error.strerror,
                where=f"'{self.root}'",
                hint="Name another --out.",
            )
        )


def _description(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    return {
        "timelyfreeze": timelyfreeze.__version__,
        "torch": version("torch"),
        "options": config.to_json(),
        "text": {
            "num_files": corpus.num_files,
            "num_binary": corpus.num_binary,
            "num_unreadable": corpus.num_unreadable,
            "train_bytes": int(corpus.train.size),
            "validation_bytes": int(corpus.validation.size),
            "split": corpus.split,
            "fingerprint": corpus.fingerprint,
        },
    }
