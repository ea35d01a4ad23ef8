"""The CSV form that torch.distributed.pipelining reads and writes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.random_schedules import random_schedule
from timelyfreeze.errors import ScheduleError
from timelyfreeze.schedule import Schedule, create_schedule


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    return path


def refused(tmp_path: Path, text: str) -> str:
    path = written(tmp_path, text)
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_one_row_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    create_schedule("1f1b", num_ranks=2, num_microbatches=2).to_csv(path)
    assert path.read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_round_trip(tmp_path: Path) -> None:
    for seed in range(40):
        schedule = random_schedule(random.Random(seed))
        path = tmp_path / f"{seed}.csv"
        schedule.to_csv(path)
        assert Schedule.from_csv(path, name=schedule.name) == schedule
        assert Schedule.from_csv(path).name == str(seed)


def test_idle_cells_blanks_line_ends_and_marks_are_fine(tmp_path: Path) -> None:
    text = "\ufeff0F0, 0F1,,,0B0,0B1\r\n,1F0,1B0 ,1F1,1B1,\r\n\r\n,,\r\n"
    assert Schedule.from_csv(written(tmp_path, text), name="1f1b") == create_schedule(
        "1f1b", num_ranks=2, num_microbatches=2
    )


def test_torch_reads_what_we_write_and_we_read_what_torch_writes(tmp_path: Path) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = create_schedule("1f1b", num_ranks=3, num_microbatches=4)
    path = tmp_path / "ours.csv"
    schedule.to_csv(path)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    parsed = [[torch_schedules._Action.from_str(cell) for cell in row] for row in rows]
    theirs = "\n".join(",".join(str(action) for action in row) for row in parsed)
    assert Schedule.from_csv(written(tmp_path, theirs), name="1f1b") == schedule


def test_bad_cells_name_row_and_column(tmp_path: Path) -> None:
    message = refused(tmp_path, "0F0,0B0\n1F0,,oops\n9x,1B0\n")
    assert "row 2, column 3: 'oops' is not an action" in message
    assert "row 3, column 1: '9x' is not an action" in message
    assert "such as 0F1" in message
    assert "such as 0SEND_F1" in message


def test_faults_of_the_schedule_name_row_and_column_too(tmp_path: Path) -> None:
    message = refused(tmp_path, "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1\n")
    assert "1B1 is missing on rank 1, which does 1F1 (row 2, column 4)" in message
    assert "^^^" in message


def test_mismatched_microbatches_and_stages_are_explained(tmp_path: Path) -> None:
    assert "stage 1 has 1 micro-batches where 2 exist" in refused(tmp_path, "0F0,0F1,0B0,0B1\n1F0,1B0\n")
    assert "stage 1 has no actions, though the stages go up to 2" in refused(tmp_path, "0F0,0B0\n2F0,2B0\n")


@pytest.mark.parametrize("text", ["", "\n\n", ",,\n,\n"])
def test_empty_files(tmp_path: Path, text: str) -> None:
    assert "a schedule without actions" in refused(tmp_path, text)


def test_an_empty_row_between_ranks(tmp_path: Path) -> None:
    assert "rank 1 has no actions" in refused(tmp_path, "0F0,0B0\n\n1F0,1B0\n")


@pytest.mark.parametrize("raw", [b"\xff\xfe0\x00F\x00", b"\x00" * 64, bytes(range(128, 256)), b'"' + b"x" * 200_000])
def test_files_that_are_no_text(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "binary.csv"
    path.write_bytes(raw)
    with pytest.raises(ScheduleError, match=r"binary\.csv"):
        Schedule.from_csv(path)


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Schedule.from_csv(tmp_path / "nowhere.csv")


def test_random_damage_is_explained(tmp_path: Path) -> None:
    """One character changed, dropped or added: read as some schedule that can run, or refused by name."""
    draw = random.Random(0)
    clean = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    num_refused = 0
    for _ in range(300):
        at = draw.randrange(len(clean))
        text = clean[:at] + draw.choice(["", draw.choice('0123FBIW,\n" x'), clean[at] * 2]) + clean[at + 1 :]
        path = written(tmp_path, text)
        refusal = f"{path}"
        try:
            Schedule.from_csv(path)
        except ScheduleError as error:
            refusal = str(error)
            num_refused += 1
        assert str(path) in refusal
    assert num_refused > 150
