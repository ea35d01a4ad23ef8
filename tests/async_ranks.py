"""What the ranks of tests/test_async_distributed.py run: the same training as in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.faulty_ranks import (
    BoomError,
    Fragile,
    batch,
    boom,
    caught,
    interrupt,
    out_of_memory,
    own_stages,
)
from tests.forked_ranks import note
from tests.lost_ranks import LOSS_TIMEOUT_S, LOSSES
from tests.parity_ranks import WIDTH, digest, make_stages
from timelyfreeze import AsyncPipeline
from timelyfreeze.distributed import load_checkpoint, save_checkpoint


def sum_and_count(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Samples weigh unequally: those with a target above 0 count."""
    counted = (target > 0).to(output.dtype)
    return (F.mse_loss(output, target, reduction="none") * counted).sum(), int(counted.sum()) + 1


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)


def make_pipe(case: dict[str, Any], group: Any) -> AsyncPipeline:
    torch.manual_seed(5)
    return AsyncPipeline(
        stages=make_stages(case["ranks"]),
        num_microbatches=case["microbatches"],
        accumulation=case["accumulation"],
        schedule=case["schedule"],
        memory=case["memory"],
        max_grad_norm=case["max_grad_norm"],
        loss_fn=sum_and_count if case["counts"] else F.mse_loss,
        optimizer=adamw,
        lr_scheduler=warm_up,
        process_group=group,
        timeout_s=60.0,
        accelerate=False,
        seed=3,
    )


def batches_of(case: dict[str, Any], count: int, seed: int = 7) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of uneven sizes, the last batch with fewer of them."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [2 * case["microbatches"] + 1] * (count - 1) + [max(1, case["microbatches"] - 1)]
    return [(torch.randn(size, WIDTH, generator=draw), torch.randn(size, 1, generator=draw) + 0.3) for size in sizes]


def train(case: dict[str, Any], group: Any) -> dict[str, Any]:
    """Two runs with an evaluation in the first; what they leave, as text that is equal where the bits are."""
    batches = batches_of(case, 5)
    if group is not None and case["counts"]:  # what a rank does not take is left out
        first, last = dist.get_rank(group) == 0, dist.get_rank(group) == case["ranks"] - 1
        batches = [(x if first else None, y if last or not first else None) for x, y in batches]
        if case["ranks"] > 1:
            assert sum(value is None for value in batches[0]) == 1
    with make_pipe(case, group) as pipe:
        losses, evaluated = [], []
        for result in pipe.run(batches, drain=False):
            losses.append([result.index, float(result.loss).hex()])
            if result.index == 2:
                evaluated.append(float(pipe.evaluate(batches[0][0], target=batches[0][1])).hex())
        losses += [[result.index, float(result.loss).hex()] for result in pipe.run(batches[1:3])]
        evaluated.append(float(pipe.evaluate(batches[0][0], target=batches[0][1])).hex())
        report = pipe.report()
        state = {name: digest(value) for name, value in pipe.state_dict().items()}
        return {"losses": losses, "evaluated": evaluated, "report": report, "state": state}


