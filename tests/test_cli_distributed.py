"""`timelyfreeze train` under torchrun: the numbers of one process, one voice, and no rank's end loses the run."""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from tests.cli_job import TINY, rows, run, save_plan, saved, saved_weights, write_text
from tests.processes import free_port
from tests.torchrun import Finished, Launch, torchrun
from timelyfreeze.cli.config import ModelConfig, TrainConfig
from timelyfreeze.cli.errors import CommandError
from timelyfreeze.cli.launch import Launch as Processes
from timelyfreeze.cli.launch import find_launch
from timelyfreeze.cli.model import build_model
from timelyfreeze.cli.setup import check_world
from timelyfreeze.cli.stopping import StopRequest

STEPS = 40
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TRAIN = ("-m", "timelyfreeze", "train")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def options(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    plan = save_plan(tmp_path_factory.mktemp("plan") / "plan.json")
    return [*TINY, "--text", str(text), "--plan", str(plan), "--no-compare", "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def whole(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run in one process, undisturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(*options, "--out", folder, steps=None) == 0
    return folder


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    """What must not depend on clocks, of every step."""
    kept = ("run", "step", "loss", "phase", "freeze_ratio", "validation_loss", "predicted_s")
    return [tuple(row[name] for name in kept) for row in rows(folder)]


def assert_no_half_files(folder: Path) -> None:
    assert [path for path in folder.rglob("*") if ".tmp" in path.name] == []


def test_two_ranks_have_the_numbers_of_one_process_and_one_voice(
    options: list[str], text: Path, tmp_path: Path
) -> None:
    # The README's own command, on a small model; with the runs that it is compared to.
    (command,) = re.findall(r"^torchrun (--standalone .* --out runs/first)$", README, flags=re.MULTILINE)
    launched = [argument for argument in command.split() if argument != "--standalone"]
    compared = [*(option for option in options[:-1] if option != "--no-compare"), "6"]
    done = torchrun(*launched, *compared, folder=tmp_path)
    assert done.returncode == 0, done.error
    folder, alone = tmp_path / "runs" / "first", tmp_path / "alone"
    assert run(*compared, "--out", alone, steps=None) == 0
    assert numbers(folder) == numbers(alone)
    assert {row["run"] for row in rows(folder)} == {"plain", "timelyfreeze", "fewer"}
    there, here = saved_weights(folder), saved_weights(alone)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)
    assert {path.name for path in folder.iterdir()} == {path.name for path in alone.iterdir()}
    out = "".join(done.out)
    assert out.count("40 files") == out.count("plain         6/6") == out.count("Timelines of these runs") == 1
    assert_no_half_files(folder)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_killed_rank_is_started_again_and_the_run_ends_as_if_nothing_was(
    options: list[str], whole: Path, tmp_path: Path, rank: int
) -> None:
    # Without --standalone torchrun keeps its store, in which the addresses of the killed processes still are.
    launcher = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port())]
    launch = Launch([*launcher, *TRAIN, *options, "--out", "run"], tmp_path)
    killed = []

    def kill(line: str) -> None:
        if line.startswith("timelyfreeze  10/") and not killed:
            killed.append(line)
            launch.signal_rank(rank, signal.SIGKILL)

    done = launch.finish(kill)
    assert done.returncode == 0, done.error
    assert killed
    assert [line for line in done.out if line.startswith("Going on after step")], "it began anew"
    assert numbers(tmp_path / "run") == numbers(whole)
    assert f"timelyfreeze: error: rank {rank} is gone: " in done.error
    assert_no_half_files(tmp_path / "run")


