"""The same pipeline over processes: the same bits as in one process."""

from __future__ import annotations

import math

import pytest
import torch

from tests import parity_ranks
from tests.processes import results, run_ranks

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "zb_h1": 1,
    "looped_bfs": 2,
    "interleaved_1f1b": 2,
    "interleaved_zb": 2,
    "zbv": 2,
    "dualpipev": 2,
}


def cases_of(ranks):
    """Every schedule, with and without freezing, and numbers of micro-batches that do not fit the ranks."""
    return [
        {
            "schedule": schedule,
            "stages_per_rank": per_rank,
            "ranks": ranks,
            "microbatches": microbatches,
            "mode": mode,
        }
        for index, (schedule, per_rank) in enumerate(SCHEDULES.items())
        for mode, microbatches in ((None, 3), ("cut" if index % 2 else "lp", 4))
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_processes_give_the_bits_of_threads(ranks):
    cases = cases_of(ranks)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = [parity_ranks.train(case, None) for case in cases]
    finally:
        torch.set_num_threads(threads)
    every = results(run_ranks("tests.parity_ranks:run_cases", ranks, timeout_s=240, args={"cases": cases}))
    for index, (case, reference) in enumerate(zip(cases, expected, strict=True)):
        state = {}
        for rank, found in enumerate(one[index] for one in every):
            alike = {key: value for key, value in found.items() if key != "state"}
            assert alike == {key: value for key, value in reference.items() if key != "state"}, (rank, case)
            assert not set(found["state"]) & set(state)
            state |= found["state"]
        assert state == reference["state"], case
        assert (max(reference["ratios"]) > 0) == (case["mode"] is not None)
        assert all(map(math.isfinite, reference["losses"]))


def test_ranks_measure_together_and_go_over_to_one_plan_at_the_same_step():
    first, *others = results(
        run_ranks("tests.parity_ranks:plan_for_themselves", 3, timeout_s=120, args={"steps": 2000})
    )
    assert others == [first, first]
    assert first["ratios"][-1][0] == "steady"
    assert 0 < first["ratios"][-1][1] <= 0.5
    transfers = first["plan"]["costs"]["transfer_s"]
    assert sorted(transfers) == ["0>1", "1>0", "1>2", "2>1"]
    assert all(0 < seconds < 1 for seconds in transfers.values())
    assert all(seconds > 0 for action, seconds in first["times"].items() if "F" in action)


def test_values_of_all_kinds_and_shapes_cross_processes():
    rounds = 40
    every = results(run_ranks("tests.parity_ranks:layouts", 2, timeout_s=120, args={"seed": 1, "rounds": rounds}))
    assert every[0] == every[1]
    assert max(abs(loss) for loss in every[0][:rounds]) > 0
    assert all(gradient != 0 for gradient in every[0][rounds:])


@pytest.mark.long
def test_five_thousand_steps_of_two_ranks_hold_memory_flat():
    for seen in results(run_ranks("tests.parity_ranks:many_steps", 2, timeout_s=1200, args={"steps": 5000})):
        resident, threads, files = zip(*seen, strict=True)
        # By step 1,000 every buffer has been made. 4,000 steps that leaked one 64 x 64 gradient each would add 64 MB.
        assert max(resident[2:]) - resident[1] < 4 * 2**20, resident
        assert max(threads) - min(threads) <= 1, threads  # a plan may be solved just then
        assert max(files) == min(files), files
