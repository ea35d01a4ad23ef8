"""The CSV form with sends and receives: written so that it runs, and read only if it can."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.random_schedules import random_schedule
from timelyfreeze.errors import ScheduleError
from timelyfreeze.schedule import Action, Schedule, create_schedule, schedule_names
from timelyfreeze.schedule.communication import add_moves
from timelyfreeze.schedule.graph import graph_of

TINY = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def load(tmp_path: Path, text: str) -> Schedule:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    return Schedule.from_csv(path)


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "schedule.csv") in str(caught.value)
    return str(caught.value)


def attempt(tmp_path: Path, text: str) -> str | None:
    """Why a text is refused; None if it is not."""
    try:
        load(tmp_path, text)
    except ScheduleError as error:
        return str(error)
    return None


def text_of(rows: list[list[str]]) -> str:
    return "\n".join(",".join(row) for row in rows) + "\n"


def test_written_with_communication(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    create_schedule("1f1b", num_ranks=2, num_microbatches=2).to_csv(path, communication=True)
    assert path.read_text() == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
    )


def test_stages_of_one_rank_send_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    create_schedule("zbv", num_ranks=1, num_microbatches=1).to_csv(path, communication=True)
    assert path.read_text() == "0F0,1F0,1B0,0B0\n"


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    schedules = [random_schedule(random.Random(seed)) for seed in range(60)]
    for name in schedule_names():
        schedules += [create_schedule(name, num_ranks=p, num_microbatches=m) for p, m in ((1, 2), (3, 4), (4, 9))]
    for schedule in schedules:
        schedule.to_csv(path, communication=True)
        assert Schedule.from_csv(path, name=schedule.name) == schedule


@pytest.mark.parametrize("name", schedule_names())
def test_written_order_runs_even_where_a_send_lasts_until_it_is_received(name: str) -> None:
    for num_ranks, num_microbatches in ((2, 3), (3, 4), (4, 9)):
        schedule = create_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        left = [list(row) for row in add_moves(graph_of(schedule))]
        while any(left):
            heads = {row[0]: row for row in left if row}
            ready = [cell for cell in heads if isinstance(cell, Action) or cell.partner in heads]
            assert ready, heads
            for cell in ready:
                heads[cell].pop(0)


def test_split_backward_is_read_as_written(tmp_path: Path) -> None:
    """Nothing is merged: 1I0 and 1W0 stand side by side and stay."""
    schedule = load(tmp_path, "0F0,0I0,0W0\n1F0,1I0,1W0\n")
    schedule.to_csv(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == "0F0,0I0,0W0\n1F0,1I0,1W0\n"


def test_cells_about_sharded_weights_are_left_out(tmp_path: Path) -> None:
    plain = load(tmp_path, TINY)
    assert load(tmp_path, TINY.replace("0F0,", "0UNSHARD,0F0,").replace("0B0", "0B0,0REDUCE_GRAD,0RESHARD")) == plain
    assert (
        load(tmp_path, "0UNSHARD,0F0,0B0,0RESHARD\n1F0,1B0\n").num_ranks == 2
    )  # no transfer is named: none is checked


def test_overlapped_pairs_are_two_actions(tmp_path: Path) -> None:
    schedule = load(tmp_path, "0F0,(0F1;0B0)OVERLAP_F_B,( 0F2 ; 0I1 )OVERLAP_F_B,0W1,0B2\n")
    assert [str(action) for action in schedule.ranks[0]] == ["0F0", "0F1", "0B0", "0F2", "0I1", "0W1", "0B2"]


@pytest.mark.parametrize(
    "cell",
    ["(0F1)OVERLAP_F_B", "(0B0;0F1)OVERLAP_F_B", "(0F1;0W0)OVERLAP_F_B", "(0F1;0B0;0F2)OVERLAP_F_B", "OVERLAP_F_B"],
)
def test_other_pairs_are_refused(tmp_path: Path, cell: str) -> None:
    message = refused(tmp_path, f"0F0,{cell},0B1\n")
    assert f"row 1, column 2: '{cell}' is not a forward and a backward such as (0F1;1B0)OVERLAP_F_B" in message


@pytest.mark.parametrize("cell", ["0SEND_F", "SEND_F0", "0SEND_W0", "0UNSHARD0", "UNSHARD", "(0F1;0B0)", "0SENDF0"])
def test_cells_that_are_nothing(tmp_path: Path, cell: str) -> None:
    assert f"row 2, column 1: '{cell}' is not an action" in refused(tmp_path, f"0F0,0B0\n{cell},1F0,1B0\n")


def test_a_missing_transfer(tmp_path: Path) -> None:
    message = refused(tmp_path, TINY.replace("0RECV_B0,", ""))
    assert "0RECV_B0 is missing on rank 0, which does 0B0 (row 1, column 3)" in message


def test_a_doubled_transfer(tmp_path: Path) -> None:
    message = refused(tmp_path, TINY.replace("1F0,", "1F0,,1RECV_F0,"))
    assert "1RECV_F0 is there 2 times, first at row 2, column 1 (row 2, column 4)" in message


def test_transfers_that_nobody_needs(tmp_path: Path) -> None:
    same_rank = refused(tmp_path, "0F0,0SEND_F0,1F0,1B0,0B0,2RECV_F0\n")
    assert "0SEND_F0 is not needed: stages 0 and 1 are both on rank 0 (row 1, column 2)" in same_rank
    assert "2RECV_F0 is not needed: the stages go from 0 to 1 (row 1, column 6)" in same_rank
    assert "0RECV_F0 is not needed: the stages go from 0 to 1" in refused(tmp_path, "0RECV_F0," + TINY)
    assert "1SEND_B7 is not needed: there is no such micro-batch" in refused(tmp_path, TINY.rstrip() + ",1SEND_B7\n")


def test_a_transfer_on_another_rank(tmp_path: Path) -> None:
    message = refused(tmp_path, "0F0,0SEND_F0,0RECV_B0,0B0,1SEND_B0\n1RECV_F0,1F0,1B0\n")
    assert "1SEND_B0 is on rank 0, but stage 1 is on rank 1 (row 1, column 5)" in message


def test_a_send_before_its_data_and_a_receive_after_its_reader(tmp_path: Path) -> None:
    message = refused(tmp_path, "0SEND_F0,0F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert "0SEND_F0 comes before 0F0, which makes what it sends (row 1, column 1)" in message
    assert "0RECV_B0 comes after 0B0, which needs it (row 1, column 4)" in message
    assert message.endswith(
        "rank 0 | 0SEND_F0 0F0      0B0      0RECV_B0\n"
        "         ^^^^^^^^\n"
        "rank 1 | 1RECV_F0 1F0      1B0      1SEND_B0"
    )  # fmt: skip


def test_messages_between_two_ranks_keep_their_order(tmp_path: Path) -> None:
    message = refused(
        tmp_path,
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1RECV_F0,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n",
    )
    assert "1RECV_F1 is the next to be received from rank 0, which sends 0SEND_F0 first" in message
    assert "messages between two ranks keep their order (row 2, column 1)" in message


def test_transfers_that_wait_for_each_other(tmp_path: Path) -> None:
    """The actions can run; the transfers cannot: rank 0 waits for a gradient before it sends what that comes from."""
    message = refused(tmp_path, "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    chain = message.split("no rank can go on: ")[1].split(" (")[0]
    assert set(chain.split(" waits for ")) == {"0RECV_B0", "1SEND_B0", "1B0", "1F0", "1RECV_F0", "0SEND_F0"}
    assert "rank 0 | 0F0      0RECV_B0 0SEND_F0 0B0\n" in message
    assert "^^^^^^^^" in message


def test_faults_of_the_actions_name_their_cells_too(tmp_path: Path) -> None:
    message = refused(tmp_path, TINY.replace("1F0,1B0", "1B0,1F0"))
    assert "1B0 comes before 1F0, which it needs (row 2, column 2)" in message


def can_run(rows: list[list[str]]) -> bool:
    """Run the rows like ranks with one mailbox from each to each, in which messages keep their order.

    The oracle: written from what the cells mean, it knows neither graphs nor lists of what is needed.
    """
    home = {cell.split("F")[0]: rank for rank, row in enumerate(rows) for cell in row if is_action(cell, "F")}
    at, mail = [0] * len(rows), dict[tuple[int, int], list[str]]()
    has: list[set[str]] = [set() for _ in rows]

    def step(rank: int, cell: str) -> bool:
        kind = cell.lstrip("0123456789").rstrip("0123456789")
        stage, mb = cell.split(kind)
        above, below = str(int(stage) + 1), str(int(stage) - 1)
        if kind == "F":
            ready = stage == "0" or f"{below}F{mb}" in has[rank]
            result = cell
        elif kind in ("B", "I"):
            ready = f"{stage}F{mb}" in has[rank] and (above not in home or f"{above}G{mb}" in has[rank])
            result = f"{stage}G{mb}"
        elif kind == "W":
            return f"{stage}G{mb}" in has[rank]
        elif kind.startswith("SEND"):
            result = f"{stage}{'F' if kind == 'SEND_F' else 'G'}{mb}"
            peer = home[above if kind == "SEND_F" else below]
            ready = result in has[rank]
            if ready:
                mail.setdefault((rank, peer), []).append(result)
        else:
            peer, result = (home[below], f"{below}F{mb}") if kind == "RECV_F" else (home[above], f"{above}G{mb}")
            box = mail.get((peer, rank), [])
            ready = box[:1] == [result]
            if ready:
                box.pop(0)
        if ready:
            has[rank].add(result)
        return ready

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and step(rank, row[at[rank]]):
                at[rank] += 1
                moved = True
    return all(position == len(row) for position, row in zip(at, rows, strict=True)) and not any(mail.values())


def is_action(cell: str, kind: str) -> bool:
    return cell.strip("0123456789") == kind


def mutate(rows: list[list[str]], draw: random.Random) -> list[list[str]]:
    """Swap two cells of a rank, move one, drop, double or move a transfer to another rank."""
    rows = [list(row) for row in rows]
    row = draw.choice(rows)
    at, other = draw.randrange(len(row)), draw.randrange(len(row))
    transfers = [i for i, cell in enumerate(row) if "_" in cell]
    kind = draw.choice(["swap", "near", "move", "drop", "double", "rank"])
    if kind == "swap" or not transfers:
        row[at], row[other] = row[other], row[at]
    elif kind == "near":
        near = min(at, len(row) - 2)
        row[near], row[near + 1] = row[near + 1], row[near]
    elif kind == "move":
        row.insert(other, row.pop(draw.choice(transfers)))
    elif kind == "drop":
        row.pop(draw.choice(transfers))
    elif kind == "double":
        row.insert(other, row[draw.choice(transfers)])
    else:
        target = draw.choice([r for r in rows if r is not row])
        target.insert(draw.randint(0, len(target)), row.pop(draw.choice(transfers)))
    return rows


def check_mutant(seed: int, tmp_path: Path) -> bool:
    """Whether this seed's mutant was refused; fails where reader and oracle disagree."""
    draw = random.Random(seed)
    name = draw.choice(schedule_names())
    num_ranks, num_microbatches = draw.randint(2, 4), draw.randint(1, 6)
    schedule = create_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    clean = [[str(cell) for cell in row] for row in add_moves(graph_of(schedule))]
    assert can_run(clean)
    mutant = mutate(clean, draw)
    same_cells = [sorted(row) for row in mutant] == [sorted(row) for row in clean]
    refusal = attempt(tmp_path, text_of(mutant))
    assert (refusal is None) == (same_cells and can_run(mutant)), (seed, refusal)
    if refusal is None:
        return False
    assert "^^" in refusal
    assert ", column " in refusal
    return True


def test_mutants_are_refused_exactly_where_ranks_would_hang(tmp_path: Path) -> None:
    num_refused = sum(check_mutant(seed, tmp_path) for seed in range(400))
    assert num_refused > 200


@pytest.mark.long
def test_mutants_long(tmp_path: Path) -> None:
    for seed in range(400, 8_000):
        check_mutant(seed, tmp_path)
