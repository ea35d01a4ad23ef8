"""An asynchronous pipeline over processes: the same bits as in one, and no rank left waiting."""

from __future__ import annotations

import copy
import itertools
import math
import random

import pytest
import torch

from tests import async_ranks
from tests.faulty_ranks import batch
from tests.forked_ranks import launch, results, shown
from tests.parity_ranks import digest
from timelyfreeze.distributed import export_state_dict


def cases_of(ranks):
    """Every schedule and memory with every accumulation; the rest in turn."""
    every = itertools.product(("paci", "pipedream"), ("keep", "recompute"), (1, 2, 4))
    return [
        {
            "ranks": ranks,
            "schedule": schedule,
            "memory": memory,
            "accumulation": accumulation,
            "microbatches": (4, 3, 1)[index % 3] if accumulation < 4 else 4,
            "counts": index % 2 == 1,
            "max_grad_norm": (None, 0.05)[index // 2 % 2],
        }
        for index, (schedule, memory, accumulation) in enumerate(every)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_processes_give_the_bits_of_threads(ranks):
    cases = cases_of(ranks)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = [async_ranks.train(case, None) for case in cases]
    finally:
        torch.set_num_threads(threads)
    every = results(launch(ranks, async_ranks.run_cases, cases))
    for index, (case, reference) in enumerate(zip(cases, expected, strict=True)):
        state = {}
        for rank, found in enumerate(one[index] for one in every):
            for key in ("losses", "evaluated"):
                assert found[key] == reference[key], (rank, case)
            assert not set(found["state"]) & set(state)
            state |= found["state"]
        assert state == reference["state"], case
        assert all(math.isfinite(float.fromhex(loss)) for _, loss in reference["losses"])
        assert reference["report"]["max_drift"] == math.ceil((ranks - 1) / case["accumulation"])


def check_error(fault, target, rank, found):
    place = (fault, target, rank, found)
    if fault == "KeyboardInterrupt":
        assert found["type"] == ("KeyboardInterrupt" if rank == target else "TransportError"), place
        assert rank == target or (found["rank"] == target and "was stopped" in found["text"]), place
        return
    if fault == "no batch":
        assert found["type"] == ("TypeError" if rank == target else "StageError"), place
        assert "a batch: expected (input, ..., target)" in found["text"], place
        return
    if fault in ("another batch", "fewer micro-batches"):
        assert found["type"] in ("RuntimeError", "StageError"), place
        assert "the batches differ" in found["text"], place
        return
    if fault == "batches":
        assert found["type"] == ("BoomError" if rank == target else "StageError"), place
        assert "boom" in found["text"], place
        return
    assert (found["type"], found["rank"]) == ("StageError", target), place
    name = "MemoryError" if fault == "MemoryError" else "BoomError"
    assert f"{name}: " in found["text"], place
    kind = {"raise in B": "B", "optimizer": "U"}.get(fault, "F")
    assert found["action"].lstrip("0123456789")[0] == kind, place
    assert found["cause"].startswith(name if rank == target else "RemoteTracebackError"), place
    assert "boom" in found["cause"] or name == "MemoryError", place


def test_every_rank_gets_the_error_and_can_run_again():
    targets = {"loss_fn": 2, "KeyboardInterrupt": 0}
    faults = [(name, targets.get(name, number % 3)) for number, name in enumerate(async_ranks.FAULTS)]
    answers = results(launch(3, async_ranks.recover, faults))
    for number, (fault, target) in enumerate(faults):
        for rank, answer in enumerate(answers):
            check_error(fault, target, rank, answer["errors"][number])
    for answer in answers:
        assert answer["runs"] == answers[0]["runs"]
        assert all(len(run) == 3 and all(math.isfinite(loss) for _, loss in run) for run in answer["runs"])
        assert answer["report"] == answers[0]["report"]
    assert answers[0]["report"]["max_drift"] == 1


@pytest.mark.parametrize(("how", "victim"), [("killed", 1), ("stopped", 0), ("hangs", 2)])
def test_a_rank_that_is_lost_is_named_on_all_others(how, victim):
    ended = launch(3, async_ranks.lose_a_rank, how, victim, gone=(victim,) if how == "stopped" else (), timeout_s=60)
    for rank, one in enumerate(ended):
        if rank == victim and how != "hangs":
            continue
        assert (one.notes[-1]["type"], one.notes[-1]["rank"]) == ("TransportError", victim), shown(ended)
        assert one.exitcode == 3, shown(ended)


def test_pipelines_that_do_not_fit_are_refused_on_all_ranks():
    for answer in results(launch(3, async_ranks.disagree)):
        differ, count, tied, good = answer
        assert differ["type"] == tied["type"] == "DisagreementError"
        assert "the same accumulation" in differ["text"]
        assert count["type"] in ("ValueError", "StageError")  # the latter where another rank was sooner to say so
        assert "expected 3, one a process" in count["text"]
        assert "parameters in two stages" in tied["text"]
        assert "0.linear.weight" in tied["text"]
        assert len(good["runs"]) == 2


def resumed_in_one_process():
    """What two batches after the checkpoint give where all stages are threads, and the weights at the checkpoint."""
    with async_ranks.make_dividable(3, None) as pipe:
        list(pipe.run([batch(0), batch(1)]))
        state = copy.deepcopy(pipe.state_dict())
        training = copy.deepcopy(pipe.training_state_dict())
    with async_ranks.make_dividable(3, None) as pipe:
        pipe.load_state_dict(state)
        pipe.load_training_state_dict(training)
        found = [[one.index, float(one.loss).hex()] for one in pipe.run([batch(2), batch(3)])]
        return found, state, {name: digest(value) for name, value in pipe.state_dict().items()}


def test_a_checkpoint_goes_on_exactly_and_its_weights_on_any_number_of_ranks(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected, state, weights = resumed_in_one_process()
    finally:
        torch.set_num_threads(threads)
    own = {}
    for answer in results(launch(3, async_ranks.save, str(tmp_path))):
        assert answer["kept on"] == answer["resumed"]
        assert answer["kept on"]["results"] == expected
        own |= answer["kept on"]["weights"]
    assert own == weights
    loaded = {}
    for answer in results(launch(2, async_ranks.load, str(tmp_path))):
        loaded |= answer
    assert loaded == {name: digest(value) for name, value in state.items()} != weights
    assert all(torch.equal(value, state[name]) for name, value in export_state_dict(tmp_path).items())


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_random_faults(seed):
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 4])
    targets = {"loss_fn": ranks - 1, "KeyboardInterrupt": 0}
    names = draw.choices(list(async_ranks.FAULTS), k=8)
    faults = [(name, targets.get(name, draw.randrange(ranks))) for name in names]
    print(f"{seed=} {ranks=} {faults=}")
    answers = results(launch(ranks, async_ranks.recover, faults))
    for number, (fault, target) in enumerate(faults):
        for rank, answer in enumerate(answers):
            check_error(fault, target, rank, answer["errors"][number])
    assert all(answer["runs"] == answers[0]["runs"] for answer in answers)
