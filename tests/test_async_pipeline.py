"""What an asynchronous pipeline counts, keeps, refuses and resumes."""

from __future__ import annotations

import copy
import gc
import math
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from timelyfreeze import AsyncPipeline, StageError, create_schedule, simulate
from timelyfreeze.runtime.memory import count_saved_bytes
from timelyfreeze.schedule import Kind
from timelyfreeze.schedule.asynchronous import drift_bound, simulate_stream


def make_stages(num_stages=3, width=4):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_stages)]


def make_batches(num_batches=4, size=8, width=4):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(size, width, generator=generator), torch.zeros(size, width)) for _ in range(num_batches)]


def make_pipe(stages, **options):
    defaults = {"num_microbatches": 4, "loss_fn": F.mse_loss, "accelerate": False}
    return AsyncPipeline(stages, **(defaults | {"optimizer": sgd} | options))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_drift_is_the_orders_and_reaches_its_bound(num_stages, accumulation):
    with make_pipe(make_stages(num_stages), accumulation=accumulation) as pipe:
        list(pipe.run(make_batches(6)))
        ledger, report = pipe.ledger, pipe.report()
    on_paper = simulate_stream([1.0] * num_stages, [2.0] * num_stages, 24, accumulation=accumulation)
    for index, stage in enumerate(ledger.stages):
        assert stage.last == on_paper.drift[index]
        assert stage.bound == stage.max_drift == drift_bound(num_stages, index, accumulation)
        assert sum(stage.microbatches.values()) == 24
        assert stage.num_updates == 24 // accumulation
    assert report["max_drift"] == math.ceil((num_stages - 1) / accumulation)
    assert report["weight_copies"] == 0


@pytest.mark.parametrize("num_stages", [2, 4, 8, 16])
@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_on_paper_a_stream_is_flush_without_its_bubble(num_stages, num_microbatches):
    schedule = create_schedule("1f1b", num_ranks=num_stages, num_microbatches=num_microbatches)
    flush_s = simulate(schedule, {a: 1.0 if a.kind is Kind.F else 2.0 for a in schedule.actions}).makespan_s
    stream = simulate_stream([1.0] * num_stages, [2.0] * num_stages, 8 * num_stages)
    efficiency = num_microbatches / (num_microbatches + num_stages - 1)
    assert stream.period_s * num_microbatches == pytest.approx(flush_s * efficiency, rel=1e-9)


def test_evaluation_between_batches_leaves_training_untouched():
    plain, evaluated = make_stages(), make_stages()
    with make_pipe(plain) as pipe:
        losses = [result.loss for result in pipe.run(make_batches())]
    x, y = make_batches(1)[0]
    with make_pipe(evaluated) as pipe:
        first = pipe.evaluate(x, target=y)
        seen, evaluations = [], []
        for result in pipe.run(make_batches()):
            seen.append(result.loss)
            evaluations.append(pipe.evaluate(x, target=y))
        last = pipe.evaluate(x, target=y)
    assert torch.equal(torch.stack(losses), torch.stack(seen))
    for p, q in zip(nn.ModuleList(plain).parameters(), nn.ModuleList(evaluated).parameters(), strict=True):
        assert torch.equal(p, q)
    torch.testing.assert_close(first, F.mse_loss(nn.Sequential(*make_stages())(x), y))
    torch.testing.assert_close(last, F.mse_loss(nn.Sequential(*evaluated)(x), y))
    # The batch's result is one behind: the stages have been given the batch after it, too, and done what they can.
    assert evaluations[-1] > last


def test_the_modules_mode_is_as_before_an_evaluation():
    stages = make_stages()
    stages[1].eval()
    x, y = make_batches(1)[0]
    with make_pipe(stages) as pipe:
        pipe.evaluate(x, target=y)
    assert [stage.training for stage in stages] == [True, False, True]


