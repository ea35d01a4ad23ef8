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
        *("--stages", "4", "--text", "a", "/b", "--no-compare", "--tied", "--plan", "p.json", "--schedule", "s.csv"),
        *("--stage-max-ratio", "2=0.5,0=0.25", "--target-ms", "12.5", "--live-microbatches", "3", "--compare-modes"),
        *("--min-live-ratio", "0.5"),
    )
    assert typed == {
        "stages": 4,
        "text": (str(tmp_path / "a"), "/b"),
        "compare": False,
        "tied": True,
        "plan": str(tmp_path / "p.json"),
        "schedule": str(tmp_path / "s.csv"),
        "stage_max_ratio": ((0, 0.25), (2, 0.5)),
        "target_ms": 12.5,
        "live_microbatches": 3,
        "compare_modes": True,
        "min_live_ratio": 0.5,
    }


def test_every_field_can_be_typed() -> None:
    parser = argparse.ArgumentParser()
    train = add_train_parser(parser.add_subparsers())
    assert {f.name for f in fields(TrainConfig)} | {"help", "out", "resume"} == {a.dest for a in train._actions}


def test_defaults_are_two_stages_of_eight_microbatches() -> None:
    config = TrainConfig()
    assert (config.stages, config.microbatches, config.schedule, config.mode) == (2, 8, "1f1b", "cut")
    assert (config.max_ratio, config.min_live_ratio, config.num_fewer_microbatches) == (0.3, 0.25, 6)
    assert (config.other_mode, TrainConfig(mode="lp").other_mode) == ("lp", "cut")


@pytest.mark.parametrize(
    ("microbatches", "max_ratio", "expected"),
    [(8, 0.8, 2), (10, 0.7, 3), (5, 0.8, 1), (8, 0.0, 8), (8, 1.0, 1), (3, 0.5, 2)],
)
def test_fewer_microbatches_are_those_the_cap_leaves(microbatches: int, max_ratio: float, expected: int) -> None:
    assert TrainConfig(microbatches=microbatches, max_ratio=max_ratio).num_fewer_microbatches == expected
    three = TrainConfig(stages=3, microbatches=microbatches, max_ratio=max_ratio)
    assert three.num_fewer_microbatches == expected, "a mean of equal caps is another number"


@pytest.mark.parametrize(
    ("options", "num_ranks", "num_stages"),
    [
        ({"schedule": "zbv", "stages": 4}, 2, 4),
        ({"schedule": "ZB-V", "stages": 4}, 2, 4),
        ({"schedule": "looped_bfs", "stages": 6, "stages_per_rank": 3}, 2, 6),
        ({"schedule": "zb_h1", "stages": 3}, 3, 3),
    ],
)
def test_stages_are_dealt_out_to_ranks(options: dict[str, Any], num_ranks: int, num_stages: int) -> None:
    schedule = TrainConfig(**options).sized_schedule(5)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (num_ranks, num_stages, 5)


def test_fewer_microbatches_go_by_the_largest_of_the_stages_caps() -> None:
    config = TrainConfig(stages=4, microbatches=8, max_ratio=0.25, stage_max_ratio=((0, 0.0), (3, 0.5)))
    assert config.num_fewer_microbatches == 4  # as many as the parameters of stage 3 see


def test_learning_rate_rises_and_stays() -> None:
    config = TrainConfig(learning_rate=1.0, learning_rate_warmup=4)
    assert [config.learning_rate_at(step) for step in (1, 2, 4, 5, 1000)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert TrainConfig(learning_rate=1.0, learning_rate_warmup=0).learning_rate_at(1) == 1.0


def test_every_option_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"(?s)4 problems.*--steps.*got 0.*--learning-rate.*nan.*--max-ratio.*--dtype"):
        TrainConfig(steps=0, learning_rate=float("nan"), max_ratio=1.5, dtype="float8")
    with pytest.raises(ValueError, match="at most 4 stages"):
        TrainConfig(layers=2, stages=5)
    with pytest.raises(ValueError, match=r"(?s)5 problems.*min-live.*of stage 7.*no stage.*twice.*target-ms"):
        TrainConfig(min_live_ratio=-0.1, target_ms=0.0, stage_max_ratio=((7, 1.5), (7, 0.5)))
    with pytest.raises(ValueError, match="--live-microbatches is out of range: expected at least 1, got 0"):
        TrainConfig(microbatches=1, live_microbatches=0)


