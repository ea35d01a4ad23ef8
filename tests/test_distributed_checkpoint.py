"""Checkpoints by name: any number of ranks writes them, any other goes on, and no kill or fault loses the last one."""

from __future__ import annotations

import fractions
import json
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn import functional as F

from tests import checkpoint_ranks as ranks
from tests.checkpoint_ranks import DealtPipe, assert_same, everything, folders, make_model, make_optimizer, train
from tests.pipelines import fixed_plan
from timelyfreeze import FreezeConfig, FreezingPipeline
from timelyfreeze.distributed import checkpoint_values
from timelyfreeze.distributed.checkpoint import (
    CheckpointError,
    export_state_dict,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)


def trained(steps=3, seed=0):
    pipe = DealtPipe(make_model(seed), step=steps)
    optimizer = make_optimizer(pipe)
    train(pipe, optimizer, range(steps))
    return pipe, optimizer


def fresh(**options):
    pipe = DealtPipe(make_model(seed=1))
    return pipe, make_optimizer(pipe, **options)


def merged(parts):
    whole = {}
    for part in parts:
        assert not whole.keys() & part.keys()
        whole |= part
    return whole


# --- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 2), (1, 2)])
def test_another_number_of_ranks_goes_on_bit_for_bit(tmp_path, saving, loading):
    parts = ranks.run_ranks(saving, ranks.train_and_save, tmp_path)
    assert {folder for folder, _ in parts} == {str(tmp_path / "step-000003")}
    pipe, optimizer = trained()
    held = everything(pipe, optimizer)
    assert_same(merged(part for _, part in parts), held)

    alone, own = ranks.load_and_train(None, tmp_path)
    assert_same(alone, held)
    assert own == {"step": 3, "split_points": [1]}
    train(pipe, optimizer, range(3, 5))
    loaded = ranks.run_ranks(loading, ranks.load_and_train, tmp_path, 2)
    assert all(state == own for _, state in loaded)
    assert_same(merged(part for part, _ in loaded), everything(pipe, optimizer))
    assert_same(export_state_dict(tmp_path), {k[1]: v for k, v in held.items() if k[0] == "model"})


def test_in_process_to_ranks_one_of_which_has_no_parameters(tmp_path):
    pipe, optimizer = trained()
    save_checkpoint(tmp_path, pipe, optimizer, extra={"rate": (0.1, None)})
    loaded = ranks.run_ranks(6, ranks.load_and_train, tmp_path)  # the last has the ReLU
    assert loaded[5][0] == {}
    assert_same(merged(part for part, _ in loaded), everything(pipe, optimizer))


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("state_dict", "rank 1: UnpicklableError: no state"),
        ("disk", "rank 1: OSError: [Errno 28] No space left on device"),
        ("unpicklable", "rank 1: UnpicklableError: odd error"),
        ("extra", "rank 1: extra['rng']: expected plain JSON data, got Tensor. Pass tensor.tolist()."),
        ("step", "got 5 on rank 0, 6 on rank 1"),
        ("shape", "expected (4, 4) torch.float32, as on rank 0, got (9,) torch.float32 (rank 1)"),
    ],
)
def test_a_rank_that_cannot_save_fails_all_ranks_and_leaves_nothing(tmp_path, kind, cause):
    answers = ranks.run_ranks(2, ranks.try_to_save, tmp_path / "new", kind)
    for text, left, then in answers:
        assert text.startswith("CheckpointError: cannot ")
        assert cause in text
        assert left == []
        assert then == "step-000005"


def test_a_mismatch_on_one_rank_is_told_on_all_and_touches_nothing(tmp_path):
    pipe, optimizer = trained()
    save_checkpoint(tmp_path, pipe, optimizer)
    texts = ranks.run_ranks(2, ranks.try_to_load, tmp_path, True)
    assert texts[0] == texts[1]
    for part in (
        "'1.weight': expected (5,) torch.float32, as in the model, got (4,) torch.float32 in the checkpoint",
        "the checkpoint lacks '5.weight', '5.bias'",
        "the checkpoint's optimizer lacks a parameter: expected '5.weight'",
    ):
        assert part in texts[0]
    assert ranks.run_ranks(2, ranks.try_to_load, tmp_path, False) == ["", ""]


# --- values ---------------------------------------------------------------------------------------------------------


def test_tensors_are_read_into_the_ones_that_are_there(tmp_path):
    pipe, optimizer = trained()
    save_checkpoint(tmp_path, pipe, optimizer)
    other, used = fresh(lr=0.9)
    train(other, used, range(2))
    states = [value for state in used.state.values() for value in state.values()]
    places = [value.data_ptr() for value in [*other.state_dict().values(), *states] if isinstance(value, torch.Tensor)]
    load_checkpoint(tmp_path, other, used)
    assert_same(everything(other, used), everything(pipe, optimizer))
    states = [value for state in used.state.values() for value in state.values()]
    now = [value.data_ptr() for value in [*other.state_dict().values(), *states] if isinstance(value, torch.Tensor)]
    assert now == places


