"""Fine-tune low-rank adapters on a frozen base: what you freeze yourself stays frozen, the plan counts the rest.

Below the lowest adapter no backward runs at all, planned or not.

    python examples/adapters.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from timelyfreeze import FreezeConfig, FreezingPipeline


class LowRankAdapter(nn.Module):
    """A frozen Linear plus a trainable low-rank update (LoRA, arXiv 2106.09685); [batch, width] in and out."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # the model starts as it was

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.up(self.down(x))
        return output


def base_of(layers: nn.Sequential) -> list[nn.Linear]:
    """The frozen Linears inside adapted layers."""
    return [module.base for module in layers.modules() if isinstance(module, LowRankAdapter)]


def main(num_steps: int = 60) -> float:
    """Adapt a random network to one that differs by low-rank updates; returns the last loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = 128
    base = [nn.Linear(width, width) for _ in range(8)]
    for layer in base:
        nn.init.kaiming_normal_(layer.weight)
    frozen = [nn.Sequential(layer.requires_grad_(False), nn.GELU()) for layer in base[:4]]
    adapted = [nn.Sequential(LowRankAdapter(layer), nn.GELU()) for layer in base[4:]]
    model = nn.Sequential(*frozen, *adapted)
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        for layer in base_of(teacher[4:]):
            layer.weight += torch.randn(width, 4) @ torch.randn(4, width) / width
    untouched = base[0].weight.clone(), base[7].weight.clone()

    with FreezingPipeline(
        model,
        num_stages=2,
        num_microbatches=4,
        loss_fn=nn.functional.mse_loss,
        freeze=FreezeConfig(max_ratio=0.5),
    ) as pipe:
        optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=3e-3)
        for step in range(num_steps):
            x = torch.randn(256, width)
            result = pipe.step(x, target=teacher(x).detach())
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0 or step == num_steps - 1:
                print(f"step {step:3d}  {result.phase:<13}  loss {result.loss:.4f}")
    assert torch.equal(untouched[0], base[0].weight)
    assert torch.equal(untouched[1], base[7].weight)
    print("the base weights are bit for bit what they were")
    return float(result.loss)


if __name__ == "__main__":
    main()
