"""The folder of a run: what lies in it, how it is begun, and how it is read again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import timelyfreeze
from timelyfreeze.cli.checkpoint import Checkpoint
from timelyfreeze.cli.config import FREE_TO_CHANGE, TrainConfig
from timelyfreeze.cli.data import Corpus
from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.metrics import StepRow, as_text, read_rows
from timelyfreeze.errors import problem
from timelyfreeze.files import write_atomically

_NAMES = ("config.json", "metrics.jsonl", "plan.json", "table.txt", "checkpoint.pt", "schedule.csv")


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files. ``schedule`` is there only where a .csv was given."""

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

    @property
    def table(self) -> Path:
        return self.root / "table.txt"

    @property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint.pt"

    @property
    def schedule(self) -> Path:
        return self.root / "schedule.csv"

    def begin(self, config: TrainConfig, corpus: Corpus) -> None:
        """Create the folder and write config.json.

        Raises:
            CommandError: the folder holds a run already, or cannot be made.
        """
        taken = [name for name in _NAMES if (self.root / name).exists()]
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
            self.root.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config, as_text(_description(config, corpus)))
        except OSError as error:
            raise CommandError(
                problem(
                    "--out cannot be written",
                    expected="a folder that can be made and written to",
                    got=error.strerror,
                    where=f"'{self.root}'",
                    hint="Name another --out.",
                )
            ) from error

    def tidy(self) -> None:
        """Remove what writes that were killed left behind; the files themselves are whole."""
        for name in _NAMES:
            for path in self.root.glob(f".{name}.*.tmp"):
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
        _refuse(saved.differences(replace(saved, **typed)), self.root)
        return replace(saved, **{name: value for name, value in typed.items() if name in FREE_TO_CHANGE})

    def read(self, config: TrainConfig, corpus: Corpus) -> tuple[Checkpoint, list[StepRow]]:
        """The checkpoint, and the metrics up to it.

        Raises:
            CommandError: a file is damaged, or the checkpoint is of other options or other text.
        """
        checkpoint = Checkpoint.load(self.checkpoint)
        try:
            saved = TrainConfig.from_json(checkpoint.config)
        except ValueError as error:
            raise CommandError(problem("checkpoint.pt holds no options of this command", got=str(error))) from error
        _refuse(saved.differences(config), self.root)
        if checkpoint.corpus != corpus.fingerprint:
            raise CommandError(
                problem(
                    "the text is not the one that the run was trained on",
                    expected=f"fingerprint {checkpoint.corpus[:12]}",
                    got=f"{corpus.fingerprint[:12]}, {corpus.describe()}",
                    hint="Name the same files with --text (where they lie does not matter), or start a new run.",
                )
            )
        return checkpoint, read_rows(self.metrics, checkpoint.done)


def _refuse(differences: list[str], root: Path) -> None:
    if differences:
        raise CommandError(
            problem(
                "the run to resume was started with other options",
                got="; ".join(differences),
                where=f"'{root}'",
                hint="Leave them out to go on, or start a new run with --out.",
            )
        )


def _description(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    return {
        "timelyfreeze": timelyfreeze.__version__,
        "torch": torch.__version__,
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
