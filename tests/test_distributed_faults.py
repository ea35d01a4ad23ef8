"""Ranks that fail, are killed, stopped or hang: no rank is left waiting, all get the right error, training goes on."""

from __future__ import annotations

import random

import pytest

from tests import faulty_ranks as ranks
from tests import lost_ranks
from tests.forked_ranks import launch, results, shown

SCHEDULES = ["1f1b", "gpipe", "interleaved_1f1b", "zbv", "zb_h1", "dualpipev"]
SPLIT = {"zbv", "zb_h1", "dualpipev"}


def check_error(fault, target, rank, found, num_ranks=3):
    """That this is what the rank should have got of the fault on rank ``target``."""
    place = (fault, target, rank, found)
    if fault in ("another call", "another batch"):
        # Where the target brings no batch, it can bring no other one.
        expected = "" if fault == "another batch" and target not in (0, num_ranks - 1) else "DisagreementError"
        assert found["type"] in (expected, "DisagreementError"), place
        return
    if fault == "KeyboardInterrupt":
        assert found["type"] == ("KeyboardInterrupt" if rank == target else "TransportError"), place
        assert rank == target or (found["rank"] == target and "was stopped" in found["text"]), place
        return
    if fault == "wrong arguments":
        assert found["type"] == ("ValueError" if rank == target else "StageError"), place
        assert "a batch or microbatches=, not both" in found["text"], place
        return
    text = {"MemoryError": "MemoryError: no room", "NaN": "is nan"}.get(fault, "")
    if fault.startswith("raise") or fault in ("every rank at once", "loss_fn"):
        text = "BoomError: boom"
    if fault.startswith("value that") and found["type"] == "BoomError":
        return  # the rank that received it
    assert found["type"] == "StageError", place
    assert text in found["text"], place
    if fault in ("raise in F", "raise in B", "MemoryError"):
        assert found["rank"] == target, place
        kinds = "F" if fault != "raise in B" else "BI"
        assert found["action"].lstrip("0123456789")[0] in kinds, place
        own = "BoomError" if fault.startswith("raise") else "MemoryError"
        assert found["cause"].startswith(own if rank == target else "RemoteTracebackError"), place


def check_recovery(cases, answers):
    for index, (_, _, faults) in enumerate(cases):
        for rank, answer in enumerate(answers):
            found = answer[index]
            for (fault, target), error in zip(faults, found["errors"], strict=True):
                check_error(fault, target, rank, error)
            assert found["losses"] == found["undisturbed"], (rank, faults)
            assert found["weights"], (rank, faults)
        for number, (fault, target) in enumerate(faults):
            errors = [answer[index]["errors"][number] for answer in answers]
            if fault.startswith(("raise", "Memory", "NaN", "every", "loss", "unpick")):  # one failure for all
                assert len({(e["text"], e["rank"], e["action"]) for e in errors}) == 1, (fault, target, errors)


@pytest.mark.parametrize("schedules", [SCHEDULES[:3], SCHEDULES[3:]], ids=["whole backward", "split backward"])
def test_every_rank_gets_the_error_and_the_next_step_is_as_if_nothing_had_been(schedules):
    names = list(ranks.FAULTS)
    cases = [
        (schedule, bool((number + place) % 2), [(name, (place + number) % 3) for place, name in enumerate(names)])
        for number, schedule in enumerate(schedules)
        for place in [number]
    ]
    check_recovery(cases, results(launch(3, ranks.recover, cases)))


def test_a_pipeline_that_cannot_be_made_on_one_rank_is_made_on_none():
    answers = results(launch(3, ranks.fail_to_make))
    for rank, answer in enumerate(answers):
        errors = answer["errors"]
        for name, odd in [("seed", 2), ("schedule", 1), ("split points", 2)]:
            assert errors[name]["type"] == "DisagreementError"
            assert f"others on ranks [{odd}]" in errors[name]["text"]
        assert errors["factory"]["type"] == ("BoomError" if rank == 1 else "StageError")
        assert errors["interrupted factory"]["type"] == ("KeyboardInterrupt" if rank == 1 else "TransportError")
        assert errors["arguments of one"]["type"] == ("ValueError" if rank == 2 else "StageError")
        assert errors["arguments of all"]["type"] == errors["arguments of all, late"]["type"] == "ValueError"
        assert errors["names"]["type"] == errors["patterns"]["type"] == "DisagreementError"
        if rank != 1:
            assert errors["factory"]["rank"] == errors["interrupted factory"]["rank"] == 1
            assert "boom (while the pipeline was made)" in errors["factory"]["text"]
        assert answer["losses"] == answers[0]["losses"]
        # torch keeps a few for itself after its first group; eleven pipelines that were not made leave nothing.
        (threads, files), (threads_after, files_after) = answer["before"], answer["after"]
        assert threads_after - threads < 8, answer
        assert files_after - files < 8, answer


