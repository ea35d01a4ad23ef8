"""The examples run as they stand, and do what they say."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def test_own_model_learns_and_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("own_model.py")["main"]() < 0.1  # the variance of a sine is 0.5
    out = capsys.readouterr().out
    assert "steady" in out
    assert "planned" in out


def test_adapters_learn_and_leave_the_base_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main = load("adapters.py")["main"]
    assert main() < 0.5 * main(num_steps=1)
    assert "bit for bit" in capsys.readouterr().out


def test_resume_goes_on_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    load("resume.py")["main"]()
    assert "20 losses" in capsys.readouterr().out


def test_same_gradients_learn_as_much(capsys: pytest.CaptureFixture[str]) -> None:
    plain, larger = load("same_gradients.py")["main"]()
    assert max(plain, larger) < 0.8 * 0.34  # the variance of what is to be learned
    assert larger == pytest.approx(plain, rel=0.1)
    assert "of which every parameter trains on 4" in capsys.readouterr().out


def test_many_processes_print_what_one_prints() -> None:
    script = str(EXAMPLES / "many_processes.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    one, many = (
        subprocess.run([sys.executable, *how, script], check=True, capture_output=True, text=True, timeout=120).stdout
        for how in ([], torchrun)
    )
    assert one == many
    assert one.count("loss") == 5


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in here] == []