@pytest.mark.parametrize(
    ("options", "one", "other"),
    [
        ({"live_microbatches": 4}, "--live-microbatches", "--microbatches"),
        ({"live_microbatches": 8, "stage_max_ratio": ((0, 0.1),)}, "--live-microbatches", "--stage-max-ratio"),
        ({"live_microbatches": 8, "target_ms": 1.0}, "--live-microbatches", "--target-ms"),
        ({"live_microbatches": 8, "plan": "/p.json"}, "--live-microbatches", "--plan"),
        ({"live_microbatches": 8, "schedule": "/s.csv"}, "--live-microbatches", "a schedule from a file"),
        ({"plan": "/p.json", "target_ms": 1.0}, "--plan", "--target-ms"),
        ({"plan": "/p.json", "compare_modes": True}, "--plan", "--compare-modes"),
        ({"compare": False, "compare_modes": True}, "--compare-modes", "--no-compare"),
    ],
)
def test_options_that_say_two_things_exclude_each_other(options: dict[str, Any], one: str, other: str) -> None:
    with pytest.raises(ValueError, match=f"^{one} and {other} exclude each other"):
        TrainConfig(**options)


def test_options_survive_json() -> None:
    for config in (
        TrainConfig(text=("/a", "/b"), plan="/p.json", steps=7, learning_rate=0.1),
        TrainConfig(stage_max_ratio=((0, 0.25), (1, 1.0)), target_ms=3.5, compare_modes=True, mode="lp"),
        TrainConfig(microbatches=3, live_microbatches=3),
    ):
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
        ({"stage_max_ratio": {"0": 0.5}}, "option 'stage_max_ratio' has the wrong type"),
        ({"stage_max_ratio": [[0]]}, "option 'stage_max_ratio' has the wrong type"),
        ({"stage_max_ratio": [["0", 0.5]]}, "option 'stage_max_ratio' has the wrong type"),
        ({"target_ms": "5"}, "option 'target_ms' has the wrong type"),
        ({"live_microbatches": 2.0}, "option 'live_microbatches' has the wrong type"),
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
    assert config.differences(vars(TrainConfig(text=("/moved",), checkpoint_every=3))) == []
    assert config.differences({"width": 128, "compare": False, "stage_max_ratio": ((0, 0.1),), "steps": 220}) == [
        "--width: 256 there, 128 here",
        "--stage-max-ratio: default there, 0=0.1 here",
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
        (["train", "--live-microbatches", "4", "--max-ratio", "0.3"], "--live-microbatches and --max-ratio exclude"),
        (["train", "--live-microbatches", "4", "--microbatches", "6"], "--live-microbatches and --microbatches ex"),
        (["train", "--live-microbatches", "0"], "--live-microbatches is out of range"),
        (["train", "--stage-max-ratio", "2=0.5"], "--stage-max-ratio names no stage: expected 0 to 1, got 2"),
        (["train", "--heads", "3"], "--width 258"),
        (["train", "--width", "0", "--layers", "-1"], "2 problems"),
        (["train", "--sequence-length", "100000000"], "the text is too short"),
        (["train", "--schedule", "zbv", "--stages", "5"], "a multiple of 2, the stages that a rank holds under zbv"),
        (["train", "--schedule", "zbv", "--stages", "5"], "Take --stages 4 or 6."),
        (["train", "--schedule", "zbv", "--stages-per-rank", "1"], "--stages-per-rank of schedule zbv: expected 2"),
        (["train", "--stages-per-rank", "0"], "--stages-per-rank is out of range: expected at least 1, got 0."),
        (["train", "--schedule", "zigzag"], "unknown schedule: expected one of gpipe, 1f1b,"),
        (["train", "--schedule", "zigzag", "--stages", "2"], "unknown schedule: expected one of gpipe, 1f1b,"),
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
        (["train", "--stage-max-ratio", "0:0.5"], "argument --stage-max-ratio: expected S=R,..., got '0:0.5'"),
        (["train", "--stage-max-ratio", "0=half"], "argument --stage-max-ratio: expected S=R,..., got '0=half'"),
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
    assert "(default: 0.3)" in done.stdout
