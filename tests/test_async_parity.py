"""An asynchronous pipeline equals the same order in plain Python, to the last bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.async_reference import train_asynchronously
from timelyfreeze import AsyncPipeline, StageError
from timelyfreeze.runtime import Microbatch

WIDTH = 6


def make_stages(num_stages):
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double() for _ in range(num_stages)
    ]


def make_batches(num_batches=4, size=8):
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(), draw()) for _ in range(num_batches)]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.5)


def slices_of(batches, num_microbatches):
    cut = lambda t: t.tensor_split(num_microbatches)  # noqa: E731
    return [pair for x, y in batches for pair in zip(cut(x), cut(y), strict=True)]


def assert_equal(stages, expected):
    for stage, other in zip(stages, expected, strict=True):
        for p, q in zip(stage.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def run(stages, batches, num_microbatches=4, optimizer=adamw, **options):
    options = {"accelerate": False, "loss_fn": F.mse_loss} | options
    with AsyncPipeline(stages, num_microbatches=num_microbatches, optimizer=optimizer, **options) as pipe:
        losses = [result.loss for result in pipe.run(batches)]
        return losses, pipe.ledger


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 4])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_weights_and_losses_equal_the_reference(num_stages, accumulation, optimizer):
    stages, batches = make_stages(num_stages), make_batches()
    expected, losses = train_asynchronously(stages, optimizer, F.mse_loss, slices_of(batches, 4), accumulation)
    got, ledger = run(stages, batches, optimizer=optimizer, accumulation=accumulation)
    assert_equal(stages, expected)
    torch.testing.assert_close(torch.stack(got), torch.stack(losses).view(4, 4).mean(1), rtol=0, atol=1e-14)
    assert ledger.num_weight_copies == 0


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_predicted_weights_equal_the_reference(num_stages, accumulation):
    stages, batches = make_stages(num_stages), make_batches()
    slices = slices_of(batches, 4)
    expected, _ = train_asynchronously(stages, adamw, F.mse_loss, slices, accumulation, predict=True)
    plain, _ = train_asynchronously(stages, adamw, F.mse_loss, slices, accumulation)
    _, ledger = run(stages, batches, accumulation=accumulation, predict_weights=True)
    assert_equal(stages, expected)
    assert not torch.equal(plain[0][0].weight, expected[0][0].weight)
    assert ledger.num_weight_copies == 2 * (num_stages - 1)


def test_a_failing_forward_leaves_the_weights_of_the_last_update():
    seen = {}

    class Failing(nn.Linear):
        num_calls = 0

        def forward(self, x):
            self.num_calls += 1
            if self.num_calls == 6:
                seen["in forward"] = self.weight.detach().clone()
                raise RuntimeError("boom")
            return super().forward(x)

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            seen[id(self)] = self.param_groups[0]["params"][0].detach().clone()

    torch.manual_seed(0)
    failing = Failing(WIDTH, WIDTH, dtype=torch.float64)
    stages = [failing, nn.Linear(WIDTH, WIDTH, dtype=torch.float64)]
    options = {"num_microbatches": 4, "loss_fn": F.mse_loss, "accelerate": False}
    with AsyncPipeline(
        stages, optimizer=lambda p: Recording(p, lr=0.3), accumulation=1, predict_weights=True, **options
    ) as pipe:
        with pytest.raises(StageError, match="boom"):
            list(pipe.run(make_batches()))
        updated = seen[id(pipe.optimizers[0])]
    assert torch.equal(failing.weight, updated)
    assert not torch.equal(seen["in forward"], updated)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_stashed_weights_equal_the_reference(accumulation):
    stages, batches = make_stages(3), make_batches()
    options = {"stash": True}
    expected, _ = train_asynchronously(stages, adamw, F.mse_loss, slices_of(batches, 4), accumulation, **options)
    plain, _ = train_asynchronously(stages, adamw, F.mse_loss, slices_of(batches, 4), accumulation)
    _, ledger = run(stages, batches, accumulation=accumulation, schedule="pipedream")
    assert_equal(stages, expected)
    assert not torch.equal(plain[0][0].weight, expected[0][0].weight)
    assert ledger.num_weight_copies > 0
    assert ledger.max_drift == 2 // accumulation


def test_one_stage_equals_plain_training():
    (stage,), batches = make_stages(1), make_batches()
    model = copy.deepcopy(stage)
    optimizer = adamw(model.parameters())
    for index, (x, y) in enumerate(slices_of(batches, 4)):
        (F.mse_loss(model(x), y) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    run([stage], batches, accumulation=2)
    assert_equal([stage], [model])


def test_autocast_casts_the_newest_weights():
    """Its cache of casts would not notice that weights have changed in place."""
    torch.manual_seed(0)
    stage, batches = nn.Linear(WIDTH, WIDTH), [(x.float(), y.float()) for x, y in make_batches()]
    model = copy.deepcopy(stage)
    optimizer = sgd(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        run([stage], batches, optimizer=sgd)
    for x, y in slices_of(batches, 4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal([stage], [model])


def test_unequal_microbatches_weigh_by_their_samples():
    stages = make_stages(2)
    sizes = [3, 1, 2, 5, 1, 1]
    x, y = make_batches(1, sum(sizes))[0]
    slices = list(zip(x.split(sizes), y.split(sizes), strict=True))
    expected, _ = train_asynchronously(stages, sgd, F.mse_loss, slices, 3)
    batch = [Microbatch((a,), {}, b, len(a)) for a, b in slices]
    losses, _ = run(stages, [batch], 6, optimizer=sgd, accumulation=3)
    assert_equal(stages, expected)
    assert len(losses) == 1


def test_counting_losses_divide_an_update_by_its_count():
    stages, batches = make_stages(2), make_batches(2)

    def summed(output, target):
        return (output - target).square().sum(), target.numel()

    expected, _ = train_asynchronously(stages, sgd, F.mse_loss, slices_of(batches, 4), 2)
    losses, _ = run(stages, batches, optimizer=sgd, accumulation=2, loss_fn=summed)
    for stage, other in zip(stages, expected, strict=True):
        for p, q in zip(stage.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
    assert losses[0].dim() == 0


@pytest.mark.parametrize("num_microbatches", [3, 4])
def test_a_partial_window_steps_at_the_end(num_microbatches):
    """12 or 16 micro-batches leave a rest of 2 or 1 at accumulation 5."""
    stages, batches = make_stages(2), make_batches(size=12)
    expected, _ = train_asynchronously(stages, sgd, F.mse_loss, slices_of(batches, num_microbatches), 5)
    _, ledger = run(stages, batches, num_microbatches, optimizer=sgd, accumulation=5)
    assert_equal(stages, expected)
    assert [stage.num_updates for stage in ledger.stages] == [-(-4 * num_microbatches // 5)] * 2


def test_runs_without_a_drain_between_are_one_stream():
    batches = make_batches()
    together, apart = make_stages(3), make_stages(3)
    run(together, batches, accumulation=2)
    with AsyncPipeline(
        apart, num_microbatches=4, accumulation=2, optimizer=adamw, loss_fn=F.mse_loss, accelerate=False
    ) as pipe:
        first = list(pipe.run(batches[:2], drain=False))
        second = list(pipe.run(batches[2:], drain=False))
        assert [result.index for result in first + second] == [0, 1, 2, 3]
        assert pipe.drain() == []
    assert_equal(together, apart)


@pytest.mark.parametrize("memory", ["keep", "recompute"])
def test_dropout_repeats_bit_for_bit(memory):
    def build(seed):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh()).double() for _ in range(3)]
        run(stages, make_batches(), accumulation=2, memory=memory, seed=seed)
        return stages

    assert_equal(build(3), build(3))
    assert not torch.equal(build(3)[0][0].weight, build(4)[0][0].weight)


def test_recomputing_draws_what_forward_drew():
    """Without updates in between, recomputing changes nothing; dropout is the same."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh()).double() for _ in range(3)]
    other = copy.deepcopy(stages)
    run(stages, make_batches(1), accumulation=4, optimizer=sgd)
    run(other, make_batches(1), accumulation=4, optimizer=sgd, memory="recompute")
    assert_equal(stages, other)


