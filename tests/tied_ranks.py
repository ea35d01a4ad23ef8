"""What ranks do in tests of tied parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.pipelines import ratio_plan
from tests.replica_pairs import DOUBLE, M, assert_close, bits, everyone, joined, make_mesh, refused
from timelyfreeze import FreezeConfig, FreezingPipeline
from timelyfreeze.distributed.checkpoint import export_state_dict, load_checkpoint, save_checkpoint


class Head(nn.Module):
    """Uses the embedding's weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(torch.tanh(x), self.weight)


class Mixed(nn.Module):
    """A layer that uses the embedding's weight on its way."""

    def __init__(self, weight):
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[1])
        self.weight = weight

    def forward(self, x):
        return self.linear(x) + F.linear(F.linear(x, self.weight), self.weight.t())


def tied_model(num_stages):
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 4)
    middle = [Mixed(embedding.weight) for _ in range(num_stages - 2)]
    return nn.Sequential(embedding, *middle, Head(embedding.weight)).double()


def tokens(step, size=8):
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 11, (size,), generator=generator) for _ in range(2))


def ties(rank, groups, folder):
    """Over two and three ranks, plain, under masks and frozen: bit for bit the tied model in one process."""
    for size in (2, 3):
        if rank >= size:
            continue
        half = ratio_plan([[0.6] * M for _ in range(size)])
        for freeze in (None, FreezeConfig(plan=half, max_ratio=1.0, ramp_steps=0, warmup_steps=0)):
            whole, part = tied_model(size), tied_model(size)
            options = {"num_stages": size, "num_microbatches": M, "loss_fn": F.cross_entropy, "freeze": freeze}
            with (
                FreezingPipeline(whole, **options) as alone,
                FreezingPipeline(part, process_group=groups[size], **options) as pipe,
            ):
                train_tied(pipe, alone)


def train_tied(pipe, alone):
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (pipe, alone)]
    nothing = {"rtol": 0, "atol": 0}
    for index in range(8):
        x, y = tokens(index)
        if index == 4:  # case 4: nobody has a gradient
            for one in (pipe, alone):
                for name, parameter in one.named_parameters(remove_duplicate=False):
                    parameter.requires_grad_("linear" in name)
        results = [one.step(x, target=y) for one in (pipe, alone)]
        assert torch.equal(results[0].loss, results[1].loss)
        assert_close(pipe, alone, **nothing)
        if index % 2:
            norms = [one.clip_grad_norm_(0.01) for one in (pipe, alone)]
            assert torch.equal(*norms)
            norms = [one.clip_grad_norm_(0.01, float("inf")) for one in (pipe, alone)]
            assert torch.equal(*norms)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_close(pipe, alone, **nothing)


def tie_flags(rank, groups, folder):
    """A tied parameter that only some ranks have frozen is refused on all of them."""
    if rank < 2:
        model = tied_model(2)
        with FreezingPipeline(model, 2, M, loss_fn=F.cross_entropy, process_group=groups[2]) as pipe:
            x, y = tokens(0)
            for parameter in pipe.parameters():
                parameter.requires_grad_(rank == 0)
            text = refused(lambda: pipe.step(x, target=y))
            assert "0.weight and 1.weight" in text
            assert "True on rank 0, False on rank 1" in text
            for parameter in pipe.parameters():
                parameter.requires_grad_(True)
            pipe.step(x, target=y)
            assert all(parameter.grad is not None for parameter in pipe.parameters())


def tied_replicas(rank, groups, folder):
    """Ties and replicas together; the copies stay one value, and checkpoints hold it."""
    whole, part = tied_model(2), tied_model(2)
    options = {"num_stages": 2, "num_microbatches": M, "loss_fn": F.cross_entropy}
    with (
        FreezingPipeline(whole, **options) as alone,
        FreezingPipeline(part, mesh=make_mesh(), **options) as pipe,
    ):
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (pipe, alone)]
        for index in range(5):
            parts = [tokens(index), tokens(50 + index, size=6)]
            x, y = parts[rank // 2]
            loss = pipe.step(x, target=y).loss
            torch.testing.assert_close(loss, alone.step(microbatches=joined(parts)).loss, **DOUBLE)
            assert_close(pipe, alone, **DOUBLE)
            norms = [float(one.clip_grad_norm_(0.01)) for one in (pipe, alone)]
            torch.testing.assert_close(*norms, **DOUBLE)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            every = everyone(bits(pipe.parameters()))
            assert all(one == every[0] for one in every), "copies have drifted"
        save_checkpoint(folder, pipe, optimizers[0])
        saved = everyone(pipe.state_dict())
        exported = export_state_dict(folder)
        assert set(exported) == {"0.weight", "1.weight"}
        assert all(torch.equal(saved[0]["0.weight"], value) for value in exported.values())
        if rank == 0:
            model = tied_model(2)
            with FreezingPipeline(model, **options) as again:
                optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
                load_checkpoint(folder, again, optimizer)
                assert torch.equal(model[0].weight, saved[0]["0.weight"])
                assert model[0].weight is model[1].weight
                own = optimizers[0].state_dict()["state"][0]
                for name, value in optimizer.state_dict()["state"][0].items():
                    assert torch.equal(value, own[name]), name