def test_state_of_a_used_optimizer_goes_where_the_checkpoint_has_none(tmp_path):
    pipe = DealtPipe(make_model())
    save_checkpoint(tmp_path, pipe, make_optimizer(pipe))
    other, used = fresh()
    train(other, used, range(2))
    load_checkpoint(tmp_path, other, used)
    assert not used.state
    train(other, used, range(3))
    assert_same(everything(other, used), everything(*trained()))


def test_momentum_keeps_its_type_beside_short_weights_and_plain_numbers_survive(tmp_path):
    def make():
        pipe = DealtPipe(nn.Sequential(nn.Linear(3, 3, dtype=torch.bfloat16)))
        return pipe, torch.optim.SGD([p for _, p in pipe.named_parameters()], lr=torch.tensor(0.25), momentum=0.9)

    pipe, optimizer = make()
    weight, bias = optimizer.param_groups[0]["params"]
    optimizer.state[weight] = {"momentum_buffer": torch.randn(3, 3), "calls": 4, "parts": [torch.ones(2), {3: None}]}
    optimizer.state[bias] = {"momentum_buffer": None}
    optimizer.param_groups[0]["rate"] = np.float32(0.5)
    save_checkpoint(tmp_path, pipe, optimizer)
    other, loaded = make()
    loaded.param_groups[0]["lr"] = 1.0
    load_checkpoint(tmp_path, other, loaded)
    state = loaded.state[loaded.param_groups[0]["params"][0]]
    assert torch.equal(state["momentum_buffer"], optimizer.state[weight]["momentum_buffer"])
    assert state["momentum_buffer"].dtype == torch.float32
    assert state["calls"] == 4
    assert torch.equal(state["parts"][0].float(), torch.ones(2))
    assert state["parts"][1] == {3: None}
    assert loaded.state[loaded.param_groups[0]["params"][1]] == {"momentum_buffer": None}
    group = loaded.param_groups[0]
    assert (float(group["lr"]), group["momentum"], group["rate"]) == (0.25, 0.9, 0.5)
    assert isinstance(group["lr"], torch.Tensor)


def test_a_tied_weight_is_found_by_any_of_its_names(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    pipe = DealtPipe(model)
    optimizer = make_optimizer(pipe)
    train(pipe, optimizer, range(2))
    save_checkpoint(tmp_path, pipe, optimizer)
    for own in ("0.", "1."):  # as a rank that has but one of the two stages
        part = DealtPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        part._own = (own,)
        weights = torch.optim.AdamW([p for name, p in part.named_parameters() if name.endswith("weight")])
        with pytest.raises(CheckpointError, match="optimizer state of parameters not given") as error:
            load_checkpoint(tmp_path, part, weights)
        assert f"'{own}weight'" not in str(error.value)
    again = DealtPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    again._model[1].weight = again._model[0].weight
    other = make_optimizer(again, backwards=True)
    load_checkpoint(tmp_path, again, other)
    assert_same(everything(again, other), everything(pipe, optimizer))


def test_torchs_own_tools_read_it(tmp_path):
    pipe, optimizer = trained()
    folder = save_checkpoint(tmp_path, pipe, optimizer)
    dcp_to_torch_save(folder, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    tensors = {name: value for name, value in pipe.state_dict().items() if isinstance(value, torch.Tensor)}
    assert all(torch.equal(plain["model"][name], value) for name, value in tensors.items())
    assert plain["optim"]["param_groups"]["1.bias"]["betas"] == (0.8, 0.9)


def test_values_are_not_unpickled_beyond_plain_data(tmp_path, monkeypatch):
    pipe, optimizer = trained()
    pipe._model[3].calls = fractions.Fraction(1, 2)  # stands for anything that runs code when it is unpickled
    monkeypatch.setattr(checkpoint_values, "_plain", lambda value, name, faults: value)
    save_checkpoint(tmp_path, pipe, optimizer)
    for read in (lambda: load_checkpoint(tmp_path, *fresh()), lambda: export_state_dict(tmp_path)):
        with pytest.raises(CheckpointError, match=r"Unsupported .* fractions.Fraction|fractions.Fraction was not an"):
            read()


class _Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_foreign_metadata_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipe, optimizer = trained(1)
    folder = save_checkpoint("checkpoints", pipe, optimizer)
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil()))
    for read in (lambda: load_checkpoint(folder, pipe), lambda: export_state_dict(folder)):
        with pytest.raises(CheckpointError, match=r"posix\.mkdir has no place in a checkpoint's metadata"):
            read()
    assert not os.path.exists("evil")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda o: o.state[o.param_groups[0]["params"][0]].update(tool=object()), "tool: expected tensors and plain"),
        (lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(7))]}), "a tensor of shape (7,)"),
        (lambda o: o.state.update(extra={"a": 1}), "by parameter and text"),
    ],
)
def test_state_that_could_not_be_loaded_again_is_refused(tmp_path, change, text):
    pipe, optimizer = trained()
    change(optimizer)
    with pytest.raises(CheckpointError) as error:
        save_checkpoint(tmp_path, pipe, optimizer)
    assert text in str(error.value)
    assert folders(tmp_path) == []