def test_ctrl_c_saves_and_one_process_goes_on(options: list[str], whole: Path, tmp_path: Path) -> None:
    launch = Launch(["--standalone", "--nproc-per-node", "2", *TRAIN, *options, "--out", "run"], tmp_path)
    stopped = []

    def stop(line: str) -> None:
        if line.startswith("timelyfreeze  10/") and not stopped:
            stopped.append(line)
            launch.signal_all(signal.SIGINT)

    done = launch.finish(stop)
    folder = tmp_path / "run"
    assert done.returncode != 0
    assert stopped
    step = saved(folder).done[-1][1]
    assert 10 <= step < STEPS, done.error
    assert done.error.count("timelyfreeze: error: ") == 1
    assert f"timelyfreeze: error: stopped after step {step} of timelyfreeze; the last checkpoint is kept" in done.error
    assert_no_half_files(folder)
    assert run("--resume", folder, steps=None) == 0
    assert numbers(folder) == numbers(whole)


def test_a_stage_that_fails_is_told_by_its_rank_and_three_ranks_go_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*TINY, "--text", str(text), "--no-compare", "--steps", "4", "--out", "run"]
    done = torchrun("--nproc-per-node", 2, *TRAIN, *options, "--learning-rate", "1e38", folder=tmp_path)
    assert done.returncode != 0
    told = re.findall(r"^timelyfreeze: error: (.*)$", done.error, flags=re.MULTILINE)
    assert sorted(line.startswith("stage 1 failed in action 1F") for line in told) == [False, True], done.error
    assert "rank 0 ends because rank 1 failed" in told
    assert "timelyfreeze/cli" not in done.error, "a traceback of the command"
    step = saved(tmp_path / "run").done[-1][1]
    # With a rate that is too high it fails again; so this only shows that three ranks take over what two have left.
    again = torchrun("--nproc-per-node", 3, *TRAIN, "--resume", "run", folder=tmp_path)
    assert f"Going on after step {step} of timelyfreeze, now with --stages 3" in "".join(again.out), again.error
    assert again.error.count("stage 2 failed in action 2F") == 1


@pytest.mark.long
def test_two_machines_start_again_together(options: list[str], whole: Path, tmp_path: Path) -> None:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "first"]
    arguments = ["--nnodes", "2", "--nproc-per-node", "1", *meeting, "--max-restarts", "3"]
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    launches = [Launch([*arguments, *TRAIN, *options, "--out", str(tmp_path / "run")], folder) for folder in folders]
    lines: SimpleQueue[tuple[int, str]] = SimpleQueue()

    def watch(index: int) -> Finished:
        return launches[index].finish(lambda line: lines.put((index, line)))

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(watch, index) for index in (0, 1)]
        # torchrun decides which of the two has rank 0, which prints; the other one's process is killed.
        speaker = next(index for index, line in iter(lines.get, None) if line.startswith("timelyfreeze  10/"))
        launches[1 - speaker].signal_rank(1, signal.SIGKILL)
        done = [end.result() for end in ends]
    assert [one.returncode for one in done] == [0, 0], [one.error for one in done]
    assert "Going on after step" in "".join(line for one in done for line in one.out)
    assert numbers(tmp_path / "run") == numbers(whole)


@pytest.mark.long
def test_replicas_share_out_the_batch_and_tied_weights_lie_in_a_v(text: Path, tmp_path: Path) -> None:
    common = [*TINY, "--text", str(text), "--no-compare", "--tied", "--steps", "6", "--schedule", "zbv"]
    plain = [*common, "--layers", "4", "--max-ratio", "0"]
    halves = [*plain, "--microbatch-size", "1", "--data-parallel", "2", "--out", "two"]
    done = torchrun("--nproc-per-node", 4, *TRAIN, *halves, folder=tmp_path)
    assert done.returncode == 0, done.error
    assert run(*plain, "--microbatch-size", "2", "--out", tmp_path / "one", steps=None) == 0
    for mine, its in zip(rows(tmp_path / "two"), rows(tmp_path / "one"), strict=True):
        for name in ("loss", "validation_loss"):
            assert mine[name] == (None if its[name] is None else pytest.approx(its[name], rel=1e-5))


