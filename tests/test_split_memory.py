"""How much memory waits between I and W, that it is capped, and that none of it stays."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.split_layers import (
    LAYERS,
    WAITING,
    WIDTH,
    Layer,
    assert_close_grads,
    batch,
    make,
    run,
)
from timelyfreeze import FreezingPipeline, StageError
from timelyfreeze.runtime.memory import count_saved_bytes


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("cap", [None, 0])
def test_checkpointed_stages(use_reentrant, cap):
    """Recomputed layers wait as others do; between F and I nothing but the checkpoint's input is kept."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, WIDTH))
            self.enabled, self.ready, self.kept_bytes = True, [], []

        def forward(self, x):
            self.ready.append([p.grad is not None for p in self.parameters()])
            with count_saved_bytes(self.parameters()) as saved:
                y = checkpoint(self.inner, x, use_reentrant=use_reentrant) if self.enabled else self.inner(x)
            self.kept_bytes.append(saved.live_bytes)
            return y

    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    models = [nn.Sequential(copy.deepcopy(first), Checkpointed()).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    models[1][1].enabled = False
    x, y = batch()
    results = [run(model, x, y, max_pending_bytes=cap) for model in models]
    assert_close_grads(*models)
    checkpointed, plain = (model[1] for model in models)
    assert all(a < b for a, b in zip(checkpointed.kept_bytes, plain.kept_bytes, strict=True))
    assert checkpointed.ready == plain.ready == [[False] * 4, [cap == 0] * 4] * 2
    if cap == 0:
        assert results[0].peak_pending_bytes == [0]
    else:
        assert 0 < results[0].peak_pending_bytes[0] <= results[1].peak_pending_bytes[0]


def kept_bytes(num_rows, *widths):
    return [sum(num_rows * width for width in widths) * 8]


def test_bytes_that_wait_are_counted_once_a_storage():
    """Of every layer its input and its output's gradient, from I to W; what several layers read counts once."""

    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            return torch.tanh(self.q(x)) * torch.tanh(self.k(x)) * torch.tanh(self.v(x))

    model = Three().double()
    x, y = batch()
    rows = 2 * 3
    # The input is a slice of the batch: its storage is the batch's.
    assert run(model, x, y).peak_pending_bytes == [x.nbytes + 2 * kept_bytes(rows, *[WIDTH] * 3)[0] + x.nbytes]
    model.q.weight.requires_grad_(False)
    model.k.weight.requires_grad_(False)  # frozen: never queued
    assert run(model, x, y).peak_pending_bytes == [x.nbytes + 2 * kept_bytes(rows, WIDTH)[0] + x.nbytes]
    model.v.weight.requires_grad_(False)
    assert run(model, x, y).peak_pending_bytes == [0]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_pending_bytes_stay_under_the_cap(share):
    layer = Layer(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)]))
    free, capped = make(layer), make(layer)
    x, y = batch()
    peak = run(free, x, y).peak_pending_bytes[0]
    cap = int(share * peak)
    result = run(capped, x, y, max_pending_bytes=cap)
    assert result.peak_pending_bytes[0] <= cap
    assert (result.peak_pending_bytes[0] == peak) == (share == 1.0)
    assert_close_grads(capped, free)
    if 0 < share < 0.5:  # the first micro-batch alone takes half of it
        assert 0 < len(capped.ready[1]) < 16


def test_wrong_caps_are_refused():
    with pytest.raises(ValueError, match="max_pending_bytes"):
        FreezingPipeline([nn.Linear(2, 2)], num_microbatches=1, max_pending_bytes=-1)


def test_nothing_is_kept_after_a_step_without_the_garbage_collector():
    """Case 18: no cycle holds an activation, neither where W ran nor where the step failed before it."""
    storages = []

    class Noting(nn.Module):
        fails = False

        def forward(self, x):
            storages.append(StorageWeakRef(x.untyped_storage()))
            if self.fails:
                x.register_hook(self.fail)
            return x

        def fail(self, grad):
            raise RuntimeError("planted")

    noting = Noting()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), noting, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x, y = batch(dtype=torch.float32)
    with FreezingPipeline([model], num_microbatches=2, loss_fn=F.mse_loss, schedule=WAITING) as pipe:
        gc.collect()
        gc.disable()
        try:
            for fails in (False, True, False):
                noting.fails = fails
                if fails:
                    with pytest.raises(StageError, match="planted"):
                        pipe.step(x, target=y)
                else:
                    pipe.step(x, target=y)
            noting.fails = False
            pipe.step(x, target=y)
            assert len(storages) == 7
            assert all(storage.expired() for storage in storages[-2:])
            assert all(storage.expired() for storage in storages[:2])
        finally:
            gc.enable()


def test_evaluation_and_inference_leave_nothing_waiting():
    watched = make(LAYERS["mlp"])
    x, y = batch()
    with FreezingPipeline([watched], num_microbatches=2, loss_fn=F.mse_loss, schedule=WAITING) as pipe:
        loss = pipe.evaluate(x, target=y)
        torch.testing.assert_close(loss, F.mse_loss(watched.layer(x), y))
        torch.testing.assert_close(pipe(x), watched.layer(x).detach())
        assert all(p.grad is None for p in watched.parameters())
