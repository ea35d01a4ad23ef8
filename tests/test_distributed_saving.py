"""A checkpoint in whose middle a rank fails or is lost: all others know which, and the one before goes on."""

from __future__ import annotations

import pytest

from tests import lost_ranks as ranks
from tests.forked_ranks import launch, results, shown
from timelyfreeze.distributed import latest_checkpoint


def test_a_save_that_fails_on_one_rank_fails_on_all_and_training_goes_on(tmp_path):
    for rank, answer in enumerate(results(launch(3, ranks.fail_to_save, str(tmp_path)))):
        errors = answer["errors"]
        assert errors["disk"]["type"] == "CheckpointError"
        assert "rank 1: OSError: [Errno 28] No space left on device" in errors["disk"]["text"]
        assert errors["interrupt"]["type"] == ("KeyboardInterrupt" if rank == 1 else "TransportError")
        assert rank == 1 or (errors["interrupt"]["rank"] == 1 and "was stopped" in errors["interrupt"]["text"])
        assert errors["another call"]["type"] == "DisagreementError"
        assert "got save_checkpoint" in errors["another call"]["text"]
        assert "and train" in errors["another call"]["text"]
        assert answer["last"] is None
        assert answer["saved"] == "step-000004"
        assert answer["losses"] == answer["undisturbed"]


# A rank that is killed breaks its connections; that one is stopped or hangs is known when the time is over.
@pytest.mark.parametrize(
    ("how", "victim"),
    [
        ("killed", 2),
        pytest.param("killed", 0, marks=pytest.mark.long),
        pytest.param("stopped", 1, marks=pytest.mark.long),
        pytest.param("stopped", 0, marks=pytest.mark.long),
        pytest.param("hangs", 1, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_lost_while_saving_is_named_on_all_others_and_the_checkpoint_before_goes_on(
    tmp_path, how, victim
):
    gone = () if how == "killed" else (victim,)
    ended = launch(3, ranks.lose_while_saving, str(tmp_path), how, victim, gone=gone)
    for rank, one in enumerate(ended):
        if rank == victim:
            continue
        [found] = one.notes or [{}]
        assert (found.get("type"), found.get("rank")) == ("TransportError", victim), shown(ended)
        assert one.exitcode == 3, shown(ended)
        assert how != "hangs" or "it is running save_checkpoint for" in found["text"], found
    assert latest_checkpoint(tmp_path).name == "step-000001"
    assert results(launch(3, ranks.go_on, str(tmp_path))) == [True] * 3
