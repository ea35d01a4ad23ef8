"""checkpoint.pt: where a run stands, whole or not at all, and never trusted blindly when read."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from timelyfreeze.cli.errors import CommandError
from timelyfreeze.errors import problem
from timelyfreeze.files import open_atomically

_FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """State after a whole step.

    Attributes:
        config: the run's options as JSON data, to be compared with config.json.
        corpus: fingerprint of the text.
        done: for every run so far, in order, its name and the steps done; the last one is the one described below.
        elapsed_s: training seconds of that run.
        split: children of the model in each stage, as they were balanced at the start, so that a resumed run splits
            alike; empty before the first step.
        chosen: with ``--live-microbatches``, the number of micro-batches that was chosen for every mode; else empty.
        model, optimizer, freeze: state dicts.
    """

    config: dict[str, Any]
    corpus: str
    done: list[tuple[str, int]]
    elapsed_s: float
    split: list[int]
    chosen: dict[str, int]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    freeze: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write it so that a kill at any instant leaves the old one.

        Raises OSError if the folder cannot be written; the old checkpoint is then untouched.
        """
        # Through memory: torch.save to a file reports a full disk as a RuntimeError about positions.
        buffer = io.BytesIO()
        torch.save({"format": _FORMAT, **{f.name: getattr(self, f.name) for f in fields(self)}}, buffer)
        with open_atomically(path) as file:
            file.write(buffer.getbuffer())

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read with ``weights_only=True`` onto the CPU, after a check of every byte.

        Raises:
            CommandError: the file is missing, damaged, or no checkpoint of this command.
        """
        try:
            # torch.load does not verify the CRC-32 that torch.save stores with every record; zipfile does.
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
            if broken is not None:
                raise zipfile.BadZipFile(f"checksum of {broken} does not match")
            data = torch.load(path, map_location="cpu", weights_only=True)
            return cls._of(data)
        except FileNotFoundError as error:
            raise _unusable(path, "no such file") from error
        except Exception as error:  # whatever zipfile, torch and pickle raise on bytes they do not understand
            raise _unusable(
                path, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error

    @classmethod
    def _of(cls, data: object) -> Checkpoint:
        names = {f.name for f in fields(cls)}
        if not isinstance(data, Mapping) or data.keys() != {"format", *names}:
            raise ValueError("its entries are not a checkpoint's")
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']!r}, this version reads {_FORMAT}")
        checkpoint = cls(**{name: data[name] for name in names})
        if not checkpoint.done or not all(
            isinstance(getattr(checkpoint, name), dict) for name in ("config", "model", "chosen")
        ):
            raise ValueError("its entries have the wrong types")
        return checkpoint


def _unusable(path: Path, what: str) -> CommandError:
    return CommandError(
        problem(
            "cannot resume from the checkpoint",
            expected="a whole file that `timelyfreeze train --out` wrote",
            got=what,
            where=f"'{path}'",
            hint="Check the folder, or start a new run with another --out.",
        )
    )
