"""A run that cannot go on as it was: refused with a reason, and nothing in its folder changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli_job import TINY, Killed, kill, run, save_plan, saved_file, saved_weights, when, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plan(tmp_path_factory.mktemp("plan") / "plan.json")


@pytest.fixture(scope="module")
def whole(text: Path, plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run under a fixed plan that has ended."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(*TINY, "--text", text, "--plan", plan, "--out", folder) == 0
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file, in folders below it too."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damage(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def damage_checkpoint(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = saved_file(folder, name)
        path.write_bytes(change(path.read_bytes()))

    return apply


def test_a_checkpoint_with_a_changed_byte_is_refused(
    text: Path, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        when(patch, ("plain", 3), kill)
        with pytest.raises(Killed):
            run(*TINY, "--text", text, "--plan", plan, "--out", tmp_path)
    path = saved_file(tmp_path, "__0_0.distcp")
    whole = path.read_bytes()
    weight = saved_weights(tmp_path)["head.projection.weight"].numpy().tobytes()
    at = whole.index(weight) + len(weight) // 2
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert run("--resume", tmp_path, steps=None) == 2
    error = capsys.readouterr().err
    assert "cannot resume from the checkpoint" in error
    assert "damaged checkpoint" in error


@pytest.mark.parametrize(
    ("spoil", "options", "message"),
    [
        (None, ("--width", "32"), "--width: 16 there, 32 here"),
        (None, ("--plan", "other.json"), "--plan: "),
        (None, ("--steps", "0"), "--steps: 6 there, 0 here"),
        (None, ("--live-microbatches", "3"), "--live-microbatches: None there, 3 here"),
        (None, ("--no-compare", "--steps", "7"), "--steps: 6 there, 7 here; --no-compare: True there, False here"),
        (None, ("--out", "elsewhere"), "--out and --resume name different folders"),
        (None, ("--text", "SHORTER"), "the text is not the one that the run was trained on"),
        (lambda folder: shutil.rmtree(folder / "checkpoints"), (), "no complete checkpoint"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), (), "the metrics of the run to resume are damaged"),
        (lambda folder: (folder / "config.json").unlink(), (), "there is no run to resume"),
        (damage_checkpoint("state.json", lambda b: b[: len(b) // 2]), (), "cannot resume from the checkpoint"),
        (damage_checkpoint(".metadata", lambda b: b[: len(b) // 2]), (), "cannot resume from the checkpoint"),
        (damage_checkpoint("__0_0.distcp", lambda b: b[: len(b) // 2]), (), "cannot resume from the checkpoint"),
        (damage_checkpoint("state.json", lambda b: b.replace(b'"format": 3', b'"format": 2')), (), "format 2"),
        (damage_checkpoint("state.json", lambda b: b.replace(b'"corpus"', b'"corps"')), (), "not a checkpoint's"),
        (damage("metrics.jsonl", lambda b: b[: len(b) // 2]), (), "the metrics of the run to resume are damaged"),
        (damage("config.json", lambda b: b[: len(b) // 2]), (), "the options of the run to resume are damaged"),
        (damage("config.json", lambda b: b.replace(b'"seed": 3', b'"seed": 4')), (), "--seed: 3 there, 4 here"),
        (damage("config.json", lambda _: b"[]"), (), "the options of the run to resume are damaged"),
        (damage("plan.json", lambda b: b[: len(b) // 2]), (), "plan.json"),
        (damage("measured.json", lambda b: b[: len(b) // 2]), (), "the measured steps cannot be read"),
    ],
)
def test_a_run_that_cannot_go_on_as_it_was_is_refused(
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None] | None,
    options: tuple[str, ...],
    message: str,
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (tmp_path / "short.txt").write_text("another text altogether")
    if spoil is not None:
        spoil(folder)
    before = contents(folder)
    options = tuple(str(tmp_path / "short.txt") if option == "SHORTER" else option for option in options)
    assert run("--resume", folder, *options, steps=None) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert contents(folder) == before, "a refused resume changed files"


def test_text_may_move_between_start_and_resume(text: Path, plan: Path, whole: Path, tmp_path: Path) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(whole, folder)
    shutil.copytree(text, moved)
    assert run("--resume", folder, "--text", moved, "--checkpoint-every", 1, steps=None) == 0
