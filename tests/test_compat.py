"""``timelyfreeze.compat``: loops written for ``torch.distributed.pipelining``, beside torch's own schedules."""

from __future__ import annotations

import pytest

from tests.processes import results, run_ranks

SCHEDULES = [
    "1F1B",
    "GPipe",
    "sum",
    "keywords",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
]


@pytest.fixture(scope="module")
def ranks():
    """What each rank of tests/compat_ranks.py found."""
    return results(run_ranks("tests.compat_ranks:check", 2, timeout_s=120))


@pytest.mark.parametrize("name", SCHEDULES)
def test_losses_outputs_and_gradients_are_torch_s(ranks, name):
    for found in ranks:
        assert found["parity"][name]["distance"] <= 1e-6
        assert found["parity"][name]["size"] > 1e-4  # what is compared is not all zeros
        assert found["parity"][name]["repeats"]


@pytest.mark.parametrize(
    "part",
    [
        "evaluation",
        "dropout_is_what_the_modules_say",
        "accumulation",
        "unequal_slices",
        "freezing",
        "finding_a_plan",
        "boundary_values",
        "chunk_specs",
    ],
)
def test_part(ranks, part):
    for found in ranks:
        assert found[part] is None, found[part]


IN_A_V = "Place the stages so: rank 0: 0, 3; rank 1: 1, 2."
IN_A_ROW = "Place the stages so: rank 0: 0; rank 1: 1."
# What rank 0 is told, and rank 1.
ERRORS = {
    "v": [
        "ValueError: stages on rank 0 in schedule 'zbv': expected 0, 3, got 0, 2. " + IN_A_V,
        "ValueError: stages on rank 1 in schedule 'zbv': expected 1, 2, got 1, 3. " + IN_A_V,
    ],
    "swapped": [
        "ValueError: stages on rank 0 in schedule '1f1b': expected 0, got 1. " + IN_A_ROW,
        "ValueError: stages on rank 1 in schedule '1f1b': expected 1, got 0. " + IN_A_ROW,
    ],
    "several": ["ValueError: stages_per_rank of schedule 1f1b: expected 1, got 2."] * 2,
    "none": ["TypeError: stage: expected a PipelineStage, or a non-empty list of them, got an empty list."] * 2,
    "module": ["TypeError: stage: expected a PipelineStage, or a non-empty list of them, got Block."] * 2,
    "odd": ["ValueError: num_stages of the stages: expected a multiple of the group's 2 ranks, got 3."] * 2,
    "microbatches": ["ValueError: num_microbatches: expected at least 1, got 0."] * 2,
    "losses": ["TypeError: losses: expected a list, or None, got tuple."] * 2,
    "no_grad": ["RuntimeError: step(): expected grad mode, got no_grad. Call eval() instead."] * 2,
    "after": [None, None],
    "closed": ["ValueError: the pipeline is closed. Create a new FreezingPipeline."] * 2,
    "no loss": ["ValueError: losses: expected None, since there is no loss_fn, got a list."] * 2,
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(ranks, name):
    assert [found["errors"][name] for found in ranks] == ERRORS[name]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("unknown", "ValueError", "unknown schedule: expected one of gpipe, 1f1b,"),
        ("wrapped", "TypeError", "expected a plain module, got DistributedDataParallel (stage"),
        ("small", "", "the batch cannot be split: expected at least 4 samples, one a micro-batch, got 3."),
        ("failing", "StageError", "stage 1 failed in action 1F0: KeyError: 'from the loss' (rank 1, micro-batch 0"),
    ],
)
def test_errors_name_the_cause_on_every_rank(ranks, name, kind, text):
    for found in ranks:
        assert found["errors"][name].startswith(kind)
        assert text in found["errors"][name]
