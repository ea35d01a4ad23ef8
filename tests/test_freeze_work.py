"""Works: what a profiled forward records, and what gradients are expected to cost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from timelyfreeze.freeze import ParameterWork, measured_rates, nominal_rates, parameter_work, record_forward
from timelyfreeze.freeze.profile import StageProfile
from timelyfreeze.freeze.rates import Rates

FLOPS = 1e9
BYTES = 1e9


def flat_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """One second for 1e9 operations or bytes."""
    return Rates(FLOPS, BYTES)


def profile_of(stage: nn.Module, *args: torch.Tensor) -> StageProfile:
    with record_forward(stage) as profile:
        stage(*args)
    return profile


def work_of(stage: nn.Module, *args: torch.Tensor) -> ParameterWork:
    return parameter_work(profile_of(stage, *args), flat_rates)


def num_hooks(stage: nn.Module) -> int:
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) + len(module._forward_hooks_always_called)
        for module in stage.modules()
    )


def adding_up(num: int) -> float:
    """Seconds for reading a gradient, reading and writing the sum, of float32."""
    return 3 * 4 * num / BYTES


class Scale(nn.Module):
    """A norm of the user's own: one parameter a feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Block(nn.Module):
    """Declared in another order than used; query and key are fed by one activation; ``spare`` is never used."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.output = nn.Linear(width, width)
        self.query = nn.Linear(width, width)
        self.spare = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.raw = nn.Parameter(torch.ones(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.output(self.query(y) * self.key(y)) @ self.raw


# --- recording --------------------------------------------------------------------------------------------------


def test_forward_order_groups_and_use() -> None:
    stage = Block()
    work = work_of(stage, torch.ones(3, 8))
    by_name = {name: index for index, name in enumerate(work.names)}
    used_in_order = [work.names[index] for index in work.forward_order if work.used[index]]
    # The raw parameter belongs to the block itself, which is called first.
    assert used_in_order == [
        "raw", "norm.weight", "norm.bias", "query.weight", "query.bias", "key.weight", "key.bias",
        "output.weight", "output.bias",
    ]  # fmt: skip
    unused = {name for name, used in zip(work.names, work.used, strict=True) if not used}
    assert unused == {"spare.weight", "spare.bias"}
    assert {work.names[index] for index in work.forward_order[:2]} == unused
    assert work.work_s[by_name["spare.weight"]] == 0.0
    fed_together = work.groups[[by_name[f"{name}.weight"] for name in ("query", "key", "output")]]
    assert fed_together[0] == fed_together[1] != fed_together[2]


def test_no_hook_stays_behind_also_when_forward_raises() -> None:
    stage = nn.Sequential(Block(), nn.Linear(8, 3))
    profile_of(stage, torch.ones(2, 8))
    assert num_hooks(stage) == 0
    with pytest.raises(RuntimeError, match="shape"):
        profile_of(stage, torch.ones(2, 5))
    assert num_hooks(stage) == 0
    with record_forward(stage) as profile:
        with pytest.raises(RuntimeError, match="shape"):
            stage(torch.ones(2, 5))
        stage[1](torch.ones(2, 8))  # outside of the stage's forward
        assert num_hooks(stage) > 0
    assert id(stage[1]) not in profile.uses
    assert profile.names[max(profile.first_use)].startswith("0.")


def test_recording_changes_neither_results_nor_the_generator() -> None:
    stage = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), Block())
    x = torch.ones(4, 8)
    torch.manual_seed(0)
    expected = stage(x)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with record_forward(stage):
        found = stage(x)
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_stages_that_share_a_module_on_two_threads_do_not_mix() -> None:
    shared = nn.Linear(8, 8)
    stages = [nn.Sequential(shared), nn.Sequential(shared, nn.Linear(8, 8), nn.Linear(8, 8))]
    both_inside = threading.Barrier(2)
    profiles: list[StageProfile | None] = [None, None]

    def run(index: int) -> None:
        def meet(module: nn.Module, args: object) -> None:
            both_inside.wait(timeout=60)

        with record_forward(stages[index]) as profile:
            handle = stages[index].register_forward_pre_hook(meet)
            for _ in range(20):
                stages[index](torch.ones(2 + index, 8))
            handle.remove()
        profiles[index] = profile

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, profile in enumerate(profiles):
        assert profile is not None
        assert profile.num_passes == 20
        assert profile.uses[id(shared)].num_tokens == 20 * (2 + index)
        assert profile.uses[id(shared)].num_calls == 20
    assert num_hooks(stages[1]) == 0


def test_recomputation_does_not_count() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.reentrant = reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
            return y

    for reentrant in (False, True):
        stage = Checkpointed(reentrant)
        with record_forward(stage) as profile:
            stage(torch.ones(2, 8, requires_grad=True)).sum().backward()
        assert profile.uses[id(stage.inner)].num_calls == 1
        assert parameter_work(profile, flat_rates).used.all()


def test_what_no_hook_sees_is_found_in_the_graph() -> None:
    stage = nn.MultiheadAttention(8, 2, batch_first=True)  # uses out_proj's weight without calling it
    x = torch.ones(2, 3, 8)
    work = work_of(stage, x, x, x)
    assert work.used.all()
    by_name = dict(zip(work.names, work.work_s, strict=True))
    assert by_name["in_proj_weight"] == pytest.approx(2 * 6 * 3 * 64 / FLOPS + adding_up(3 * 64))
    assert by_name["out_proj.weight"] == pytest.approx(2 * 6 * 64 / FLOPS + adding_up(64))


def test_micro_batches_of_one_step_are_averaged() -> None:
    stage = nn.Sequential(nn.Linear(8, 8, bias=False))
    with record_forward(stage) as profile:
        for rows in (2, 4, 6):
            stage(torch.ones(rows, 8))
    assert parameter_work(profile, flat_rates).work_s[0] == pytest.approx(2 * 4 * 64 / FLOPS + adding_up(64))


def test_compiled_parts_get_no_hook_and_a_palette() -> None:
    inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 32, bias=False))
    stage = nn.Sequential(nn.Linear(8, 8), torch.compile(inner, backend="eager"))
    with record_forward(stage) as profile:
        assert num_hooks(inner) == 0
        assert num_hooks(stage[1]) == 0
        stage(torch.ones(5, 8))
    work = parameter_work(profile, flat_rates)
    assert work.palette_size == 4
    assert work.names[2:] == ("1._orig_mod.0.weight", "1._orig_mod.1.weight")
    assert work.work_s[3] == pytest.approx(2 * 5 * 256 / FLOPS + adding_up(256))
    assert work.forward_order.tolist() == [0, 1, 2, 3]
    whole = torch.compile(inner, backend="eager")
    with record_forward(whole) as profile:
        assert num_hooks(whole) == 0
    work = parameter_work(profile, flat_rates)
    assert work.palette_size == 4
    assert work.used.all()
    assert work.work_s[1] == pytest.approx(4 * work.work_s[0])
    in_place = nn.Sequential(nn.Linear(4, 4))
    in_place.compile(backend="eager")
    with record_forward(in_place) as profile:
        assert num_hooks(in_place) == 0
    assert profile.palette_size == 4


def test_a_parameter_that_the_user_froze_counts_although_the_graph_lacks_it() -> None:
    stage = Block()
    stage.raw.requires_grad_(False)
    work = work_of(stage, torch.ones(3, 8))
    assert work.used[work.names.index("raw")]
    assert work.work_s[work.names.index("raw")] > 0


def test_a_parameter_used_twice_counts_twice() -> None:
    embedding = nn.Embedding(50, 8)
    head = nn.Linear(8, 50, bias=False)
    head.weight = embedding.weight
    work = work_of(nn.Sequential(embedding, head), torch.arange(12).reshape(3, 4))
    table = 50 * 8
    assert work.names == ("0.weight",)
    looked_up = 2 * 12 * 8 * 4 / BYTES + 4 * table / BYTES
    assert work.work_s[0] == pytest.approx(2 * 12 * table / FLOPS + looked_up + adding_up(table))


def test_a_stage_may_have_no_parameters_and_take_no_tensor() -> None:
    class Source(nn.Module):
        def forward(self, n: int, flag: object = None) -> dict[str, object]:
            return {"h": torch.ones(n, 2), "n": n, "nothing": None}

    with record_forward(Source()) as profile:
        Source()(3)
    work = parameter_work(profile, flat_rates)
    assert work.names == ()
    assert work.palette_size is None


# --- costs ------------------------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[str, nn.Module, torch.Tensor, dict[str, float]]]:
    """(name, stage, input, seconds of each gradient without adding it up)."""
    x = torch.ones(5, 6, 8)
    tokens = 30
    yield "linear", nn.Linear(8, 4), x, {"weight": 2 * tokens * 32 / FLOPS, "bias": 2 * tokens * 4 * 4 / BYTES}
    yield "layer norm", nn.LayerNorm(8), x, dict.fromkeys(("weight", "bias"), 2 * tokens * 8 * 4 / BYTES)
    yield "own norm", Scale(8), x, {"weight": 2 * tokens * 8 * 4 / BYTES}
    ids = torch.zeros(5, 6, dtype=torch.long)
    looked_up = 2 * tokens * 8 * 4 / BYTES
    yield "embedding", nn.Embedding(100, 8), ids, {"weight": looked_up + 4 * 800 / BYTES}
    image = torch.ones(2, 3, 10, 10)
    conv = nn.Conv2d(3, 6, 3, stride=2)
    positions = 2 * 4 * 4
    yield "convolution", conv, image, {
        "weight": 2 * positions * conv.weight.numel() / FLOPS,
        "bias": positions * 6 * 4 / BYTES,
    }  # fmt: skip
    transposed = nn.ConvTranspose1d(3, 4, 5)
    signal = torch.ones(2, 3, 7)
    yield "transposed", transposed, signal, {
        "weight": 2 * 14 * transposed.weight.numel() / FLOPS,
        "bias": 2 * 11 * 4 * 4 / BYTES,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "module", "x", "expected"), list(cases()), ids=[case[0] for case in cases()])
def test_cost_of_each_kind(name: str, module: nn.Module, x: torch.Tensor, expected: dict[str, float]) -> None:
    work = work_of(nn.Sequential(module), x)
    found = {full.removeprefix("0."): time for full, time in zip(work.names, work.work_s, strict=True)}
    sizes = {key: parameter.numel() for key, parameter in module.named_parameters()}
    assert found == pytest.approx({key: time + adding_up(sizes[key]) for key, time in expected.items()})


def test_sparse_embeddings_do_not_touch_the_table() -> None:
    work = work_of(nn.Sequential(nn.Embedding(10_000, 8, sparse=True)), torch.zeros(4, dtype=torch.long))
    assert work.work_s[0] == pytest.approx(2 * 4 * 8 * 4 / BYTES)


def test_a_large_embedding_takes_longer_than_a_linear() -> None:
    """As measured: the dense gradient of 32k x 1024 against that of a 1024 x 1024 Linear, 256 tokens."""
    stage = nn.Sequential(nn.Embedding(32_000, 1024), nn.Linear(1024, 1024, bias=False))
    with record_forward(stage) as profile:
        stage(torch.zeros(2, 128, dtype=torch.long))
    for rates_of in (nominal_rates, measured_rates):
        work_s = parameter_work(profile, rates_of).work_s
        assert work_s[0] > work_s[1]


def test_autocast_is_rated_in_its_dtype() -> None:
    asked: set[torch.dtype] = set()

    def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
        asked.add(dtype)
        return Rates(FLOPS, BYTES)

    stage = nn.Sequential(nn.Linear(8, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        profile = profile_of(stage, torch.ones(2, 8))
    parameter_work(profile, rates_of)
    assert asked == {torch.bfloat16}


def test_rates_are_measured_once_without_random_numbers_or_thread_changes() -> None:
    device = torch.device("cpu")
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    rates = measured_rates(device, torch.float32)
    assert measured_rates(device, torch.float32) is rates
    assert 1e8 < rates.flops_per_s < 1e14
    assert 1e8 < rates.bytes_per_s < 1e13
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert measured_rates(device, torch.int64) == nominal_rates(device, torch.int64)


def test_nominal_works_repeat_bit_for_bit() -> None:
    works = [parameter_work(profile_of(Block(), torch.ones(3, 8)), nominal_rates) for _ in range(2)]
    assert works[0].to_json() == works[1].to_json()
    assert np.isfinite(works[0].work_s).all()
