"""Who failed first is the same on every rank, who does not answer is named, and nothing of a monitor stays behind."""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.processes import event, results, run_ranks, shown
from timelyfreeze.distributed import mailbox, monitor
from timelyfreeze.distributed.failure import MAX_DETAIL_BYTES, MAX_TEXT_BYTES, Failure
from timelyfreeze.distributed.monitor import FailureMonitor

WAIT_S = 60  # at the most, for what comes at once


def boom(rank: int, text: str = "RuntimeError: boom") -> Failure:
    return Failure("stage", rank=rank, text=text, stage=rank, action=f"{rank}F2", step=3)


def tcp_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=["tcp", "tcp without libuv", "hash", "file"])
def store(request, tmp_path, monkeypatch):
    monkeypatch.setattr(mailbox, "POLL_S", 0.01)
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), -1)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=request.param == "tcp")


class Rank:
    """A monitor, and the failures that it told of."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, name: str = "run") -> None:
        self.told: queue.SimpleQueue[Failure] = queue.SimpleQueue()
        self.status = f"running {rank}F0"
        self.monitor = FailureMonitor(
            store, rank, num_ranks, name, on_failure=self.told.put, status=lambda: self.status, store_rank=0
        )

    def hears(self) -> Failure:
        return self.told.get(timeout=WAIT_S)

    def has_heard_all(self) -> bool:
        """Whether nothing but what was heard came, also after all that was sent to this rank so far."""
        with self.monitor._telling:
            return self.told.empty()


@pytest.fixture
def ranks(store):
    made = [Rank(store, rank, 3) for rank in range(3)]
    yield made
    for rank in made:
        rank.monitor.close()


def at_once(*functions):
    """What the functions return, each in a thread of its own, begun together."""
    begin, found = threading.Barrier(len(functions)), [None] * len(functions)

    def run(index):
        begin.wait()
        found[index] = functions[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def answered(asker: Rank) -> dict[int, str | None]:
    """All others' answers: what was sent to them before is handled by then, in their order of arrival."""
    return asker.monitor.probe(WAIT_S)


def test_the_first_report_holds_for_all_and_the_others_are_told_once(ranks) -> None:
    for epoch in range(5):
        if epoch:
            for rank in ranks:
                rank.monitor.next_epoch(epoch)
        reports = [lambda rank=rank: ranks[rank].monitor.report(boom(rank)) for rank in (0, 2)]
        winner, other = at_once(*reports)
        assert winner == other
        assert winner.reporter == winner.rank in (0, 2)
        assert winner == replace(boom(winner.rank), reporter=winner.rank)
        losers = [rank for number, rank in enumerate(ranks) if number != winner.rank]
        assert [rank.hears() for rank in losers] == [winner, winner]
        answered(ranks[0])
        answered(ranks[1])
        assert all(rank.has_heard_all() for rank in ranks)
        assert {rank.monitor.report(boom(1, "too late")) for rank in ranks} == {winner}
        assert {rank.monitor.look() for rank in ranks} == {rank.monitor.failure for rank in ranks} == {winner}


def test_every_rank_says_what_it_does(ranks) -> None:
    ranks[2].status = "é" * MAX_TEXT_BYTES
    assert ranks[0].monitor.look() is None
    found = ranks[1].monitor.probe(WAIT_S)
    assert found[0] == "running 0F0"
    assert "bytes left out" in found[2]
    assert len(found[2].encode()) < 2 * MAX_TEXT_BYTES
    del ranks[2].status  # the function raises
    assert "AttributeError" in ranks[1].monitor.probe(WAIT_S)[2]


def test_a_closed_rank_does_not_answer_and_holds_up_no_report(ranks) -> None:
    ranks[2].monitor.close()
    assert ranks[0].monitor.probe(0.5) == {1: "running 1F0", 2: None}
    assert ranks[0].monitor.report(boom(0)) == ranks[1].hears()
    assert ranks[2].monitor.probe(WAIT_S) == {0: None, 1: None}
    assert ranks[2].monitor.report(boom(2)) == replace(boom(2), reporter=2)


def test_a_report_in_an_epoch_that_others_have_yet_to_reach_is_found_there(ranks) -> None:
    ranks[0].monitor.next_epoch(4)
    winner = ranks[0].monitor.report(boom(0, "early"))
    answered(ranks[0])  # both have got the message by now
    assert ranks[1].monitor.failure is None
    assert ranks[1].monitor.look() is None
    ranks[1].monitor.next_epoch(4)
    assert ranks[1].hears() == winner
    with pytest.raises(ValueError, match="above 4"):
        ranks[1].monitor.next_epoch(4)