def test_schedulers_step_by_batches_in_every_stage():
    rates = []

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            rates.append((id(self), self.param_groups[0]["lr"]))
            return super().step(closure)

    def halved(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    options = {"optimizer": lambda p: Recording(p, lr=1.0), "lr_scheduler": halved}
    with make_pipe(make_stages(2), accumulation=2, **options) as pipe:
        list(pipe.run(make_batches(3)))
        own = [id(optimizer) for optimizer in pipe.optimizers]
    for stage in own:
        assert [rate for owner, rate in rates if owner == stage] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("memory", ["keep", "recompute"])
def test_memory_is_that_of_the_outstanding_microbatches(memory):
    width, num_stages = 32, 3
    stages = [nn.Sequential(nn.Linear(width, width), *[nn.Tanh() for _ in range(6)]) for _ in range(num_stages)]
    parameters = [p for stage in stages for p in stage.parameters()]
    with make_pipe(stages, memory=memory) as pipe, count_saved_bytes(parameters) as saved:
        list(pipe.run(make_batches(6, 32, width)))
    one = 8 * width * 4
    layers = 8  # the input and the outputs of 7 layers
    assert saved.live_bytes == 0
    most = sum(range(1, num_stages + 1)) if memory == "keep" else num_stages
    assert saved.peak_bytes <= (most * layers + 4) * one
    assert memory == "recompute" or saved.peak_bytes > num_stages * layers * one


def count_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize(
    ("schedule", "num_batches"), [("paci", 500), ("pipedream", 500), pytest.param("paci", 2500, marks=pytest.mark.long)]
)
def test_nothing_piles_up_over_many_microbatches(schedule, num_batches):
    batch = make_batches(1, 4)[0]
    with make_pipe(make_stages(2), schedule=schedule) as pipe:
        counts = []
        for result in pipe.run(batch for _ in range(num_batches)):
            if result.index in (20, num_batches - 2):
                pipe.evaluate(batch[0], target=batch[1])  # the stages stand still
                counts.append(count_tensors())
        ledger = pipe.ledger
    assert counts[1] <= counts[0]
    assert len(ledger.stages[0].last) == 1024
    assert sum(ledger.stages[0].microbatches.values()) == 4 * num_batches


@pytest.mark.parametrize("accumulation", [1, 2])
def test_updates_that_are_not_finite_are_left_out_and_counted(accumulation):
    stages = make_stages(2)
    batches = make_batches(3)
    batches[1][0][3] = float("nan")  # micro-batch 5
    with make_pipe(stages, accumulation=accumulation) as pipe:
        losses = [result.loss for result in pipe.run(batches)]
        ledger = pipe.ledger
    assert [bool(loss.isfinite()) for loss in losses] == [True, False, True]
    assert [stage.num_skipped for stage in ledger.stages] == [1, 1]
    assert [stage.num_updates for stage in ledger.stages] == [12 // accumulation - 1] * 2
    assert all(p.isfinite().all() for stage in stages for p in stage.parameters())


def test_many_updates_that_are_not_finite_end_the_run():
    batches = make_batches(4)
    batches[1][0].fill_(float("inf"))
    with make_pipe(make_stages(2), max_skipped=3) as pipe:
        with pytest.raises(StageError, match="3 updates in a row") as caught:
            list(pipe.run(batches))
        assert isinstance(caught.value.__cause__, FloatingPointError)
        assert caught.value.action[1] == "U"
        assert len(list(pipe.run(make_batches(2)))) == 2


def test_clipping_goes_by_own_norms_and_the_shares_of_before():
    def build(max_grad_norm):
        stages = make_stages(2)
        seen = []

        class Recording(torch.optim.SGD):
            def step(self, closure=None):
                grads = [p.grad for group in self.param_groups for p in group["params"]]
                seen.append((id(self), torch.stack(torch._foreach_norm(grads)).norm()))
                return super().step(closure)

        options = {"optimizer": lambda p: Recording(p, lr=0.0), "max_grad_norm": max_grad_norm}
        with make_pipe(stages, accumulation=2, **options) as pipe:
            list(pipe.run(make_batches(3)))
            own = [id(optimizer) for optimizer in pipe.optimizers]
        return [torch.stack([norm for owner, norm in seen if owner == stage]) for stage in own]

    plain, clipped = build(None), build(1e-3)
    lag = 2
    for own, other, scaled in zip(plain, reversed(plain), clipped, strict=True):
        # The model's norm is so many times as large as the stage's own: at first as if both were alike.
        known = [own[: j + 1 - lag].norm() for j in range(lag, len(own))]
        both = [
            (own[: j + 1 - lag].square() + other[: j + 1 - lag].square()).sum().sqrt() for j in range(lag, len(own))
        ]
        ratios = torch.stack([torch.tensor(2.0).sqrt()] * lag + [x / y for x, y in zip(both, known, strict=True)])
        torch.testing.assert_close(scaled, 1e-3 / ratios, rtol=1e-3, atol=0.0)


def test_training_goes_on_exactly_from_a_saved_state():
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.05)

    def build():
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(3)]

    def decay(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    options = {"optimizer": adamw, "lr_scheduler": decay, "accumulation": 3}
    batches = make_batches(6)
    whole, resumed = build(), build()
    with make_pipe(whole, **options) as pipe:
        list(pipe.run(batches[:3], drain=False))
        weights, state = copy.deepcopy(pipe.state_dict()), copy.deepcopy(pipe.training_state_dict())
        list(pipe.run(batches[3:]))
    with make_pipe(resumed, **options) as pipe:
        pipe.load_state_dict(weights)
        pipe.load_training_state_dict(state)
        assert [result.index for result in pipe.run(batches[3:])] == [3, 4, 5]
    for p, q in zip(nn.ModuleList(whole).parameters(), nn.ModuleList(resumed).parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_results_are_not_waited_for_longer_than_they_must(num_stages):
    """A batch has 2 micro-batches: its result comes when the stages above the first can have got through it."""
    given = []

    def batches():
        for index, batch in enumerate(make_batches(6, 4)):
            given.append(index)
            yield batch

    with make_pipe(make_stages(num_stages), num_microbatches=2) as pipe:
        behind = [len(given) - 1 - result.index for result in pipe.run(batches())]
    lag = num_stages // 2
    assert behind == [lag] * (6 - lag) + list(range(lag - 1, -1, -1))


def test_batch_norm_keeps_its_statistics():
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    with make_pipe(stages) as pipe:
        list(pipe.run(make_batches(3)))
    assert [int(stage[1].num_batches_tracked) for stage in stages] == [12, 12]
    with make_pipe(stages, memory="recompute") as pipe, pytest.raises(ValueError, match=r"1 .BatchNorm1d.*statistics"):
        list(pipe.run(make_batches(1)))


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_weights_made_in_forward_are_refused_by_name(norm):
    stages = [nn.Sequential(norm(nn.Linear(4, 4))), nn.Linear(4, 4)]
    with make_pipe(stages) as pipe, pytest.raises(ValueError, match=r"0 .ParametrizedLinear.*stage 0"):
        list(pipe.run(make_batches(1)))
    with make_pipe(stages, schedule="pipedream") as pipe:
        assert len(list(pipe.run(make_batches(2)))) == 2


def test_unfit_arguments_are_refused():
    stages = make_stages(2)
    with pytest.raises(TypeError, match="LBFGS"):
        make_pipe(stages, optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match="5 problems"):
        make_pipe(stages, optimizer=None, accumulation=0, schedule="1f1b", memory="much", max_skipped=0)
    tied = make_stages(2)
    tied[1][0].weight = tied[0][0].weight
    with pytest.raises(ValueError, match=r"0\.0\.weight"):
        make_pipe(tied)
    with make_pipe(stages) as pipe, pytest.raises(TypeError, match="a batch"):
        list(pipe.run([torch.ones(4, 4)]))


def test_a_sequential_is_split_by_its_first_batch():
    model = nn.Sequential(*[layer for stage in make_stages(3) for layer in stage])
    with make_pipe(model, num_stages=2) as pipe:
        assert pipe.optimizers == []
        assert pipe.ledger.stages[0].bound == 1
        assert len(list(pipe.run(make_batches(2)))) == 2
        assert len(pipe.optimizers) == 2
        assert len(pipe.report()["split_points"]) == 1


@pytest.mark.long
def test_ten_thousand_microbatches_leave_memory_threads_and_descriptors_flat():
    def resident_mib():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    batches = make_batches(1)
    with make_pipe(make_stages(3), accumulation=3, max_grad_norm=1.0) as pipe:
        for _ in pipe.run(batches * 250, drain=False):
            pass
        before = resident_mib(), threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in pipe.run(batches * 2500):
            pass
        after = resident_mib(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    assert pipe.report()["batches"] == 2750
    assert after[1:] == before[1:]
    assert after[0] < before[0] + 4.0
