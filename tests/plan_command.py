"""What the tests of `timelyfreeze plan` share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from timelyfreeze.cli.main import main

# The published times of LLaMA-3-8B on 4 GPUs.
TIMES = ("--forward-ms", "15", "--backward-ms", "43", "--frozen-backward-ms", "20")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that has to succeed; what it printed."""
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "--json"))


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that has to be refused as wrong use; what it said."""
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err
