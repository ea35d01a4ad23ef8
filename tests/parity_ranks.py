"""What the ranks of tests/test_distributed_parity.py run: the same training as in one process."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.pipelines import costs_of
from timelyfreeze import FreezeConfig, FreezingPipeline, create_schedule, make_plan

WIDTH = 16
STEPS = 4


class Block(nn.Module):
    """Dropout, a float mask that carries no gradient, an integer, and strides that are not those of a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, value: Any) -> dict[str, Any]:
        value = value if isinstance(value, dict) else {"hidden": value, "mask": (value > 0).float(), "depth": 0}
        hidden = self.dropout(self.norm(self.linear(value["hidden"])).relu())
        return {"hidden": hidden.t().contiguous().t(), "mask": value["mask"], "depth": value["depth"] + 1}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, value: dict[str, Any]) -> torch.Tensor:
        return self.linear(value["hidden"] * value["mask"]) / value["depth"]


def make_stages(num_stages: int) -> list[Any]:
    """Factories: one block a stage, then the head with the last."""
    return [
        (lambda: nn.Sequential(Block(), Head())) if stage == num_stages - 1 else Block for stage in range(num_stages)
    ]


def case_options(case: dict[str, Any]) -> dict[str, Any]:
    """What the pipelines of all processes, and of one, are made with."""
    per_rank = case["stages_per_rank"]
    ranks, microbatches = case["ranks"], case["microbatches"]
    freeze = None
    if case["mode"] is not None:
        schedule = create_schedule(
            case["schedule"], num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=per_rank
        )
        freeze = FreezeConfig(plan=make_plan(schedule, costs_of(schedule), max_ratio=0.5, mode=case["mode"]))
    return {
        "num_microbatches": microbatches,
        "schedule": case["schedule"],
        "stages_per_rank": per_rank,
        "loss_fn": nn.functional.mse_loss,
        "freeze": freeze,
        "timeout_s": 60.0,
        "accelerate": case["microbatches"] == 3,
        "seed": 3,
    }


