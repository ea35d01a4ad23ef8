"""Checkpoints and metrics: whole or not at all, and refused when they are damaged."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from timelyfreeze import files
from timelyfreeze.cli.checkpoint import Checkpoint
from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.metrics import MetricsLog, StepRow, read_rows


def checkpoint(step: int) -> Checkpoint:
    weights = torch.full((64, 64), float(step))
    return Checkpoint(
        config={"steps": 9},
        corpus="abc",
        done=[("plain", 9), ("timelyfreeze", step)],
        elapsed_s=1.5 * step,
        split=[3],
        chosen={"cut": 6},
        model={"weight": weights},
        optimizer={"state": {0: {"step": torch.tensor(step), "exp_avg": weights.clone()}}, "param_groups": []},
        freeze={"step": step},
    )


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint(4).save(path)
    loaded = Checkpoint.load(path)
    assert loaded.done == [("plain", 9), ("timelyfreeze", 4)]
    assert (loaded.elapsed_s, loaded.split, loaded.freeze) == (6.0, [3], {"step": 4})
    assert loaded.chosen == {"cut": 6}
    assert torch.equal(loaded.model["weight"], checkpoint(4).model["weight"])
    assert torch.equal(loaded.optimizer["state"][0]["exp_avg"], checkpoint(4).model["weight"])


class _Killed(BaseException):
    """Stands for SIGKILL: nothing may run after it but what the file system has."""


def _die(*_args: Any, **_kwargs: Any) -> Any:
    raise _Killed


class _DiesWhileWriting:
    """A file that is cut off after some bytes."""

    def __init__(self, file: Any, num_bytes: int) -> None:
        self._file, self._left = file, num_bytes

    def write(self, data: Any) -> int:
        data = bytes(data)
        self._file.write(data[: self._left])
        self._file.flush()
        if len(data) > self._left:
            raise _Killed
        self._left -= len(data)
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _DiesWhileWriting:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@pytest.mark.parametrize("stage", ["open", "first byte", "in the middle", "fsync", "rename"])
def test_a_kill_at_any_stage_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint(1).save(path)
    with monkeypatch.context() as patch:
        if stage == "open":
            patch.setattr(files, "open", _die, raising=False)
        elif stage in ("first byte", "in the middle"):
            limit = 0 if stage == "first byte" else 20_000
            real = open
            patch.setattr(files, "open", lambda *a: _DiesWhileWriting(real(*a), limit), raising=False)
        else:
            patch.setattr(os, "fsync" if stage == "fsync" else "replace", _die)
        patch.setattr(os, "unlink", lambda *_: None)  # a killed process does not tidy up
        with pytest.raises(_Killed):
            checkpoint(2).save(path)
    assert Checkpoint.load(path).done[-1] == ("timelyfreeze", 1)
    checkpoint(3).save(path)
    assert Checkpoint.load(path).done[-1] == ("timelyfreeze", 3)


def refuses(path: Path) -> bool:
    try:
        Checkpoint.load(path)
    except CommandError as error:
        return "cannot resume from the checkpoint" in str(error)
    return False


def test_no_byte_of_a_checkpoint_can_change_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint(1).save(path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, info.header_offset, info.file_size) for info in archive.infolist()]
    for name, offset, size in records:
        name_length, extra_length = (int.from_bytes(whole[offset + at : offset + at + 2], "little") for at in (26, 28))
        begin = offset + 30 + name_length + extra_length
        for at in {begin, begin + size // 2, begin + size - 1} if size else ():
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert refuses(path), f"byte {at} of {name} was changed and nobody saw it"


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_checkpoint_that_was_cut_off_is_refused(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint(1).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(len(whole) * keep)])
    with pytest.raises(CommandError, match="cannot resume from the checkpoint"):
        Checkpoint.load(path)


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weights": 1}, "its entries are not a checkpoint's"),
        ([1, 2], "its entries are not a checkpoint's"),
        ({"format": 1, **dict.fromkeys(Checkpoint.__dataclass_fields__, 1)}, "format 1, this version reads 2"),
        ({"format": 2, **dict.fromkeys(Checkpoint.__dataclass_fields__, 1)}, "wrong types"),
        (_Evil(), "cannot resume"),
    ],
)
def test_foreign_files_are_refused_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "checkpoint.pt")
    with pytest.raises(CommandError, match=message):
        Checkpoint.load(Path("checkpoint.pt"))
    assert not Path("evil").exists()


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no such file"):
        Checkpoint.load(tmp_path / "checkpoint.pt")


def row(run: str, step: int) -> StepRow:
    return StepRow(run, step, loss=1.0 / 3 + step, step_time_s=0.1, elapsed_s=0.1 * step, phase="steady")


def test_rows_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for run, last in (("plain", 3), ("timelyfreeze", 5)):
        for step in range(last + 1):
            log.append(row(run, step))
    log.close()
    with open(path, "a") as file:
        file.write('{"run": "timelyfreeze", "st')  # a kill in the middle of a line
    rows = read_rows(path, [("plain", 3), ("timelyfreeze", 2)])
    assert rows == [*(row("plain", step) for step in range(4)), *(row("timelyfreeze", step) for step in range(3))]
    log = MetricsLog(path, rows)
    log.append(row("timelyfreeze", 3))
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["run"][0], line["step"]) for line in lines] == [("p", s) for s in range(4)] + [
        ("t", s) for s in range(4)
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: lines[:1] + lines[2:], "step 1 of run 'plain' is missing"),
        (lambda lines: [lines[0], lines[1][:20], lines[2]], "line 2:"),
        (lambda lines: [lines[0], "[]", lines[2]], "line 2: its fields are not a step's"),
        (lambda lines: [lines[0], lines[1].replace("0.1,", '"fast",'), lines[2]], "line 2: 'fast' is no number"),
        (lambda lines: [lines[0], lines[1].replace("0.1,", "NaN,"), lines[2]], "line 2: nan is no number"),
        (lambda lines: [lines[0], lines[1].replace('"plain"', "7"), lines[2]], "line 2: run is no text"),
        (lambda lines: [lines[0], "\xff", lines[2]], "line 2:"),
    ],
)
def test_damaged_rows_that_are_needed_are_refused(tmp_path: Path, damage: Any, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, [row("plain", step) for step in range(3)])
    log.close()
    lines = path.read_text().splitlines()
    path.write_text("\n".join(damage(lines)) + "\n", encoding="latin-1")
    with pytest.raises(CommandError, match=message):
        read_rows(path, [("plain", 2)])


def test_missing_metrics_are_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file"):
        read_rows(tmp_path / "metrics.jsonl", [("plain", 2)])
