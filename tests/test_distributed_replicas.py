"""Data parallel times pipeline over processes: replicas, tied parameters, clipping and loss scaling."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import mlp
from tests.processes import results, run_ranks
from timelyfreeze import FreezingPipeline

CHECKS = [
    "plain",
    "interleaved",
    "unused",
    "frozen",
    "frozen_by_user",
    "start",
    "failures",
    "scaling",
    "sharded",
    "ties",
    "tie_flags",
    "tied_replicas",
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each check came to on each of four processes: one launch, since importing torch takes longest."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    args = {"names": CHECKS, "folder": folder}
    return results(run_ranks("tests.replica_ranks:run", 4, timeout_s=300, args=args))


@pytest.mark.parametrize("name", CHECKS)
def test_processes(name, outcomes):
    found = [outcome.get(name, "not reached") for outcome in outcomes]
    assert found == [""] * 4, "\n".join(f"--- rank {rank}: {text}" for rank, text in enumerate(found))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_is_torchs(norm_type):
    """The same bits as torch's over the whole model, also before the first step."""
    model, reference = mlp(), mlp()
    x = torch.randn(8, 6)
    with FreezingPipeline(model, 2, 4, loss_fn=nn.functional.mse_loss) as pipe:
        assert pipe.clip_grad_norm_(1.0, norm_type) == 0.0
        pipe.step(x, target=x)
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            other.grad = parameter.grad.clone()
        norm = pipe.clip_grad_norm_(0.01, norm_type)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type))
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_clipping_what_is_not_finite():
    model = mlp()
    x = torch.randn(8, 6)
    with FreezingPipeline(model, 2, 4, loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(x, target=x)
        model[3][0].weight.grad[0, 0] = torch.nan
        before = model[0][0].weight.grad.clone()
        with pytest.raises(RuntimeError, match=r"order 2\.0 .* non-finite"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert torch.equal(model[0][0].weight.grad, before)
        assert pipe.clip_grad_norm_(1.0).isnan()
        pipe.step(x, target=x)


def test_clipping_sparse_gradients():
    """As if they were dense; torch's own function refuses them."""
    norms = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 9))
        with FreezingPipeline(model, 2, 2, loss_fn=nn.functional.cross_entropy) as pipe:
            pipe.step(torch.tensor([1, 1, 2, 5]), target=torch.tensor([1, 2, 3, 4]))
            norms.append((pipe.clip_grad_norm_(0.1), model[0].weight.grad.to_dense()))
    torch.testing.assert_close(*norms)


class Loss(nn.Module):
    """With a parameter that has a large gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(100.0))

    def forward(self, output, target):
        return self.weight * nn.functional.mse_loss(output, target)


def test_clipping_counts_the_loss():
    model, loss = mlp(), Loss()
    x = torch.randn(8, 6)
    with FreezingPipeline(model, 2, 4, loss_fn=loss) as pipe:
        pipe.step(x, target=x)
        grads = [p.grad for p in [*model.parameters(), loss.weight]]
        expected = nn.utils.get_total_norm(grads)
        assert torch.equal(pipe.clip_grad_norm_(0.5), expected)
        torch.testing.assert_close(nn.utils.get_total_norm(grads), torch.tensor(0.5))
