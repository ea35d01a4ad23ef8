"""Two processes never train in one folder at once, and a kill leaves no lock behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli_job import TINY, rows, run, write_text
from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.folder import RunFolder
from timelyfreeze.cli.metrics import MetricsLog, StepRow

MESSAGE = "another process is training in this folder"


def test_a_folder_that_is_trained_in_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, folder = write_text(tmp_path / "text"), tmp_path / "run"
    codes = []
    append = MetricsLog.append

    def interfere(self: MetricsLog, row: StepRow) -> None:
        append(self, row)
        if row.step == 2:
            monkeypatch.setattr(MetricsLog, "append", append)
            codes.append(run("--resume", folder, steps=None))
            codes.append(run(*TINY, "--text", text, "--out", folder))

    monkeypatch.setattr(MetricsLog, "append", interfere)
    assert run(*TINY, "--text", text, "--no-compare", "--out", folder, steps=4) == 0
    assert codes == [2, 2]
    error = capsys.readouterr().err
    assert error.count(f"{MESSAGE} ('{folder}')") == 2
    assert "Traceback" not in error
    assert [row["step"] for row in rows(folder)] == [0, 1, 2, 3, 4]


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    text, folder = write_text(tmp_path / "text"), RunFolder(tmp_path / "run")
    command = [sys.executable, "-m", "timelyfreeze", "train", *TINY, "--text", str(text), "--out", str(folder.root)]
    process = subprocess.Popen(
        [*command, "--steps", "1000000"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        assert any(line.startswith("plain") for line in process.stdout)
        with pytest.raises(CommandError, match=MESSAGE), folder.locked():
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    with folder.locked():
        pass


def test_a_lock_is_held_while_it_is_entered(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    with folder.made(), pytest.raises(CommandError, match=MESSAGE), folder.locked():
        pass
    with pytest.raises(OverflowError), folder.locked():
        raise OverflowError
    with folder.locked():
        pass


def test_a_job_that_failed_holds_no_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, folder = write_text(tmp_path / "text"), tmp_path / "run"
    assert run(*TINY, "--text", text, "--out", folder, "--learning-rate", "1e38", steps=50) == 1
    assert run("--resume", folder, steps=None) == 1, "not the same failure again"
    assert MESSAGE not in capsys.readouterr().err