def train(case: dict[str, Any], group: Any) -> dict[str, Any]:
    """A few steps; what they leave, as text that is equal where the bits are."""
    torch.manual_seed(5)
    pipe = FreezingPipeline(
        stages=make_stages(case["ranks"] * case["stages_per_rank"]), process_group=group, **case_options(case)
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    batches = torch.Generator().manual_seed(7)
    losses, ratios, outputs = [], [], []
    with pipe:
        for step in range(STEPS):
            # The last batch is smaller than the schedule, and another shape: some ranks learn that from others.
            size = 2 * case["microbatches"] + 1 if step < STEPS - 1 else max(1, case["microbatches"] - 1)
            x = torch.randn(size, WIDTH, generator=batches)
            y = torch.randn(size, 1, generator=batches)
            first, last = pipe._ranks.ends
            given = {"target": y} if last else {}
            result = pipe.step(*([x] if first else []), **given, return_outputs="all" if step % 2 else False)
            losses.append(result.loss.item())
            ratios.append(result.freeze_ratio)
            outputs.append(None if result.outputs is None else [digest(output) for output in result.outputs])
            optimizer.step()
            optimizer.zero_grad()
        loss = pipe.evaluate(x, target=y).item()
        output = pipe(x)
        return {
            "losses": losses,
            "ratios": ratios,
            "outputs": outputs,
            "evaluated": loss,
            "output": digest(output),
            "skipped": sorted(map(str, result.times.skipped)),
            "num_timed": sum(time_s > 0 for time_s in result.times.durations_s.values()),
            "state": {name: digest(value) for name, value in pipe.state_dict().items()},
        }


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def run_cases(rank: int, num_ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of them in these processes, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    done = [train(case, dist.group.WORLD) for case in cases]
    dist.barrier()
    dist.destroy_process_group()
    return done


def plan_for_themselves(rank: int, num_ranks: int, steps: int) -> dict[str, Any]:
    """What a rank knows after it has measured, planned and trained with the others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    freeze = FreezeConfig(max_ratio=0.5, warmup_steps=1, measure_steps=3, ramp_steps=2)
    with FreezingPipeline(
        stages=make_stages(num_ranks),
        num_microbatches=4,
        loss_fn=nn.functional.mse_loss,
        process_group=dist.group.WORLD,
        freeze=freeze,
        timeout_s=60.0,
    ) as pipe:
        ratios = []
        # A plan is there when a thread beside the training has found it.
        while len(ratios) < steps and not (ratios and ratios[-1][0] == "steady" and pipe.plan is not None):
            result = pipe.step(torch.ones(8, WIDTH), target=torch.zeros(8, 1))
            ratios.append((result.phase, result.freeze_ratio, result.loss.item()))
        assert pipe.plan is not None
        found = {
            "ratios": ratios,
            "plan": pipe.plan.to_json(),
            "report": pipe.report(),
            "state": pipe.freeze_state_dict(),
        }
        used = {str(a): time_s for a, time_s in result.times.durations_s.items()}
    dist.barrier()
    dist.destroy_process_group()
    return {**found, "times": used}


def many_steps(rank: int, num_ranks: int, steps: int) -> list[list[int]]:
    """Resident bytes, threads and file descriptors every tenth part of so many planned steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    freeze = FreezeConfig(max_ratio=0.6, replan_interval_steps=100, replan_drift_ratio=0.2)
    seen = []
    with FreezingPipeline(
        stages=[lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU())] * num_ranks,
        num_microbatches=8,
        loss_fn=nn.functional.mse_loss,
        process_group=dist.group.WORLD,
        freeze=freeze,
        timeout_s=120.0,
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        x = torch.randn(64, 64)
        for step in range(steps):
            pipe.step(x[: 64 - step % 3], target=x[: 64 - step % 3])
            optimizer.step()
            optimizer.zero_grad()
            if step % (steps // 10) == steps // 10 - 1:
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                seen.append([resident, threading.active_count(), len(os.listdir("/proc/self/fd"))])
    dist.barrier()
    dist.destroy_process_group()
    return seen


def layouts(rank: int, num_ranks: int, seed: int, rounds: int) -> list[float]:
    """Values of random kinds and shapes between two stages, another one in each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = []
    with FreezingPipeline(
        stages=[Scrambler, Unscrambler], num_microbatches=2, process_group=dist.group.WORLD, timeout_s=60.0
    ) as pipe:
        for step in range(rounds):
            draw = random.Random(f"{seed} {step}")
            x = torch.arange(draw.randint(2, 9) * 6.0).reshape(-1, 6) / 10
            pipe.model.zero_grad()
            losses.append(pipe.step(x, target=x).loss.item())
        counts = pipe._ranks.gather(sum(p.grad.sum().item() for p in pipe.parameters() if p.grad is not None))
    dist.barrier()
    dist.destroy_process_group()
    return losses + counts


class Scrambler(nn.Module):
    """Returns its input in parts of many kinds, which depend on how many samples there are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = x * self.scale
        kinds = len(x) % 3
        return {
            "strided": y[:, ::2],
            "turned": y[:, 1::2].t(),
            "kinds": kinds,
            "empty": y[:0],
            "extra": [None, (x > 1, x.long(), x.bfloat16())][: kinds + 1],
            "complex": torch.complex(y[:, 0], y[:, 1]).conj() if kinds else None,
            "same": (y, y),
        }


class Unscrambler(nn.Module):
    """Puts the parts together again; the loss is the mean distance from a multiple of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, value: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
        strided, turned, (same, other) = value["strided"], value["turned"].t(), value["same"]
        assert same is other
        assert value["empty"].shape == (0, 6)
        assert value["kinds"] == len(target) % 3
        joined = torch.stack([strided, turned], dim=-1).reshape(len(target), 6)
        assert torch.equal(joined, same)
        if value["kinds"]:
            assert torch.equal(value["complex"].real, target[:, 0])
            assert torch.equal(value["complex"].imag, -target[:, 1])
            assert value["extra"][1][0].dtype == torch.bool
            assert torch.equal(value["extra"][1][1], target.long())
            assert value["extra"][1][2].dtype == torch.bfloat16
        return ((joined + same + self.shift - 3 * target) ** 2).mean()