def test_other_groups_other_types_and_no_optimizer_state_are_told(tmp_path):
    pipe, optimizer = trained()
    save_checkpoint(tmp_path / "whole", pipe, optimizer)
    save_checkpoint(tmp_path / "weights", pipe)
    other = DealtPipe(make_model(seed=1))
    before = everything(other, None)
    one_group = torch.optim.AdamW([p for _, p in other.named_parameters()])
    with pytest.raises(CheckpointError, match="parameter group 0 of the optimizer: expected parameters saved with the"):
        load_checkpoint(tmp_path / "whole", other, one_group)
    with pytest.raises(CheckpointError, match="Load it with optimizer=None"):
        load_checkpoint(tmp_path / "weights", other, one_group)
    assert_same(everything(other, None), before)
    model = make_model(seed=1).half()
    with pytest.raises(CheckpointError, match=r"'0.weight': expected \(4, 4\) torch.float16, as in the model, got"):
        load_checkpoint(tmp_path / "whole", DealtPipe(model))
    load_checkpoint(tmp_path / "weights", other)
    assert_same(everything(other, None), everything(pipe, None))
    assert load_checkpoint(tmp_path / "whole", other) == {}  # weights alone


def test_a_model_on_the_meta_device_is_refused(tmp_path):
    pipe = DealtPipe(nn.Sequential(nn.Linear(2, 2)))
    save_checkpoint(tmp_path, pipe)
    with pytest.raises(CheckpointError, match="meta device"):
        load_checkpoint(tmp_path, DealtPipe(nn.Sequential(nn.Linear(2, 2, device="meta"))))


# --- freezing state -------------------------------------------------------------------------------------------------


def freezing_pipeline(schedule="1f1b", stages=2, freeze=True):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    config = FreezeConfig(warmup_steps=1, ramp_steps=1) if freeze else None
    points = [2] if stages == 2 else [1, 2, 3]
    pipe = FreezingPipeline(model, stages, 4, schedule=schedule, loss_fn=F.mse_loss, freeze=config, split_points=points)
    return pipe


def test_the_freezing_state_goes_with_it_or_its_step_alone(tmp_path):
    with freezing_pipeline() as pipe:
        x = torch.randn(8, 6)
        for _ in range(3):
            pipe.step(x, target=x)
        saved = pipe.freeze_state_dict()
        save_checkpoint(tmp_path, pipe)
    with freezing_pipeline() as same, warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(tmp_path, same, freeze_state="load")
        assert same.freeze_state_dict() == saved
    for other in (
        freezing_pipeline("gpipe"),
        freezing_pipeline("interleaved_1f1b", 4),
        freezing_pipeline(freeze=False),
    ):
        with other:
            before = other.freeze_state_dict()
            with pytest.raises(CheckpointError, match="cannot load the freezing state"):
                load_checkpoint(tmp_path, other, freeze_state="load")
            assert other.freeze_state_dict() == before
            with pytest.warns(UserWarning, match="will be measured again"):
                load_checkpoint(tmp_path, other)
            assert other.freeze_state_dict() == {**before, "step": 3}
            other.step(x, target=x)
    with freezing_pipeline() as same, warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = same.freeze_state_dict()
        load_checkpoint(tmp_path, same, freeze_state="skip")
        assert same.freeze_state_dict() == {**fresh, "step": 3}
    with pytest.raises(CheckpointError, match="expected load, if_same_schedule or skip, got 'never'"):
        load_checkpoint(tmp_path, DealtPipe(nn.Sequential()), freeze_state="never")