def run_cases(rank: int, num_ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of them in these processes, one after the other."""
    return [train(case, dist.group.WORLD) for case in cases]


# --- faults ---------------------------------------------------------------------------------------------------------

NUM_MICROBATCHES = 4
FAULT_TIMEOUT_S = 10.0  # enough for what does not hang, also on a busy machine


class Explosive(torch.optim.SGD):
    """Raises in its next step, once it is armed."""

    armed = False

    def step(self, closure: Any = None) -> Any:
        if Explosive.armed:
            Explosive.armed = False
            raise BoomError("boom")
        return super().step(closure)


class Disarmed(nn.Module):
    """``mse_loss`` that raises once where it is armed."""

    armed = False

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if Disarmed.armed:
            Disarmed.armed = False
            raise BoomError("boom")
        return F.mse_loss(output, target)


def make_fragile(num_ranks: int, **options: Any) -> AsyncPipeline:
    torch.manual_seed(0)
    options = {"timeout_s": FAULT_TIMEOUT_S, "accumulation": 2} | options
    return AsyncPipeline(
        nn.Sequential(*[Fragile() for _ in range(num_ranks)]),
        num_ranks,
        NUM_MICROBATCHES,
        loss_fn=Disarmed(),
        optimizer=lambda parameters: Explosive(parameters, lr=0.01),
        process_group=dist.group.WORLD,
        accelerate=False,
        **options,
    )


def stream(pipe: AsyncPipeline, count: int, size: int = 2 * NUM_MICROBATCHES) -> list[Any]:
    return [[result.index, float(result.loss)] for result in pipe.run(batch(step, size) for step in range(count))]


def _armed(where: str, act: Any, count: int = 5) -> Any:
    def fault(pipe: AsyncPipeline, here: bool) -> None:
        if here:
            own_stages(pipe)[-1].arm(where, act, count)
        stream(pipe, 4)

    return fault


def _in_class(cls: Any) -> Any:
    def fault(pipe: AsyncPipeline, here: bool) -> None:
        cls.armed = here
        stream(pipe, 4)

    return fault


def _while_away(pipe: AsyncPipeline, here: bool) -> None:
    """The rank that fails hears of it between two calls: it waits until the others have."""
    store = dist.distributed_c10d._get_default_store()
    if here:
        own_stages(pipe)[-1].arm("F", boom, count=5)
    others = 0
    try:
        for index, _ in enumerate(pipe.run(batch(step) for step in range(6))):
            if here and index == 0:
                others = dist.get_world_size() - 1
                for other in range(others):
                    store.wait([f"away/{other}"])
    finally:
        if not here:
            store.set(f"away/{store.add('away', 1) - 1}", "")


def _bad_batch(pipe: AsyncPipeline, here: bool) -> None:
    good = [batch(step) for step in range(3)]
    for _ in pipe.run([*good, 5] if here else [*good, good[0]]):
        pass


def _failing_batches(pipe: AsyncPipeline, here: bool) -> None:
    def batches() -> Any:
        yield from map(batch, range(3))
        if here:
            boom(None)
        yield batch(3)

    for _ in pipe.run(batches()):
        pass


def _other_batch(pipe: AsyncPipeline, here: bool) -> None:
    stream(pipe, 4, 3 * NUM_MICROBATCHES if here else 2 * NUM_MICROBATCHES)


def _fewer_microbatches(pipe: AsyncPipeline, here: bool) -> None:
    stream(pipe, 4, NUM_MICROBATCHES - 1 if here else 2 * NUM_MICROBATCHES)


FAULTS = {
    "raise in F": _armed("F", boom),
    "raise in B": _armed("B", boom),
    "MemoryError": _armed("F", out_of_memory),
    # In the last backward, which a first stage does while all ranks wait in drain().
    "KeyboardInterrupt": _armed("B", interrupt, count=4 * NUM_MICROBATCHES - 1),
    "batches": _failing_batches,
    "optimizer": _in_class(Explosive),
    "loss_fn": _in_class(Disarmed),
    "while away": _while_away,
    "no batch": _bad_batch,
    "another batch": _other_batch,
    "fewer micro-batches": _fewer_microbatches,
}


def recover(rank: int, num_ranks: int, faults: list[tuple[str, int]]) -> dict[str, Any]:
    """Faults one after the other, a good run after each: what each rank got, and how it went on."""
    errors, runs = [], []
    with make_fragile(num_ranks) as pipe:
        runs.append(stream(pipe, 3))
        for name, target in faults:
            errors.append(caught(lambda f=name, t=target: FAULTS[f](pipe, rank == t)))
            for stage in own_stages(pipe):
                stage.disarm()
            Explosive.armed = Disarmed.armed = False
            runs.append(stream(pipe, 3))
        report = pipe.report()
    return {"errors": errors, "runs": runs, "report": report}


def lose_a_rank(rank: int, num_ranks: int, how: str, victim: int) -> None:
    """Until the victim is lost; the others leave what they got."""
    with make_fragile(num_ranks, timeout_s=LOSS_TIMEOUT_S) as pipe:
        stream(pipe, 2)
        if rank == victim:
            own_stages(pipe)[0].arm(*LOSSES[how])
        found = caught(lambda: stream(pipe, 8))
        note(found)
        raise SystemExit(3)


def disagree(rank: int, num_ranks: int) -> list[dict[str, Any]]:
    """What each rank gets where the pipelines differ or do not fit; then one that works."""
    tied = nn.Sequential(*[Fragile() for _ in range(num_ranks)])
    tied[-1].linear.weight = tied[0].linear.weight
    make = {"optimizer": adamw, "loss_fn": F.mse_loss, "process_group": dist.group.WORLD, "accelerate": False}
    attempts = [
        lambda: make_fragile(num_ranks, accumulation=1 + rank % 2),
        lambda: AsyncPipeline(nn.Sequential(*[Fragile() for _ in range(5)]), num_ranks + 1, 4, **make),
        lambda: AsyncPipeline(tied, num_ranks, 4, **make),
    ]
    found = [caught(attempt) for attempt in attempts]
    with make_fragile(num_ranks) as pipe:
        found.append({"runs": stream(pipe, 2)})
    return found


# --- checkpoints ----------------------------------------------------------------------------------------------------


def save(rank: int, num_ranks: int, folder: str) -> dict[str, Any]:
    """Two batches, a checkpoint, two more; and what comes of those where another pipeline begins at the checkpoint."""
    found = {}
    for name in ("kept on", "resumed"):
        with make_dividable(num_ranks, dist.group.WORLD) as pipe:
            if name == "kept on":
                for _ in pipe.run([batch(0), batch(1)]):
                    pass
                save_checkpoint(folder, pipe, pipe.optimizers[rank])
            else:
                load_checkpoint(folder, pipe, pipe.optimizers[rank], freeze_state="load")
            results = [[one.index, float(one.loss).hex()] for one in pipe.run([batch(2), batch(3)])]
            weights = {name: digest(value) for name, value in pipe.state_dict().items()}
            found[name] = {"results": results, "weights": weights}
    return found


def load(rank: int, num_ranks: int, folder: str) -> dict[str, str]:
    """The weights alone, on another number of ranks."""
    with make_dividable(num_ranks, dist.group.WORLD) as pipe:
        load_checkpoint(folder, pipe)
        assert pipe.report()["batches"] == 2
        return {name: digest(value) for name, value in pipe.state_dict().items()}


def make_dividable(num_stages: int, group: Any) -> AsyncPipeline:
    """Four layers, however many stages; clipped, with a schedule and dropout, so that all of that has to come back."""
    torch.manual_seed(1)
    return AsyncPipeline(
        nn.Sequential(*[Fragile() for _ in range(4)]),
        num_stages,
        NUM_MICROBATCHES,
        loss_fn=F.mse_loss,
        optimizer=adamw,
        lr_scheduler=warm_up,
        max_grad_norm=0.01,
        split_points=[1, 2, 3][: num_stages - 1],
        process_group=group,
        accelerate=False,
    )