def test_a_reporter_that_was_killed_before_it_woke_anybody_still_comes_first(ranks, store) -> None:
    first = replace(boom(2, "killed"), reporter=2)
    store.compare_set("timelyfreeze/run/failure/0", "", first.to_json())
    assert ranks[0].monitor.report(boom(0)) == first
    assert [ranks[0].hears(), ranks[1].hears()] == [first, first]


def test_looking_also_tells(ranks, store) -> None:
    store.compare_set("timelyfreeze/run/failure/0", "", "[]")
    assert ranks[1].monitor.look().text == "a rank failed; its report cannot be read"
    assert ranks[1].hears().kind == "lost"


def test_epochs_leave_no_keys() -> None:
    store = tcp_store()
    pair = [Rank(store, rank, 2) for rank in range(2)]
    counts = []
    for epoch in range(1, 1001):
        pair[epoch % 2].monitor.report(boom(epoch % 2))
        pair[1 - epoch % 2].hears()
        for rank in pair:
            rank.monitor.next_epoch(epoch)
        counts.append(store.num_keys())
    answered(pair[0])
    answered(pair[1])
    assert max(counts[10:]) <= max(counts[:10]) <= 6
    for rank in pair:
        rank.monitor.close()
    assert store.num_keys() <= 1  # the last epoch's record


def test_waiting_in_vain_does_not_end_a_monitor(monkeypatch) -> None:
    waits = queue.SimpleQueue()
    monkeypatch.setattr(mailbox, "WAIT_S", 0.01)
    monkeypatch.setattr(mailbox, "timedelta", lambda seconds: waits.put(seconds) or timedelta(seconds=seconds))
    store = tcp_store()
    pair = [Rank(store, rank, 2) for rank in range(2)]
    for _ in range(6):  # so that each waited again after the first time
        waits.get(timeout=WAIT_S)
    assert pair[0].monitor.report(boom(0)) == pair[1].hears()
    for rank in pair:
        rank.monitor.close()


def test_a_failing_callback_is_shown_and_the_monitor_goes_on(monkeypatch) -> None:
    shown_errors = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: shown_errors.put(args.exc_value))
    store = tcp_store()
    other = Rank(store, 1, 2)
    with FailureMonitor(store, 0, 2, "run", on_failure=lambda failure: 1 / 0, status=lambda: "fine"):
        other.monitor.report(boom(1))
        assert isinstance(shown_errors.get(timeout=WAIT_S), ZeroDivisionError)
        assert answered(other) == {0: "fine"}
    other.monitor.close()


def open_files() -> set[str]:
    gc.collect()
    return {f"{name} {os.path.realpath(f'/proc/self/fd/{name}')}" for name in os.listdir("/proc/self/fd")}


@pytest.mark.parametrize("ending", ["closed", "closed by the callback", "forgotten"])
def test_no_thread_and_no_file_stays_behind(store, ending) -> None:
    files, threads = open_files(), set(threading.enumerate())
    made = [Rank(store, rank, 4) for rank in range(4)]
    started = set(threading.enumerate()) - threads
    assert len(started) == 8
    if ending == "closed by the callback":
        for rank in made[1:]:
            rank.monitor._on_failure = lambda failure, rank=rank: (rank.monitor.close(), rank.told.put(failure))
        made[0].monitor.report(boom(0))
        for rank in made[1:]:
            rank.hears()
    if ending != "forgotten":
        for rank in made:
            rank.monitor.close()
            rank.monitor.close()
    del made
    if ending != "forgotten":
        del rank
    gc.collect()
    for thread in started:
        thread.join(WAIT_S)
    assert set(threading.enumerate()) == threads
    assert open_files() == files


def test_texts_are_cut_and_nothing_but_a_failure_is_read() -> None:
    long = Failure("timeout", rank=1, text="é" * 10**6, detail="head\udcff" + "x" * 10**6 + "tail", action="y" * 10**6)
    text = long.to_json()
    assert len(text.encode()) < MAX_DETAIL_BYTES + 3 * MAX_TEXT_BYTES
    read = Failure.from_json(text)
    assert read.detail.startswith("head\\udcff")
    assert read.detail.endswith("tail")
    for wrong in (
        "",
        "[]",
        "{}",
        '{"kind": "odd", "rank": 0, "text": ""}',
        '{"kind": "lost", "rank": "0", "text": ""}',
    ):
        with pytest.raises(ValueError, match="a failure's JSON: expected"):
            Failure.from_json(wrong)


