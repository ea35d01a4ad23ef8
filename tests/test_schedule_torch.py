"""Against torch.distributed.pipelining itself: what it validates, reads, lowers and generates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from timelyfreeze.schedule import Action, Kind, Schedule, create_schedule, schedule_names

TorchRanks = dict[int, list[torch_schedules._Action | None]]
SIZES = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 4), (4, 8), (4, 9)]


def torch_actions(schedule: Schedule) -> TorchRanks:
    return {r: [torch_schedules._Action.from_str(str(a)) for a in o] for r, o in enumerate(schedule.ranks)}


def torch_reader(schedule: Schedule) -> torch_schedules._PipelineScheduleRuntime:
    """torch's runtime as far as its files need it: without stages, and so without a process group."""
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime._stages, runtime.pipeline_order, runtime._defer_pp_recv = [], {}, False
    runtime.pp_group_size, runtime._num_stages = schedule.num_ranks, schedule.num_stages
    runtime._n_microbatches = schedule.num_microbatches
    return runtime


def case(name: str, size: tuple[int, int]) -> Schedule:
    return create_schedule(name, num_ranks=size[0], num_microbatches=size[1])


@pytest.mark.parametrize("size", [*SIZES, (8, 32)])
@pytest.mark.parametrize("name", schedule_names())
def test_torch_accepts_every_schedule(name: str, size: tuple[int, int]) -> None:
    schedule = case(name, size)
    homes = torch_schedules._validate_schedule(
        torch_actions(schedule), schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    )
    assert [homes[stage] for stage in range(schedule.num_stages)] == schedule.stage_to_rank


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", schedule_names())
def test_torch_loads_and_runs_both_forms(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    """Read by torch's own loader; its simulation of sends and receives gets every rank to its end."""
    schedule = case(name, size)
    reader = torch_reader(schedule)
    schedule.to_csv(tmp_path / "plain.csv")
    reader._load_csv(str(tmp_path / "plain.csv"), format="compute_only")
    schedule.to_csv(tmp_path / "communication.csv", communication=True)
    reader._load_csv(str(tmp_path / "communication.csv"), format="compute_comms")
    done = reader._simulate()
    for rank, order in enumerate(reader.pipeline_order_with_comms.values()):
        assert [action for action in done[rank] if action is not None] == order


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", schedule_names())
def test_we_read_what_torch_lowers_to(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    """torch adds sends, receives, UNSHARD, RESHARD and REDUCE_GRAD; the same schedule comes back."""
    schedule = case(name, size)
    runtime = torch_reader(schedule)
    runtime._prepare_schedule_with_comms(torch_actions(schedule))
    path = tmp_path / "torch.csv"
    runtime._dump_csv(str(path), format="compute_comms")
    assert ("SEND_F" in path.read_text()) == (size[0] > 1)
    assert "0REDUCE_GRAD" in path.read_text()
    assert Schedule.from_csv(path, name=name) == schedule


def torch_orders(kind: type, num_ranks: int, num_microbatches: int, per_rank: int) -> TorchRanks:
    """What torch's generator yields; it needs only counts."""
    num_rounds = max(1, num_microbatches // num_ranks)
    counts = SimpleNamespace(
        pp_group_size=num_ranks,
        num_stages=num_ranks * per_rank,
        n_local_stages=per_rank,
        _stages=range(per_rank),
        _n_microbatches=num_microbatches,
        microbatches_per_round=num_microbatches // num_rounds,
    )
    return {rank: kind._calculate_single_rank_operations(counts, rank) for rank in range(num_ranks)}


def leaves(order: list[torch_schedules._Action | None]) -> list[Action]:
    """torch's actions as ours, pairs one after the other, idle slots left out."""
    flat = [leaf for action in order if action is not None for leaf in action.sub_actions or (action,)]
    return [Action.parse(str(action)) for action in flat]


def outline(order: list[Action]) -> list[tuple[int, bool, int]]:
    """Forwards and input gradients alone: where weight gradients stand between them is each generator's own."""
    return [(a.stage, a.kind is Kind.F, a.microbatch) for a in order if a.kind is not Kind.W]


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (2, 8), (4, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize(
    ("name", "kind", "per_rank"),
    [
        ("interleaved_1f1b", torch_schedules.ScheduleInterleaved1F1B, 2),
        ("interleaved_1f1b", torch_schedules.ScheduleInterleaved1F1B, 3),
        ("interleaved_zb", torch_schedules.ScheduleInterleavedZeroBubble, 2),
        ("zbv", torch_schedules.ScheduleZBVZeroBubble, 2),
        ("dualpipev", torch_schedules.ScheduleDualPipeV, 2),
    ],
)
def test_same_order_as_torchs_generator(
    name: str, kind: type, per_rank: int, num_ranks: int, num_microbatches: int
) -> None:
    ours = create_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=per_rank)
    theirs = torch_orders(kind, num_ranks, num_microbatches, per_rank)
    assert [outline(order) for order in ours.ranks] == [outline(leaves(order)) for order in theirs.values()]


@pytest.mark.parametrize("communication", [False, True])
def test_torchs_overlapped_pairs_are_read(tmp_path: Path, communication: bool) -> None:
    theirs = torch_orders(torch_schedules.ScheduleDualPipeV, 4, 10, 2)
    expected = Schedule([leaves(order) for order in theirs.values()], name="theirs")
    runtime = torch_reader(expected)
    runtime.pipeline_order = theirs
    path = tmp_path / "theirs.csv"
    if communication:
        runtime._prepare_schedule_with_comms(theirs)
    runtime._dump_csv(str(path), format="compute_comms" if communication else "compute_only")
    assert ")OVERLAP_F_B" in path.read_text()
    assert Schedule.from_csv(path) == expected


def test_torch_refuses_what_it_should(tmp_path: Path) -> None:
    """The checks above can fail: without a receive torch's simulation does not get to the end."""
    schedule = case("zb_h1", (3, 4))
    path = tmp_path / "broken.csv"
    schedule.to_csv(path, communication=True)
    path.write_text(path.read_text().replace("1RECV_F2,", ""))
    reader = torch_reader(schedule)
    reader._load_csv(str(path), format="compute_comms")
    with pytest.raises(ValueError, match="not progressing"):
        reader._simulate()