def test_the_librarys_lines_train_on_two_ranks(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(import torch\.distributed as dist\n.*?)```", README, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\nfrom timelyfreeze import FreezingPipeline\n"
        "def make_part(): return nn.Linear(4, 4)\n"
        "torch.manual_seed(0)\nloss_fn = nn.functional.mse_loss\n"
        "batches = [(torch.ones(8, 4), torch.zeros(8, 4)) for _ in range(5)]\n"
        f"{snippet}\nsteps = optimizer.state[next(pipe.parameters())]['step'].item()\n"
        "import os\nfrom pathlib import Path\nPath('steps-' + os.environ['RANK']).write_text(str(steps))\n"
    )
    done = torchrun("--nproc-per-node", 2, "train.py", folder=tmp_path)
    assert done.returncode == 0, done.error
    # A file a rank: what two ranks print into one pipe comes in pieces, in any order.
    assert [(tmp_path / f"steps-{rank}").read_text() for rank in range(2)] == ["5.0", "5.0"]
    assert (tmp_path / "runs" / "mine" / "step-000005").is_dir()


# --- without a launch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wanted", [{0, 1}, {2, 3}, {1}, {0, 3}])
def test_a_part_of_the_model_has_the_weights_of_the_whole(tied: bool, wanted: set[int]) -> None:
    config = ModelConfig(width=16, num_layers=2, num_heads=2, sequence_length=8, tied=tied)
    model, part = build_model(config, 7), build_model(config, 7, wanted)
    for index, (child, own) in enumerate(zip(model, part, strict=True)):
        if index in wanted:
            for name, value in [*child.named_parameters(), *child.named_buffers()]:
                assert torch.equal(value, {**dict(own.named_parameters()), **dict(own.named_buffers())}[name])
        elif 0 < index < 3:
            assert all(parameter.is_meta for parameter in own.parameters()), "it takes memory"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: expected below WORLD_SIZE = 2, got 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK: expected a count, got 'one'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        find_launch(environment)


def test_a_process_alone_needs_no_address() -> None:
    assert find_launch({"RANK": "0", "WORLD_SIZE": "1"}).size == 1
    assert find_launch({"RANK": "1"}) == Processes()


@pytest.mark.parametrize(
    ("size", "data_parallel", "refusal"),
    [(1, 1, None), (2, 1, None), (4, 2, None), (3, 1, "expected 2 processes"), (1, 2, "expected 4 processes")],
)
def test_there_is_a_process_for_every_rank(size: int, data_parallel: int, refusal: str | None) -> None:
    config = TrainConfig(data_parallel=data_parallel)
    with nullcontext() if refusal is None else pytest.raises(CommandError, match=refusal):
        check_world(config, config.sized_schedule(8), Processes(size=size))


@pytest.mark.parametrize(
    ("run_id", "num_restarts", "saved_id", "follows"),
    [("none", 0, "none", False), ("none", 1, "none", True), ("a", 0, "a", True), ("a", 1, "b", False)],
)
def test_only_a_launch_started_again_goes_on_by_itself(
    run_id: str, num_restarts: int, saved_id: str, follows: bool
) -> None:
    assert Processes(size=2, run_id=run_id, num_restarts=num_restarts).follows(saved_id) is follows


def test_another_number_of_stages_is_for_runs_that_nothing_ties_to_theirs() -> None:
    assert TrainConfig(compare=False).can_be_resized
    assert not TrainConfig().can_be_resized
    assert not TrainConfig(compare=False, plan="plan.json").can_be_resized
    assert not TrainConfig(compare=False, schedule="mine.csv").can_be_resized


def test_processes_stop_when_they_have_agreed_and_take_torchruns_echo_for_the_same() -> None:
    with StopRequest(is_shared=True) as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # torchrun passes on what the terminal has sent
        assert stop.own_signal == signal.SIGINT
        assert not stop.requested
        with stop.suspended():  # a rank that waits for one that is gone must not wait to be told
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        stop.agree([None, stop.own_signal])
        assert stop.requested