@pytest.mark.parametrize("fused", [False, True])
def test_accelerated_modules_equal_the_reference_within_rounding(fused):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(3)]

    def make(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, fused=fused)

    batches = [(x.float(), y.float()) for x, y in make_batches()]
    expected, _ = train_asynchronously(stages, make, F.mse_loss, slices_of(batches, 4), 1)
    run(stages, batches, optimizer=make, accelerate=True)
    for stage, reference in zip(stages, expected, strict=True):
        for p, q in zip(stage.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


class Table(nn.Module):
    """Two outputs, one of integers, of which the next stage takes both."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        return {"x": self.linear(x), "skip": x.sin(), "places": torch.arange(len(x))}


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x, skip, places):
        return self.linear(x + skip)[places]


@pytest.mark.parametrize("memory", ["keep", "recompute"])
def test_extra_outputs_frozen_and_parameterless_stages(memory):
    torch.manual_seed(0)
    first, last = Table(), Reader()
    frozen = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)
    stages = [frozen, nn.Tanh(), nn.Linear(WIDTH, WIDTH).double(), first, last]
    before = copy.deepcopy(frozen)

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([first, last])

        def forward(self, x):
            return self.parts[1](**self.parts[0](x))

    batches = make_batches(3)
    reference = [*copy.deepcopy(stages[:3]), copy.deepcopy(Joined())]
    slices = slices_of(batches, 4)
    expected, _ = train_asynchronously(reference, sgd, F.mse_loss, slices[:4], 4)
    run(stages, batches[:1], optimizer=sgd, accumulation=4, memory=memory)
    assert torch.equal(stages[2].weight, expected[2].weight)
    assert torch.equal(first.linear.weight, expected[3].parts[0].linear.weight)
    assert torch.equal(last.linear.weight, expected[3].parts[1].linear.weight)
    assert torch.equal(frozen.weight, before.weight)
    _, ledger = run(stages, batches[1:], optimizer=sgd, memory=memory)
    assert [stage.num_updates for stage in ledger.stages] == [0, 0, 8, 8, 8]