# What follows runs in processes of its own.


def default_store(rank: int, num_ranks: int) -> dist.Store:
    """The store that the environment names."""
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, num_ranks)
    return dist.distributed_c10d._get_default_store()


def report_and_probe(rank: int, num_ranks: int) -> object:
    this = Rank(default_store(rank, num_ranks), rank, num_ranks)
    dist.barrier()
    winner = this.monitor.report(boom(rank)) if rank != 1 else this.hears()
    dist.barrier()
    this.monitor.next_epoch(1)
    answers = None
    if rank == 0:
        event("stop rank 2")
        input()
        answers = this.monitor.probe(1.0)
        event("continue rank 2")
    dist.barrier()
    dist.destroy_process_group()
    this.monitor.close()
    return [winner.rank, answers, this.monitor.failure is None]


def test_processes_agree_and_a_stopped_one_does_not_answer() -> None:
    def stop(processes):
        processes.signal(2, signal.SIGSTOP)
        processes.tell(0)

    on_event = {"stop rank 2": stop, "continue rank 2": lambda processes: processes.signal(2, signal.SIGCONT)}
    outcomes = run_ranks(f"{__name__}:report_and_probe", 3, timeout_s=60, on_event=on_event)
    found = results(outcomes)
    assert found[0][0] in (0, 2)
    assert found == [[found[0][0], {"1": "running 1F0", "2": None}, True], *[[found[0][0], None, True]] * 2]
    assert [outcome.stderr for outcome in outcomes] == ["", "", ""]


def outlive_the_store(rank: int, num_ranks: int) -> object:
    monitor.ANSWER_S = 0.5
    this = Rank(default_store(rank, num_ranks), rank, num_ranks)
    dist.barrier()
    if rank == 0:
        event("stop the store")
        this.hears()  # for ever
    if rank == 2:
        return [this.hears().to_json()]
    input()
    unheard = this.monitor.report(boom(1))  # the store does not answer
    nobody = this.monitor.probe(0.1)
    this.monitor.next_epoch(1)
    event("kill the store")
    lost = this.hears()
    this.monitor.next_epoch(2)
    return [unheard.text, nobody, lost.to_json(), this.hears().to_json()]


def test_a_store_that_hangs_or_dies_holds_up_nobody() -> None:
    def stop(processes):
        processes.signal(0, signal.SIGSTOP)
        processes.tell(1)

    on_event = {"stop the store": stop, "kill the store": lambda processes: processes.signal(0, signal.SIGKILL)}
    function = f"{__name__}:outlive_the_store"
    outcomes = run_ranks(function, 3, timeout_s=60, agent_store=False, on_event=on_event)
    assert [outcome.returncode for outcome in outcomes] == [-signal.SIGKILL, 0, 0], shown(outcomes)
    text, nobody, *lost = outcomes[1].result
    assert text == "RuntimeError: boom"
    assert nobody == {"0": None, "2": None}
    for failure in map(Failure.from_json, [*lost, *outcomes[2].result]):
        assert (failure.kind, failure.rank) == ("lost", 0)
        assert "the store" in failure.text


def interrupted(rank: int, num_ranks: int) -> None:
    store = tcp_store()
    this = Rank(store, 0, 2)
    child = os.fork()
    if child == 0:
        monitor.ANSWER_S = monitor.END_S = 3600.0  # nothing may be awaited: the threads are the parent's
        this.monitor.close()
        assert this.monitor.report(boom(0)).reporter == 0
        assert this.monitor.probe(3600.0) == {1: None}
        sys.exit(7)  # with all that runs at exit
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    other = Rank(store, 1, 2)
    assert answered(other) == {0: "running 0F0"}  # the child did no harm
    try:
        event("interrupt")
        this.hears()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(5)  # nothing is closed


def test_ctrl_c_reaches_the_main_thread_and_exit_does_not_hang() -> None:
    on_event = {"interrupt": lambda processes: processes.signal(0, signal.SIGINT)}
    (outcome,) = run_ranks(f"{__name__}:interrupted", 1, timeout_s=60, on_event=on_event)
    assert (outcome.returncode, outcome.stderr) == (5, "interrupted\n")


def hang(rank: int, num_ranks: int) -> None:
    input()


def test_ranks_that_hang_are_shown_and_leave_no_zombie() -> None:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = children.read_text(), open_files()
    with pytest.raises(AssertionError, match=r"(?s)did not end within 1 s.*exit code -6.*most recent call first"):
        run_ranks(f"{__name__}:hang", 1, timeout_s=1)
    assert (children.read_text(), open_files()) == before
