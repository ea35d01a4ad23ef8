"""What the README says is so: its code runs, its commands exist, its numbers are those of their rows."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from timelyfreeze import AsyncPipeline, FreezeConfig, create_schedule, simulate
from timelyfreeze.cli.config import TrainConfig
from timelyfreeze.cli.metrics import StepRow
from timelyfreeze.cli.options import add_train_parser, train_options
from timelyfreeze.cli.stream_table import render_stream
from timelyfreeze.schedule import default_stages_per_rank, schedule_names
from timelyfreeze.schedule.asynchronous import drift_bound
from timelyfreeze.schedule.passes import EQUAL_TIMES_S

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
# | what | number | file: field (key=value, ...) |
CLAIMS = re.findall(
    r"^\|[^|]+\| \**([\d.]+)[^|]*\| `(\w+)`: `([\w.]+)`(?: where `([^`]+)`)? \|$", README, flags=re.MULTILINE
)


def test_the_first_snippet_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    names = {
        "model": model,
        "loss_fn": nn.functional.mse_loss,
        "batches": [(torch.randn(16, 4), torch.randn(16, 4)) for _ in range(3)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    before = [p.detach().clone() for p in model.parameters()]
    exec(SNIPPETS[0], names)
    names["pipe"].close()
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def snippet_with(text):
    (found,) = (snippet for snippet in SNIPPETS if text in snippet)
    return found


def test_the_snippet_of_freezing_without_a_flush_trains(capsys):
    names = {
        "AsyncPipeline": AsyncPipeline,
        "FreezeConfig": FreezeConfig,
        "torch": torch,
        "model": nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
        "loss_fn": nn.functional.mse_loss,
        "batches": [(torch.randn(16, 4), torch.randn(16, 4)) for _ in range(3)],
    }
    exec(snippet_with("pipe = AsyncPipeline("), names)
    names["pipe"].close()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0", "1", "2", "None"]


def test_planning_needs_no_torch():
    script = "import sys\nsys.modules['torch'] = None\n" + snippet_with("from timelyfreeze import ActionCosts")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "638 ms -> 390 ms\n", done.stderr


def test_the_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:\$ |`)make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    options = re.findall(r"timelyfreeze train(.*)", README)
    shown = subprocess.run(
        [sys.executable, "-m", "timelyfreeze", "train", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    for option in re.findall(r"--[a-z-]+", " ".join(options)):
        assert option in shown, option


def test_the_plan_is_what_the_command_prints():
    command, shown = re.search(r"\$ timelyfreeze (plan .*)\n((?:.*\n)*?)```", README).groups()
    done = subprocess.run(
        [sys.executable, "-m", "timelyfreeze", *command.split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert shown.splitlines() == printed[: len(shown.splitlines())]


def test_the_table_without_a_flush_is_of_the_commands_form_and_adds_up():
    command, shown = re.search(r"\$ timelyfreeze train (--schedule paci .*)\n((?:.*\n)*?)```", README).groups()
    parser = argparse.ArgumentParser()
    add_train_parser(parser.add_subparsers())
    config = TrainConfig(**train_options(parser.parse_args(["train", *command.split()])))
    seconds = [float(line.split()[-4]) for line in shown.splitlines() if line.startswith(("1f1b", "paci  "))]
    ends = [("plain", seconds[0], None), ("paci", seconds[1], (1, 0))]
    made = {name: [StepRow(name, 150, elapsed_s=s, validation_loss=2.0, drift=drift)] for name, s, drift in ends}
    printed = render_stream(config, made)
    lines, form = shown.splitlines(), printed.splitlines()
    for index in (0, 1, 2, 6, 7):  # headings and rules
        assert lines[index].split() == form[index].split() or set(lines[index]) == set(form[index]) == {"─"}
    flush, stream = (re.findall(r"[\d.,]+(?=x|%| |$)", line.partition("  ")[2]) for line in lines[3:5])
    speed = float(flush[0]) / float(stream[0])
    share = config.microbatches / (config.microbatches + config.stages - 1)
    assert speed == pytest.approx(float(stream[1]), abs=0.01)
    assert [100 * share, 100 * share * speed] == pytest.approx([float(flush[2]), float(stream[2])], abs=1)
    bounds = [drift_bound(config.stages, stage, config.num_accumulated) for stage in range(config.stages)]
    assert [line.split()[:4] for line in lines[8:10]] == [
        [str(stage), str(bound), str(bound), str(config.steps)] for stage, bound in enumerate(bounds)
    ]


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            titles = re.findall(r"^#+ (.*)$", README, flags=re.MULTILINE)
            assert target[1:] in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], target
        else:
            assert (ROOT / target).exists(), target


@pytest.mark.parametrize(("number", "file", "field", "where"), CLAIMS)
def test_numbers_are_those_of_the_last_row(number, file, field, where):
    rows = [json.loads(line) for line in (ROOT / "bench" / "results" / f"{file}.jsonl").read_text().splitlines()]
    wanted = dict(re.findall(r"(\w+)=(.*?)(?=, \w+=|$)", where)) if where else {}
    matching = [row for row in rows if all(str(row.get(key)) == value for key, value in wanted.items())]
    value = matching[-1]
    for key in field.split("."):
        value = value[key]
    digits = len(number.partition(".")[2])
    assert f"{abs(value):.{digits}f}" == number


def test_there_are_numbers():
    assert len(CLAIMS) >= 8


def test_the_grid_is_what_the_command_prints():
    command, printed = re.search(r"\$ python -c '(.*)'\n((?:rank .*\n)+)", README).groups()
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == printed


def test_schedules_idle_as_the_table_says():
    rows = re.findall(r"^\| `(\w+)` \| (\d)(?: or more)? \| (.*?) \|", README, re.MULTILINE)
    assert [name for name, _, _ in rows] == schedule_names()
    for name, stages_per_rank, idle in rows:
        assert default_stages_per_rank(name) == int(stages_per_rank)
        for p in (2, 4, 8):
            schedule = create_schedule(name, num_ranks=p, num_microbatches=4 * p)
            timeline = simulate(schedule, {action: EQUAL_TIMES_S[action.kind] for action in schedule.actions})
            expected = {"3 (p − 1)": 3 * (p - 1), "p − 1": p - 1, "0": 0}[idle]
            assert max(timeline.idle_s) == expected, (name, p)