def test_failures_between_calls():
    for rank, answer in enumerate(results(launch(3, ranks.meet_late))):
        errors = answer["errors"]
        assert errors["late"]["type"] == ("ValueError" if rank == 1 else "StageError")
        assert "not both" in errors["late"]["text"]
        assert errors["boom"]["rank"] == 1
        assert answer["losses"] == answer["undisturbed"]
        assert answer["again"] == answer["losses"][-1:]


@pytest.mark.long  # user code that does not come back is waited for twice, 5 s each time
def test_a_stage_that_outlives_its_step():
    for rank, answer in enumerate(results(launch(3, ranks.outlive_a_hang))):
        errors = answer["errors"]
        assert (errors["failed"]["type"], errors["failed"]["rank"]) == ("StageError", 2)
        assert errors["still running"]["type"] == ("RuntimeError" if rank == 0 else "StageError")
        assert "a stage still runs user code" in errors["still running"]["text"]
        assert answer["losses"] == answer["undisturbed"]


def lose(folder, how, victim, schedule="1f1b", frozen=False, agent_store=True):
    """The others' errors all name the victim, and end them."""
    ended = launch(
        3,
        lost_ranks.lose_a_rank,
        str(folder),
        how,
        victim,
        schedule,
        frozen,
        agent_store=agent_store,
        gone=(victim,) if how == "stopped" else (),
    )
    for rank, one in enumerate(ended):
        if rank == victim and how != "hangs":
            continue
        found = one.notes[-1] if one.notes else None
        assert isinstance(found, dict), shown(ended)
        assert (found["type"], found["rank"]) == ("TransportError", victim), shown(ended)
        assert one.exitcode == 3, shown(ended)
        assert len(one.notes) == lost_ranks.LOSING_STEP + 1, shown(ended)


def check_resumed(cases):
    for answer in results(launch(3, lost_ranks.resume, cases)):
        for found in answer:
            assert found["first"] >= lost_ranks.LOSING_STEP  # at most the steps since the last checkpoint are lost
            assert found["losses"] == found["undisturbed"][found["first"] :]
            assert found["weights"]


@pytest.mark.parametrize(
    "cases",
    [
        [
            ("killed", 1, "1f1b", False, True),
            ("killed", 0, "gpipe", False, False),  # it hosts the store
            ("exits", 0, "interleaved_1f1b", True, True),
            ("leaves", 1, "1f1b", False, True),
        ],
        pytest.param(
            [
                ("stopped", 2, "zbv", True, True),
                ("killed while connecting", 1, "1f1b", False, True),
                ("hangs", 2, "1f1b", False, True),
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=["gone", "silent"],  # a rank that is silent is known when the time is over
)
def test_a_rank_that_is_lost_is_named_on_all_others_and_the_last_checkpoint_goes_on(tmp_path, cases):
    for number, (how, victim, schedule, frozen, agent_store) in enumerate(cases):
        lose(tmp_path / str(number), how, victim, schedule, frozen, agent_store)
    check_resumed([(str(tmp_path / str(number)), case[2], case[3]) for number, case in enumerate(cases)])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200))
def test_random_faults(seed, tmp_path):
    draw = random.Random(seed)
    schedule, frozen, victim = draw.choice(SCHEDULES), draw.random() < 0.5, draw.randrange(3)
    if draw.random() < 0.5:
        how = draw.choice(["killed", "killed in backward", "stopped", "exits", "leaves", "hangs"])
        print(f"{seed=} {schedule=} {frozen=} {how=} {victim=}")
        lose(tmp_path, how, victim, schedule, frozen)
        check_resumed([(str(tmp_path), schedule, frozen)])
    else:
        faults = [(draw.choice(list(ranks.FAULTS)), draw.randrange(3)) for _ in range(6)]
        print(f"{seed=} {schedule=} {frozen=} {faults=}")
        cases = [(schedule, frozen, faults)]
        check_recovery(cases, results(launch(3, ranks.recover, cases)))