def test_a_resumed_pipeline_has_the_same_losses_bit_for_bit(tmp_path):
    def go_on(pipe, optimizer, steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
        losses = []
        for _ in range(steps):
            losses.append(pipe.step(x, target=x * 0.5).loss)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def start():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(4)])
        config = FreezeConfig(plan=fixed_plan(2, 4, 0.5), ramp_steps=4)
        pipe = FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss, freeze=config, split_points=[2])
        return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)

    pipe, optimizer = start()
    with pipe:
        go_on(pipe, optimizer, 5)
        assert save_checkpoint(tmp_path, pipe, optimizer).name == "step-000005"
        expected = go_on(pipe, optimizer, 5)
    pipe, optimizer = start()
    with pipe:
        go_on(pipe, optimizer, 2)  # another way
        load_checkpoint(tmp_path, pipe, optimizer, freeze_state="load")
        losses = go_on(pipe, optimizer, 5)
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))


# --- folders --------------------------------------------------------------------------------------------------------


def test_the_newest_is_the_one_saved_last_and_old_ones_go(tmp_path):
    def save(step, **options):
        return save_checkpoint(tmp_path, DealtPipe(nn.Sequential(nn.Linear(2, 2)), step=step), **options).name

    assert latest_checkpoint(tmp_path / "none") is None
    assert [save(10), save(20), save(30)] == ["step-000010", "step-000020", "step-000030"]
    assert folders(tmp_path) == ["step-000020", "step-000030"]
    assert save(25) == "step-000025"  # went back to 20 and took another way
    assert folders(tmp_path) == ["step-000025", "step-000030"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000025"
    assert save(25) == "step-000025-2"
    assert folders(tmp_path) == ["step-000025-2", "step-000030"]
    assert save(25) == "step-000025"
    (tmp_path / ".step-000031.tmp-00ff").mkdir()
    (tmp_path / "step-notes").mkdir()
    assert save(40, keep_last=1) == "step-000040"
    assert folders(tmp_path) == ["step-000040", "step-notes"]
    with pytest.raises(CheckpointError, match="keep_last: expected at least 1, got 0"):
        save(50, keep_last=0)


def test_damage_is_found_before_anything_is_touched(tmp_path):
    pipe, optimizer = trained()
    save_checkpoint(tmp_path, pipe, optimizer)
    pipe._state["step"] = 4
    newest = save_checkpoint(tmp_path, pipe, optimizer)
    other, used = fresh()
    before = everything(other, used)

    data = newest / "__0_0.distcp"
    whole = data.read_bytes()
    place = whole.rindex(optimizer.state_dict()["state"][1]["exp_avg"].numpy().tobytes())
    data.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(CheckpointError, match=r"checksum of .* does not match .* may be loaded already"):
        load_checkpoint(tmp_path, *fresh())
    data.write_bytes(whole)
    os.truncate(data, data.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"damaged checkpoint: expected .* bytes, got .* bytes"):
        load_checkpoint(tmp_path, other, used)
    export_state_dict(tmp_path)  # the last byte is the optimizer's
    os.truncate(data, 100)
    with pytest.raises(CheckpointError, match="damaged checkpoint"):
        export_state_dict(tmp_path)
    (newest / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match="damaged checkpoint"):
        load_checkpoint(tmp_path, other, used)
    state = json.loads((newest / "state.json").read_text())
    (newest / "state.json").write_text(json.dumps({**state, "version": 99}))
    with pytest.raises(CheckpointError, match="another version: expected 1, got 99"):
        load_checkpoint(newest, other, used)
    assert_same(everything(other, used), before)

    (newest / ".metadata").unlink()
    with pytest.warns(UserWarning, match="passed over the checkpoint"):
        load_checkpoint(tmp_path, other, used)  # the one before
    assert_same(everything(other, used), everything(pipe, optimizer))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_checkpoint(tmp_path / "nothing", other, used)


# --- kills ----------------------------------------------------------------------------------------------------------


def test_a_kill_at_any_instant_leaves_the_last_one(tmp_path):
    [newest] = ranks.run_ranks(1, ranks.kill_each_instant, tmp_path)
    assert newest == sorted(newest)  # the old one up to the rename, then the new one
    assert newest.count(1) > 15
    assert newest.count(2) == 7  # fsync; rename, unlink three times and rmdir of the old one; no kill


@pytest.mark.parametrize(("rank", "instants"), [(0, (1, 6, 9)), (1, (1, 5))])
def test_a_killed_rank_leaves_the_last_one(tmp_path, rank, instants):
    pipe, optimizer = trained(steps=1)
    save_checkpoint(tmp_path, pipe, optimizer, extra={"rate": [0.1, None]})
    for number in instants:
        answers = ranks.start_ranks(2, ranks.save_and_be_killed, tmp_path, rank, number)
        assert answers[rank][0] == "killed"
        assert answers[1 - rank][0] == "failed", answers
        assert_same(ranks.load_and_train(None, tmp_path)[0], everything(pipe, optimizer))
