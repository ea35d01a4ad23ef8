"""Loss scaling in an asynchronous pipeline: exact where nothing overflows, delayed where something does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from timelyfreeze import AsyncPipeline, StageError
from timelyfreeze.asynchronous.scaling import DelayedLossScale

NUM_MICROBATCHES = 4


def make_stages(num_stages=2, width=8):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(num_stages)]


def make_batches(num_batches, size=16, width=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, width, generator=generator), 0.1 * torch.randn(size, width, generator=generator))
        for _ in range(num_batches)
    ]


def make_pipe(stages, **options):
    defaults = {
        "num_microbatches": NUM_MICROBATCHES,
        "accumulation": NUM_MICROBATCHES,
        "loss_fn": F.mse_loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "accelerate": False,
    }
    return AsyncPipeline(stages, **(defaults | options))


def scaler(init_scale, growth_interval=1000):
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)


def weights(stages):
    return [parameter.detach().clone() for stage in stages for parameter in stage.parameters()]


@pytest.mark.parametrize("options", [{}, {"accumulation": 3}, {"memory": "recompute"}, {"max_grad_norm": 0.1}])
def test_a_power_of_two_changes_no_bit(options):
    trained = []
    for grad_scaler in (None, scaler(1024.0), scaler(2.0**-8)):
        stages = make_stages(3)
        with make_pipe(stages, grad_scaler=grad_scaler, **options) as pipe:
            losses = [result.loss for result in pipe.run(make_batches(5))]
        trained.append([*losses, *weights(stages)])
    for mine, its, other in zip(*trained, strict=True):
        assert torch.equal(mine, its)
        assert torch.equal(mine, other)


def test_float16_trains_once_the_scale_no_longer_overflows():
    stages = make_stages()
    grad_scaler = scaler(2.0**30)
    # 65504 is float16's largest: the first updates overflow at scales so large, more of them than may be in a row.
    with make_pipe(stages, grad_scaler=grad_scaler, max_skipped=3) as pipe, torch.autocast("cpu", torch.float16):
        losses = [float(result.loss) for result in pipe.run(make_batches(1) * 60)]
        report = pipe.report()
    assert all(skipped > 3 for skipped in report["skipped_updates"])
    assert report["loss_scale"] == grad_scaler.get_scale() < 2.0**24
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.isfinite().all() for parameter in weights(stages))


@pytest.mark.parametrize("num_stages", [2, 4])
def test_scales_are_those_of_the_rule_applied_lag_updates_late(num_stages):
    overflows = {2, 3, 9}
    seen = []

    class Loss(nn.Module):
        """Overflows in some batches, and keeps what its backward is given."""

        def __init__(self):
            super().__init__()
            self.num_calls = 0

        def forward(self, x, target):
            batch = self.num_calls // NUM_MICROBATCHES
            self.num_calls += 1
            loss = F.mse_loss(x, target)
            loss.register_hook(lambda grad: seen.append((batch, float(grad) * NUM_MICROBATCHES)))
            return loss * (float("inf") if batch in overflows else 1.0)

    loss = Loss()
    with make_pipe(
        make_stages(num_stages), num_microbatches=NUM_MICROBATCHES, loss_fn=loss, grad_scaler=scaler(64.0, 3)
    ) as pipe:
        list(pipe.run(make_batches(14)))
    lag = 2
    # By hand: an update's scale depends on the ones at least `lag` before it; clean ones in a row are counted to 3.
    scale, num_clean, scales = 64.0, 0, []
    for batch in range(14):
        looked_at = batch - lag
        if looked_at in overflows:
            scale, num_clean = (scale / 2 if scales[looked_at] <= scale else scale), 0
        elif looked_at >= 0:
            num_clean += 1
            if num_clean == 3:
                scale, num_clean = scale * 2, 0
        scales.append(scale)
    assert scales[4:6] == [32.0, 32.0], "the second overflow, at the same scale as the first, lowers it no further"
    found = {batch: grad for batch, grad in seen if batch not in overflows}
    assert found == {batch: one for batch, one in enumerate(scales) if batch not in overflows}


def test_what_no_scale_mends_ends_the_run():
    x, y = make_batches(1)[0]
    broken = [(x, y * float("nan"))] * 40
    with make_pipe(make_stages(), grad_scaler=scaler(8.0), max_skipped=4) as pipe:
        with pytest.raises(StageError, match="4 updates in a row"):
            list(pipe.run(broken))
        assert pipe.report()["loss_scale"] <= 1.0
        assert len(list(pipe.run(make_batches(2)))) == 2


def test_a_resumed_run_has_the_scales_and_norms_of_the_one_that_went_on():
    batches = make_batches(12)
    options = {"max_grad_norm": 0.01, "accumulation": 3}

    def float16():
        return torch.autocast("cpu", torch.float16)

    whole, resumed = make_stages(3), make_stages(3)
    with make_pipe(whole, grad_scaler=scaler(2.0**20, 5), **options) as pipe, float16():
        list(pipe.run(batches[:6], drain=False))
        saved, state = copy.deepcopy(pipe.state_dict()), copy.deepcopy(pipe.training_state_dict())
        list(pipe.run(batches[6:]))
        final = pipe.report()["loss_scale"]
    with make_pipe(resumed, grad_scaler=scaler(4.0, 5), **options) as pipe, float16():
        pipe.load_state_dict(saved)
        pipe.load_training_state_dict(state)
        list(pipe.run(batches[6:]))
        assert pipe.report()["loss_scale"] == final
    assert state["loss_scale"]["scale"] != 4.0
    assert all(torch.equal(mine, its) for mine, its in zip(weights(whole), weights(resumed), strict=True))


def test_an_update_at_an_older_larger_scale_does_not_lower_it_twice():
    scale = DelayedLossScale(scaler(8.0), num_places=1, lag=2)
    given = []
    for _ in range(5):
        given.append(scale.begin_update())
        scale.end_update(0, finite=False)
    assert given == [8.0, 8.0, 4.0, 4.0, 2.0]


def test_what_is_no_scaler_is_refused():
    with pytest.raises(ValueError, match=r"grad_scaler.*torch\.amp\.GradScaler"):
        make_pipe(make_stages(), grad_scaler=1024.0)
    with make_pipe(make_stages(), grad_scaler=torch.amp.GradScaler("cpu", enabled=False)) as pipe:
        list(pipe.run(make_batches(1)))
        assert pipe.report()["loss_scale"] is None
