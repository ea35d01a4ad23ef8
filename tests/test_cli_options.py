"""What is typed, what it means, and how wrong use is answered. Nothing here trains."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import timelyfreeze
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.main import main
from timelyfreeze.cli.options import add_train_parser, train_options


def parse(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    train = add_train_parser(parser.add_subparsers())
    assert train.prog
    return train_options(parser.parse_args(["train", *arguments]))


def test_only_what_is_typed_is_an_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse() == {}
    typed = parse(
        "--stages", "4", "--text", "a", "/b", "--no-compare", "--tied", "--plan", "p.json", "--schedule", "s.csv"
    )
    assert typed == {
        "stages": 4,
        "text": (str(tmp_path / "a"), "/b"),
        "compare": False,
        "tied": True,
        "plan": str(tmp_path / "p.json"),
        "schedule": str(tmp_path / "s.csv"),
    }


def test_every_field_can_be_typed() -> None:
    parser = argparse.ArgumentParser()
    train = add_train_parser(parser.add_subparsers())
    assert {f.name for f in fields(TrainConfig)} | {"help", "out", "resume"} == {a.dest for a in train._actions}


def test_defaults_are_two_stages_of_eight_microbatches() -> None:
    config = TrainConfig()
    assert (config.stages, config.microbatches, config.schedule, config.mode) == (2, 8, "1f1b", "lp")
    assert (config.max_ratio, config.num_fewer_microbatches) == (0.8, 2)


@pytest.mark.parametrize(
    ("microbatches", "max_ratio", "expected"),
    [(8, 0.8, 2), (10, 0.7, 3), (5, 0.8, 1), (8, 0.0, 8), (8, 1.0, 1), (3, 0.5, 2)],
)
def test_fewer_microbatches_are_those_the_cap_leaves(microbatches: int, max_ratio: float, expected: int) -> None:
    assert TrainConfig(microbatches=microbatches, max_ratio=max_ratio).num_fewer_microbatches == expected


def test_learning_rate_rises_and_stays() -> None:
    config = TrainConfig(learning_rate=1.0, learning_rate_warmup=4)
    assert [config.learning_rate_at(step) for step in (1, 2, 4, 5, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert TrainConfig(learning_rate=1.0, learning_rate_warmup=0).learning_rate_at(1) == 1.0


def test_every_option_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"(?s)4 problems.*--steps.*got 0.*--learning-rate.*nan.*--max-ratio.*--dtype"):
        TrainConfig(steps=0, learning_rate=float("nan"), max_ratio=1.5, dtype="float8")
    with pytest.raises(ValueError, match="at most 4 stages"):
        TrainConfig(layers=2, stages=5)


def test_options_survive_json() -> None:
    config = TrainConfig(text=("/a", "/b"), plan="/p.json", steps=7, learning_rate=0.1)
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "7"}, "option 'steps' has the wrong type"),
        ({"steps": True}, "option 'steps' has the wrong type"),
        ({"steps": 1.0}, "option 'steps' has the wrong type"),
        ({"text": "abc"}, "option 'text' has the wrong type"),
        ({"text": [1]}, "option 'text' has the wrong type"),
        ({"plan": 1}, "option 'plan' has the wrong type"),
        ({"compare": 1}, "option 'compare' has the wrong type"),
        ({"more": 1}, "option 'more' is unknown"),
        ({"steps": -1}, "--steps is out of range"),
    ],
)
def test_damaged_options_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_json({**TrainConfig().to_json(), **change})
    missing = TrainConfig().to_json()
    del missing["width"]
    with pytest.raises(ValueError, match="option 'width' is missing"):
        TrainConfig.from_json(missing)


def test_options_that_matter_may_not_change() -> None:
    config = TrainConfig()
    assert config.differences(TrainConfig(text=("/moved",), checkpoint_every=3)) == []
    assert config.differences(TrainConfig(width=128, compare=False)) == [
        "--width: 256 there, 128 here",
        "--no-compare: True there, False here",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--steps", "0"], "--steps is out of range: expected at least 1, got 0."),
        (["train", "--text", "nowhere"], "the text does not exist: expected a file or folder, got '"),
        (["train", "--plan", "nowhere.json"], "nowhere.json"),
        (["train", "--schedule", "nowhere.csv"], "nowhere.csv"),
        (["train", "--schedule", "spiral"], "spiral"),
        (["train", "--resume", "nowhere"], "there is no run to resume"),
        (["train", "--heads", "3"], "--width 258"),
        (["train", "--width", "0", "--layers", "-1"], "2 problems"),
        (["train", "--sequence-length", "100000000"], "the text is too short"),
        (["train", "--device", "cuda"], "--device cuda: expected a GPU that this torch can use, got none."),
    ],
)
def test_wrong_use_is_one_clean_message_and_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("timelyfreeze: error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == [], "something was written before the options were checked"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["train", "--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["train", "--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
        (["train", "--mode", "guess"], "argument --mode: invalid choice: 'guess'"),
    ],
)
def test_mistyping_is_answered_with_usage_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "usage: timelyfreeze" in captured.err
    assert message in captured.err


def test_version_and_help_need_no_torch() -> None:
    program = (
        "import sys\nfrom timelyfreeze.cli.main import main\n"
        "for arguments in (['--version'], ['train', '--help']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit as exit: assert not exit.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"timelyfreeze {timelyfreeze.__version__}" in done.stdout
    assert "--max-ratio R" in done.stdout
    assert "(default: 0.8)" in done.stdout
