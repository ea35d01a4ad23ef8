"""What modules keep or draw (dropout, statistics, checkpoints, autocast), and what a step leaves behind."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.models import assert_same_grads, mlp, plain_step
from timelyfreeze import FreezingPipeline


def run_dropout(num_stages, seed=0, steps=2, inline=False):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4)])
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with FreezingPipeline(model, num_stages, 4, loss_fn=F.mse_loss, seed=seed, split_points=[2]) as pipe:
        return [pipe.step(x, target=y).loss.item() for _ in range(steps)], [p.grad for p in model.parameters()]


def test_dropout_depends_on_seed_step_stage_and_microbatch_alone():  # CASES 40
    state = torch.get_rng_state()
    losses, grads = run_dropout(2)
    torch.manual_seed(99)  # the user's generator plays no part
    again, grads_again = run_dropout(2)
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))
    assert losses[0] != losses[1]
    assert losses != run_dropout(2, seed=1)[0]
    torch.set_rng_state(state)


def test_the_users_generator_is_untouched():
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    x = torch.randn(4, 6)
    with FreezingPipeline(model, 2, 2, loss_fn=F.mse_loss) as pipe:
        before = torch.get_rng_state()
        pipe.step(x, target=x)
        pipe(x)
        pipe.evaluate(x, target=x)
        assert torch.equal(before, torch.get_rng_state())


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for module in (self.body[:2], self.body[2:]):
            x = module(x) if self.use_reentrant is None else checkpoint(module, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_regions_recompute_the_same_dropout(use_reentrant):
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    grads = []
    for reentrant in (None, use_reentrant):
        torch.manual_seed(0)
        model = [nn.Linear(6, 6), Checkpointed(reentrant), Checkpointed(reentrant)]
        with FreezingPipeline(model, num_microbatches=4, loss_fn=F.mse_loss) as pipe:
            pipe.step(x, target=y)
        grads.append([p.grad for stage in model for p in stage.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_batch_norm_sees_each_microbatch_once_and_evaluate_none():  # CASES 41, 42
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    with FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, target=y)
        plain_step(reference, F.mse_loss, x, y, 4)
        assert torch.equal(model[1].running_var, reference[1].running_var)
        assert model[1].num_batches_tracked == 4
        assert_same_grads(model, reference)
        loss = pipe.evaluate(x, target=y)
        assert torch.equal(model[1].running_var, reference[1].running_var)
        assert model.training
        assert model[1].training
        torch.testing.assert_close(loss, F.mse_loss(reference.eval()(x), y).detach())


def test_forward_gives_the_models_output_without_a_graph():
    model = mlp()
    x = torch.randn(10, 6)
    with FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss) as pipe:
        output = pipe(x)
    assert torch.equal(output, torch.cat([model(part) for part in x.tensor_split(4)]).detach())
    assert not output.requires_grad


def test_returned_values_keep_no_graph_and_steps_leave_no_garbage():  # CASES 18, 44
    model = mlp()
    x = torch.randn(8, 6)
    with FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss) as pipe:
        result = pipe.step(x, target=x, return_outputs=True)
        assert not result.loss.requires_grad
        assert all(not output.requires_grad for output in result.outputs)
        assert torch.equal(torch.cat(result.outputs), model(x).detach())
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            pipe.step(x, target=x)
            gc.collect()
            assert not [thing for thing in gc.garbage if issubclass(type(thing), torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()


def test_autocast_and_grad_scaler_reach_the_stages():
    model = mlp()
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FreezingPipeline(model, 2, 2, loss_fn=lambda o, t: F.mse_loss(o.float(), t)) as pipe:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = pipe.step(x, target=y, grad_scaler=scaler, return_outputs=True)
        assert result.outputs[0].dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = [reference(part) for part in x.chunk(2)]
        for output, part in zip(outputs, y.chunk(2), strict=True):
            (F.mse_loss(output.float(), part) * (0.5 * 2.0**10)).backward()
        assert_same_grads(model, reference)
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_default_dtype_and_double():
    model = mlp().double()
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    with FreezingPipeline(model, 2, 4, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, target=y)
    plain_step(reference, F.mse_loss, x, y, 4)
    assert_same_grads(model, reference)


def test_state_dict_has_the_models_own_keys():  # CASES 14
    model = mlp()
    with FreezingPipeline(model, 2, 2, loss_fn=F.mse_loss) as pipe:
        assert list(pipe.state_dict()) == list(model.state_dict())
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
        pipe.load_state_dict(model.state_dict())


def test_modules_added_after_construction_train():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    x = torch.randn(4, 6)
    with FreezingPipeline(model, 2, 2, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, target=x)
        nn.init.normal_(model[0].weight)
        model[0].register_parameter("extra", nn.Parameter(torch.ones(6)))
        model[0].forward = lambda h: F.linear(h, model[0].weight, model[0].bias) * model[0].extra
        pipe.step(x, target=x)
        assert model[0].extra.grad is not None


def test_gather_in_one_process_is_the_value_itself():
    with FreezingPipeline(mlp(), 2, 2, loss_fn=F.mse_loss) as pipe:
        assert pipe.gather({"a": 1.5}) == [{"a": 1.5}]
