"""Unusual values between ranks, unusual ends of pipelines, and what long runs leave behind."""

from __future__ import annotations

import pytest

from tests import odd_ranks as ranks
from tests import processes
from tests.forked_ranks import launch, results


def test_any_value_travels_and_may_change_from_call_to_call():
    answers = results(launch(2, ranks.exchange_values))
    grads = {}
    for (losses, own), (same, _) in answers:
        assert losses == same
        grads |= own
    assert grads == answers[0][1][1]


def test_more_layouts_than_ranks_remember():
    for losses, expected in results(launch(2, ranks.many_layouts)):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_pipelines_may_end_in_any_way():
    for rank, answer in enumerate(results(launch(3, ranks.end_oddly))):
        gone, threads, files = zip(*answer["seen"], strict=True)
        assert all(gone)
        assert len(set(threads[1:])) == 1, threads
        assert max(files) - min(files) < len(files), files  # sockets close a moment later
        assert answer["closed"]["type"] in ("ValueError", "StageError", "TransportError")
        assert rank != 1 or "the pipeline is closed" in answer["closed"]["text"]
        assert rank == 1 or answer["closed"]["rank"] == 1
        assert answer["after"]["type"] in ("", "TransportError", "StageError"), answer["after"]


def test_an_interpreter_may_end_without_closing():
    losses = processes.results(processes.run_ranks("tests.odd_ranks:exit_without_closing", 3, timeout_s=60))
    assert losses[0] == losses[1] == losses[2]


def test_a_step_that_takes_too_long_names_the_rank_that_works():
    for found in results(launch(3, ranks.step_too_long)):
        assert (found["type"], found["rank"]) == ("TransportError", 1)
        assert "it is running 1F0 in step 0" in found["text"]


@pytest.mark.parametrize("num_failures", [10, pytest.param(50, marks=pytest.mark.long)])
def test_failures_leave_no_thread_and_no_file(num_failures):
    for seen in results(launch(3, ranks.many_failures, num_failures)):
        threads, files = zip(*seen, strict=True)
        assert len(set(threads[1:])) == 1, threads
        assert max(files) - min(files) < num_failures / 2, files  # sockets close a moment later


@pytest.mark.long
def test_five_thousand_steps_hold_memory_flat():
    for seen in results(launch(2, ranks.many_steps, 5000, timeout_s=280)):
        resident, threads, files = zip(*seen, strict=True)
        # By the first tenth every buffer has been made once.
        assert max(resident[2:]) - resident[1] < 2 * 2**20, resident
        assert max(threads) == min(threads), threads
        assert max(files) == min(files), files
