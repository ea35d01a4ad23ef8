"""Checkpoint folders: their names, which one is the newest, and how one appears whole or not at all."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from timelyfreeze.distributed.checkpoint_ranks import CheckpointError
from timelyfreeze.errors import PlanError, problem
from timelyfreeze.files import load_json, sync_folder, write_atomically

STATE_FILE = "state.json"
METADATA_FILE = ".metadata"  # torch.distributed.checkpoint's own, and the last of its files to be written

_FORMAT = "timelyfreeze-checkpoint"
_VERSION = 1
_NAME = re.compile(r"step-\d{6,}(-\d+)?")
_UNFINISHED = re.compile(r"\.step-\d{6,}(-\d+)?\.tmp-[0-9a-f]+")


@dataclass(frozen=True)
class SavedState:
    """What is in ``state.json``: everything that is no tensor.

    Attributes:
        save_id: random, of this one save.
        sequence: counts the saves under one path, so that the newest is known even where training went back to an
            earlier step.
        step: steps done.
        num_ranks: how many ranks wrote it.
        freeze_state: ``pipe.freeze_state_dict()``.
        extra: the caller's.
    """

    save_id: str
    sequence: int
    step: int
    num_ranks: int
    freeze_state: dict[str, Any]
    extra: dict[str, Any]

    def write(self, folder: Path) -> None:
        write_atomically(folder / STATE_FILE, json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}))

    @classmethod
    def read(cls, folder: Path) -> SavedState:
        """PlanError if the file is damaged or something else, OSError if it cannot be read."""
        return load_json(folder / STATE_FILE, cls._of)

    @classmethod
    def _of(cls, data: object) -> SavedState:
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            raise PlanError(problem("not a checkpoint's state", expected=f'a dictionary with "format": "{_FORMAT}"'))
        if data.get("version") != _VERSION:
            raise PlanError(problem("checkpoint of another version", expected=_VERSION, got=data.get("version")))
        kinds = {"save_id": str, "sequence": int, "step": int, "num_ranks": int, "freeze_state": dict, "extra": dict}
        wrong = [name for name, kind in kinds.items() if not isinstance(data.get(name), kind)]
        if wrong:
            raise PlanError(problem("damaged checkpoint state", got=f"no, or another kind of, {', '.join(wrong)}"))
        return cls(**{field.name: data[field.name] for field in fields(cls)})


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder holds a checkpoint's own files."""
    return (folder / STATE_FILE).is_file() and (folder / METADATA_FILE).is_file()


def checkpoints(path: Path) -> list[tuple[Path, SavedState]]:
    """The complete ones under ``path``, oldest first; a warning names one that has lost its files."""
    found = []
    for folder in path.iterdir() if path.is_dir() else []:
        if _NAME.fullmatch(folder.name) is None or not folder.is_dir():
            continue
        try:
            if not is_checkpoint(folder):
                raise PlanError(f"{STATE_FILE} or {METADATA_FILE} is missing")
            found.append((folder, SavedState.read(folder)))
        except (OSError, PlanError) as error:
            warnings.warn(problem(f"passed over the checkpoint '{folder}'", got=error), stacklevel=3)
    return sorted(found, key=lambda entry: (entry[1].sequence, entry[1].step, entry[0].name))


def find_checkpoint(path: str | PathLike[str]) -> Path:
    """``path`` itself if it is a checkpoint, else the newest one under it; CheckpointError if there is none."""
    folder = Path(path)
    if is_checkpoint(folder):
        return folder
    found = checkpoints(folder)
    if not found:
        raise CheckpointError(
            problem(
                "no complete checkpoint",
                expected="a folder that save_checkpoint wrote, or one with such folders in it",
                where=f"'{path}'",
                hint="Check the path, or start anew.",
            )
        )
    return found[-1][0]


def begin_folder(path: Path, step: int) -> tuple[str, int]:
    """Remove what killed saves have left, and create an empty temporary folder: (its name, sequence number)."""
    path.mkdir(parents=True, exist_ok=True)
    sync_folder(str(path.parent))
    for leftover in path.iterdir():
        if _UNFINISHED.fullmatch(leftover.name) is not None:
            shutil.rmtree(leftover, ignore_errors=True)
    saved = checkpoints(path)
    temporary = _temporary_name(f"step-{step:06d}")
    (path / temporary).mkdir()
    return temporary, 1 + max((state.sequence for _, state in saved), default=0)


def publish_folder(path: Path, temporary: str, step: int) -> str:
    """Give the temporary folder its name, which it returns: ``step-000123``, or ``step-000123-2`` if that is there.

    An existing folder is never replaced: between the two renames that this takes, a kill would leave neither.
    """
    sync_folder(str(path / temporary))
    name, number = f"step-{step:06d}", 1
    while (path / name).exists():
        number += 1
        name = f"step-{step:06d}-{number}"
    os.rename(path / temporary, path / name)
    sync_folder(str(path))
    return name


def prune(path: Path, keep_last: int, newest: str) -> None:
    """Remove the oldest checkpoints and those that ``newest`` supersedes, being of the same step.

    What cannot be removed stays, with a warning: the new checkpoint is good.
    """
    saved = checkpoints(path)
    step = next((state.step for folder, state in saved if folder.name == newest), None)
    others = [(folder, state) for folder, state in saved if folder.name != newest]
    superseded = [folder for folder, state in others if state.step == step]
    kept = [folder for folder, _ in others if folder not in superseded]
    for folder in superseded + kept[: max(0, len(kept) - (keep_last - 1))]:
        try:
            # Out of sight first: a kill in the middle must not leave half a checkpoint under a name that is read.
            doomed = path / _temporary_name(folder.name)
            os.rename(folder, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            warnings.warn(problem(f"cannot remove the old checkpoint '{folder}'", got=error), stacklevel=3)


def discard(folder: Path) -> None:
    """Remove an unfinished folder as far as possible; the next save tries again."""
    with suppress(OSError):
        shutil.rmtree(folder)


def save_id_of(temporary: str) -> str:
    """The random part of a temporary folder's name."""
    return temporary.rpartition("-")[2]


def _temporary_name(name: str) -> str:
    return f".{name}.tmp-{secrets.token_hex(8)}"


def check_json(value: Any, name: str) -> list[str]:
    """What in ``value`` JSON would not give back as it is (tuples, which come back as lists, aside).

    >>> check_json({"lr": 0.1, "steps": [1, 2], "seen": {3}}, "extra")
    ["extra['seen']: expected plain JSON data, got set."]
    """
    if value is None or isinstance(value, str | int | float):
        return []
    if isinstance(value, Mapping):
        faults = [problem(f"{name}: keys", expected="text", got=repr(key)) for key in value if not isinstance(key, str)]
        return faults + [fault for key, item in value.items() for fault in check_json(item, f"{name}[{key!r}]")]
    if isinstance(value, list | tuple):
        return [fault for index, item in enumerate(value) for fault in check_json(item, f"{name}[{index}]")]
    hint = "Pass tensor.tolist()." if hasattr(value, "tolist") else None
    return [problem(name, expected="plain JSON data", got=type(value).__name__, hint=hint)]
