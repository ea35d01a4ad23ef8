"""What ranks do in tests of replicas, clipping and loss scaling. Each compares with one process."""

from __future__ import annotations

import copy
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import timelyfreeze
from tests import tied_ranks
from tests.pipelines import ratio_plan
from tests.replica_pairs import (
    DOUBLE,
    Fault,
    M,
    Pair,
    ScaledLoss,
    Wire,
    assert_close,
    batches,
    bits,
    everyone,
    joined,
    make_mesh,
    make_model,
    refused,
    sum_and_count,
)
from timelyfreeze import FreezeConfig, FreezingPipeline, StageError
from timelyfreeze.distributed.checkpoint import export_state_dict, load_checkpoint, save_checkpoint


def run(rank, num_ranks, names, **args):
    """The named checks, one after the other: by name, what went wrong, or an empty string."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)}
    outcomes = {}
    for name in names:
        try:
            (globals() | vars(tied_ranks))[name](rank, groups, **args)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
            print(f"{name}: {outcomes[name]}", file=sys.stderr, flush=True)  # in case that the other ranks wait for it
            break  # the ranks are no longer in step
    return outcomes


def plain(rank, groups, folder):
    """Losses, gradients and weights over several steps; mean and (sum, count) losses, a loss with parameters."""
    for loss_fn in (F.mse_loss, sum_and_count, ScaledLoss().double()):
        with Pair(rank, loss_fn=loss_fn) as pair:
            optimizers = pair.optimizers()
            for index in range(6):
                pair.step(index, sizes=(8, 6) if index % 2 else (4, 9))
                pair.compare()  # also while gradients add up: every second step the optimizers step
                if index % 2:
                    norms = [pipe.clip_grad_norm_(0.05) for pipe in (pair.pipe, pair.alone)]
                    torch.testing.assert_close(*norms, **DOUBLE)
                    assert float(norms[0]) > 0.05
                    assert len(set(everyone(float(norms[0])))) == 1
                    pair.compare()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            own = [bits(pair.pipe.parameters()), bits(p.grad for p in pair.pipe.parameters())]
            every = everyone(own)
            assert every[pair.own] == every[2 + pair.own], "replicas have drifted"
            y = batches(0)[pair.replica]
            value = joined(batches(0))
            torch.testing.assert_close(
                pair.pipe.evaluate(y[0], target=y[1]), pair.alone.evaluate(microbatches=value), **DOUBLE
            )


def interleaved(rank, groups, folder):
    """Several stages a rank, and a split backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]).double()
    for schedule in ("interleaved_1f1b", "zbv"):
        whole, part = copy.deepcopy(model), copy.deepcopy(model)
        options = {"num_stages": 4, "num_microbatches": M, "loss_fn": F.mse_loss, "split_points": [1, 2, 3]}
        parts = batches(0)
        with (
            FreezingPipeline(whole, schedule=schedule, **options) as alone,
            FreezingPipeline(part, schedule=schedule, mesh=make_mesh(), **options) as pipe,
        ):
            x, y = parts[rank // 2]
            alone.step(microbatches=joined(parts))
            pipe.step(x, target=y)
            assert_close(pipe, alone, **DOUBLE)


def unused(rank, groups, folder):
    """A live parameter that nobody uses keeps no gradient; one that a single replica uses has one on both."""
    with Pair(rank) as pair:
        x, y = batches(0)[pair.replica]
        pair.pipe.step(x, target=y)
        first = dict(pair.pipe.named_parameters())
        if pair.own == 0:
            assert first["0.never"].grad is None
            assert first["0.sometimes"].grad is None
        pair.pipe.step(x * (100.0 if pair.replica else 1.0), target=y)
        if pair.own == 0:
            assert first["0.never"].grad is None
            assert first["0.sometimes"].grad is not None
        every = everyone(bits(p.grad for p in pair.pipe.parameters()))
        assert every[pair.own] == every[2 + pair.own]


def frozen(rank, groups, folder):
    """The same masks on every replica; what is frozen in all micro-batches costs no bytes and keeps no gradient."""
    grid = [[0.7] * M, [0.5] * M]
    grids = {"some": grid, "first": [[1.0] * M, [0.0] * M], "averaged": grid}
    for name, ratios in grids.items():
        config = FreezeConfig(plan=ratio_plan(ratios), max_ratio=1.0, ramp_steps=0, warmup_steps=0)
        some_frozen = False
        with Pair(rank, freeze=config) as pair:
            optimizers = pair.optimizers()
            for index in range(8):
                with Wire() as wire:
                    result = pair.step(index, sizes=(8, 5))
                pair.compare()
                masks = everyone([live.tolist() for live in pair.masks.live])
                assert all(one == masks[0] for one in masks)
                reduced = [p for p in pair.pipe.parameters() if p.grad is not None]
                # One more number for each parameter: whether it was used at all.
                live_unused = 2 if pair.own == 0 and wire.sent else 0  # Extra's
                counted = sum(wire.sent) - sum(p.numel() + 1 for p in reduced)
                assert counted in ([0, 6, 12] if live_unused else [0]), (name, wire.sent, counted)
                some_frozen |= len(reduced) < len(list(pair.pipe.parameters()))
                if name == "first" and index > 0 and pair.own == 0:  # the first step finds out the work
                    assert wire.sent == []
                    assert reduced == []
                pair.pipe.clip_grad_norm_(0.1)
                pair.alone.clip_grad_norm_(0.1)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                pair.compare()
            assert result.phase == "steady"
            assert result.freeze_ratio > 0.3
            assert some_frozen or pair.own == 1


def frozen_by_user(rank, groups, folder):
    """Without masks too: what the user has frozen is not reduced; the replicas must agree on it."""
    with Pair(rank) as pair:
        for pipe in (pair.pipe, pair.alone):
            for name, parameter in pipe.named_parameters():
                parameter.requires_grad_(name == "5.weight")
        with Wire() as wire:
            pair.step(0)
        pair.compare()
        assert wire.sent == ([] if pair.own == 0 else [26])
        assert pair.pipe.clip_grad_norm_(1e9) > 0  # also where a rank has no gradient
        if rank == 3:
            dict(pair.pipe.named_parameters())["5.bias"].requires_grad_(True)
        assert "requires_grad flags" in refused(lambda: pair.step(1))
        dict(pair.pipe.named_parameters()).get("5.bias", torch.ones(1)).requires_grad_(False)
        pair.step(1)
        pair.compare()


def start(rank, groups, folder):
    """Replicas begin with the first one's values; other shapes are refused; so are modules that reduce themselves."""
    model = make_model(seed=10 + rank // 2)
    with Pair(rank, model=model) as pair:
        wanted = dict(make_model(seed=10).named_parameters())
        assert all(torch.equal(p, wanted[name]) for name, p in pair.pipe.named_parameters())
    wide = make_model(width=5 + rank // 2)
    assert "parameters and buffers on every replica" in refused(
        lambda: FreezingPipeline(wide, 2, M, loss_fn=F.mse_loss, mesh=make_mesh())
    )
    wrapped = make_model()
    wrapped[1] = nn.parallel.DistributedDataParallel(wrapped[1], process_group=groups[1]) if rank == 0 else wrapped[1]
    if rank == 0:
        text = refused(lambda: FreezingPipeline(wrapped, 1, M, loss_fn=F.mse_loss, process_group=groups[1]))
        assert "DistributedDataParallel" in text
        assert "mesh=" in text


def failures(rank, groups, folder):
    """A failure on one replica, wherever the others are: everyone gets it, and the next step is right."""
    with Pair(rank) as pair:
        optimizers = pair.optimizers()
        pair.step(0)
        cases = [("forward", 2, 0), ("backward", 2, 0), ("late backward", 2, M - 1), ("backward", 3, 1)]
        for todo, place, microbatch in [*cases, ("forward", 3, M - 1)]:
            faults = [m for name, m in pair.pipe.named_modules() if name.endswith(str(place)) and isinstance(m, Fault)]
            x, y = batches(1)[pair.replica]
            if rank // 2 == 1:
                for fault in faults:
                    fault.todo, fault.microbatch = todo, microbatch
            before = bits(p.grad for p in pair.pipe.parameters())
            try:
                with Wire(f"{todo} {rank}") as wire:
                    pair.pipe.step(x, target=y)
                raised = None
            except StageError as error:
                raised = error
            assert f"boom in {todo.removeprefix('late ')}" in str(raised)
            assert raised.rank == 2 + (place == 3)
            # In the late case three ranks of four have begun to reduce what then never comes.
            assert todo != "late backward" or bool(wire.sent) == (rank != 2)
            assert before == bits(p.grad for p in pair.pipe.parameters())
            pair.step(1)
            pair.compare()
        for optimizer in optimizers:
            optimizer.step()
        pair.compare()


# --- loss scaling ---------------------------------------------------------------------------------------------------


def scaling(rank, groups, folder):
    """An overflow on one rank, and ranks without gradients: all skip alike and scale alike."""
    for kind in (torch.amp.GradScaler, timelyfreeze.GradScaler):
        scale_with(rank, kind, None)
    first = FreezeConfig(plan=ratio_plan([[1.0] * M, [0.0] * M]), max_ratio=1.0, ramp_steps=0, warmup_steps=0)
    scale_with(rank, timelyfreeze.GradScaler, first)


def scale_with(rank, kind, freeze):
    model = make_model().float()
    with FreezingPipeline(
        model, 2, M, loss_fn=F.mse_loss, mesh=make_mesh(), split_points=[3], freeze=freeze, accelerate=False
    ) as pipe:
        scaler = kind("cpu", init_scale=1024.0, growth_interval=2)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        # Where: in the first stage of replica 1, or in its last one where the first has no gradients.
        spoiled = dict(pipe.model.named_parameters()).get("1.weight" if freeze is None else "4.weight")
        scales = []
        for index in range(6):
            hook = None
            if index == 3 and rank // 2 == 1 and spoiled is not None:
                hook = spoiled.register_hook(lambda grad: grad * torch.inf)
            x, y = (tensor.float() for tensor in batches(index)[rank // 2])
            before = bits(pipe.parameters())
            pipe.step(x, target=y, grad_scaler=scaler)
            if index == 4:
                scaler.unscale_(optimizer)
                assert float(pipe.clip_grad_norm_(1e-3)) < 100.0
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved = before != bits(pipe.parameters())
            # Under masks the first step, which finds out the work, is the only one that trains the first stage.
            assert moved == (index != 3 and (freeze is None or rank % 2 == 1 or index == 0))
            scales.append(scaler.get_scale())
            if hook is not None:
                hook.remove()
        assert scales == [1024.0, 2048.0, 2048.0, 1024.0, 1024.0, 2048.0], scales
        assert all(every == scales for every in everyone(scales))


# --- sharded stages -------------------------------------------------------------------------------------------------


def sharded(rank, groups, folder):
    """Stages under FSDP2 over the replicas: losses, gradients, clipping and weights as those of the whole model."""
    from torch.distributed.fsdp import fully_shard

    mesh = make_mesh()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)]
    whole = nn.Sequential(*layers).double()
    part = copy.deepcopy(whole)
    for layer in part[rank % 2]:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["dp"])
    fully_shard(part[rank % 2], mesh=mesh["dp"])
    options = {"num_stages": 2, "num_microbatches": M, "loss_fn": F.mse_loss, "split_points": [1]}
    plan = FreezeConfig(plan=ratio_plan([[0.5] * M, [0.5] * M]))
    assert "under fully_shard" in refused(lambda: FreezingPipeline(part, mesh=mesh, freeze=plan, **options))
    if rank == 0:
        assert "mesh=" in refused(lambda: FreezingPipeline(part, **options))
    with (
        FreezingPipeline(whole, **options) as alone,
        FreezingPipeline(part, mesh=mesh, **options) as pipe,
        Wire() as wire,
    ):
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (alone, pipe)]
        for index in range(6):
            parts = batches(index)
            x, y = parts[rank // 2]
            result = pipe.step(x, target=y)
            torch.testing.assert_close(result.loss, alone.step(microbatches=joined(parts)).loss, **DOUBLE)
            assert_close_shards(pipe, alone)
            value = pipe.evaluate(x, target=y)
            torch.testing.assert_close(value, alone.evaluate(microbatches=joined(parts)), **DOUBLE)
            if index % 2:
                norms = [one.clip_grad_norm_(0.01) for one in (pipe, alone)]
                torch.testing.assert_close(*norms, **DOUBLE)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                assert_close_shards(pipe, alone)
            if index == 3:
                save_and_load(folder + "/sharded", pipe, optimizers[1])
            if index == 2:
                before = bits(p.grad.to_local() for p in pipe.parameters())
                handle = pipe.model.get_submodule(f"{rank % 2}").register_forward_pre_hook(fail_forward)
                with pytest.raises(StageError, match="boom"):
                    pipe.step(x, target=y)
                handle.remove()
                assert before == bits(p.grad.to_local() for p in pipe.parameters())
        assert wire.sent == []  # the pipeline itself reduces nothing


def save_and_load(folder, pipe, optimizer):
    """A checkpoint holds whole tensors, and brings back the shards."""
    save_checkpoint(folder, pipe, optimizer)
    exported = export_state_dict(folder)
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.full_tensor(), exported[name]), name
    states = [value for state in optimizer.state.values() for value in state.values() if hasattr(value, "to_local")]
    own = [*pipe.parameters(), *states]
    before = bits(tensor.to_local() for tensor in own)
    with torch.no_grad():
        for tensor in own:
            tensor.zero_()
    load_checkpoint(folder, pipe, optimizer)
    states = [value for state in optimizer.state.values() for value in state.values() if hasattr(value, "to_local")]
    assert len(states) == 2 * len(list(pipe.parameters()))
    assert before == bits(tensor.to_local() for tensor in [*pipe.parameters(), *states])


def fail_forward(module, args):
    raise RuntimeError("boom in every replica")


def assert_close_shards(pipe, alone):
    reference = dict(alone.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), reference[name], **DOUBLE)
        if reference[name].grad is not None:
            torch.testing.assert_close(parameter.grad.full_tensor(), reference[name].grad, **DOUBLE)
