"""What the ranks of tests/test_compat.py do: torch's schedules and ours on the same modules, step by step."""

from __future__ import annotations

import copy
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional as F

from tests.pipelines import SHORT, ratio_plan
from timelyfreeze import FreezeConfig
from timelyfreeze.compat import torch_schedule

NUM_RANKS = 2
M = 4
PLACES = {"loop": [[0, 2], [1, 3]], "v": [[0, 3], [1, 2]]}
CPU = torch.device("cpu")


class Block(nn.Module):
    """A stage that takes a keyword, as a model's blocks take masks and positions."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, h, scale=None):
        h = self.inner(h)
        return h if scale is None else h * scale


def make_blocks(count):
    torch.manual_seed(5)
    return [Block() for _ in range(count)]


def batch(step, size=8):
    torch.manual_seed(100 + step)
    return torch.randn(size, 6), torch.randn(size, 6)


def own_stages(rank, blocks, places=None):
    mine = [rank] if places is None else PLACES[places][rank]
    return [PipelineStage(blocks[index], index, len(blocks), CPU) for index in mine]


def gradients(stages):
    return [p.grad if p.grad is None else p.grad.clone() for one in stages for p in one.submod.parameters()]


def train(stages, schedule, *, kwargs=None, num_steps=3):
    """The shape of a torchtitan loop; everything seen, in order."""
    has_first, has_last = (any(getattr(one, name) for one in stages) for name in ("is_first", "is_last"))
    optimizers = [torch.optim.SGD(one.submod.parameters(), lr=0.1) for one in stages]
    seen = []
    for step in range(num_steps):
        x, y = batch(step)
        extra = kwargs(step) if kwargs else {}
        target, losses = (y, []) if has_last else (None, None)
        if has_first:
            output = schedule.step(x, **extra, target=target, losses=losses)
        else:
            output = schedule.step(**extra, target=target, losses=losses)
        assert (output is not None) == has_last
        seen += gradients(stages) + ([output.detach(), torch.stack(losses).detach()] if has_last else [])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return seen


def differences(rank, theirs_class, *, places=None, name=None, kwargs=None, loss_fn=F.mse_loss, **options):
    """How far ours is from torch's at most, and whether it repeats to the last bit."""
    blocks = make_blocks(2 if places is None else 4)
    runs = []
    for kind in ("torch", "ours", "again"):
        stages = own_stages(rank, copy.deepcopy(blocks), places)
        given = stages[0] if places is None else stages
        if kind == "torch":
            runs.append(train(stages, theirs_class(given, M, loss_fn, **options), kwargs=kwargs))
        else:
            with torch_schedule(given, M, loss_fn, schedule=name or theirs_class, **options) as schedule:
                runs.append(train(stages, schedule, kwargs=kwargs))
    first, second, third = runs
    return {
        "distance": max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True)),
        "size": min(float(a.abs().max()) for a in first),
        "repeats": all(map(torch.equal, second, third)),
    }


def parity(rank):
    def scale(step):
        return {"scale": torch.linspace(0.5, 1.5, 8).reshape(8, 1) + step}

    def total(output, target):
        return F.mse_loss(output, target, reduction="sum") / 48

    return {
        "1F1B": differences(rank, theirs.Schedule1F1B),
        "GPipe": differences(rank, theirs.ScheduleGPipe, name="GPipe"),
        "sum": differences(rank, theirs.Schedule1F1B, loss_fn=total, scale_grads=False),
        "keywords": differences(rank, theirs.Schedule1F1B, name="1F1B", kwargs=scale),
        "Interleaved1F1B": differences(rank, theirs.ScheduleInterleaved1F1B, places="loop", kwargs=scale),
        "LoopedBFS": differences(rank, theirs.ScheduleLoopedBFS, places="loop"),
        "InterleavedZeroBubble": differences(
            rank, theirs.ScheduleInterleavedZeroBubble, places="loop", name="InterleavedZeroBubble"
        ),
        "ZBVZeroBubble": differences(rank, theirs.ScheduleZBVZeroBubble, places="v", name="ZBVZeroBubble"),
    }


def evaluation(rank):
    """``eval`` in both, with dropout left in the mode it is in, between two training steps; and without a loss."""
    blocks = make_blocks(2)
    x, y = batch(0)
    seen = {}
    for kind in ("torch", "ours"):
        (stage,) = own_stages(rank, copy.deepcopy(blocks))
        make = theirs.Schedule1F1B if kind == "torch" else torch_schedule
        schedule, plain = make(stage, M, F.mse_loss), make(stage, M)
        bring = {"target": y} if rank else {}
        schedule.step(*(() if rank else (x,)), **bring)
        before = gradients([stage])
        losses = ["left over"]
        output = schedule.eval(*(() if rank else (x,)), **bring, losses=losses)
        without = plain.step(*(() if rank else (x,)))
        assert schedule.eval(*(() if rank else (x,)), **bring, return_outputs=False) is None
        # torch divides .grad once more in eval().
        assert kind == "torch" or all(map(torch.equal, before, gradients([stage])))
        assert stage.submod.training
        seen[kind] = (output, without, losses)
    assert rank or seen["ours"] == seen["torch"] == (None, None, ["left over"])
    if rank:
        assert len(seen["ours"][2]) == M
        for ours, other in zip(seen["ours"][:2], seen["torch"][:2], strict=True):
            torch.testing.assert_close(ours, other.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.stack(seen["ours"][2]), torch.stack(seen["torch"][2]), rtol=1e-6, atol=1e-6)
        assert not any(loss.requires_grad for loss in seen["ours"][2])


def dropout_is_what_the_modules_say(rank):
    (stage,) = own_stages(rank, [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.9)) for _ in range(2)])
    with torch_schedule(stage, M) as schedule:
        x = () if rank else (torch.ones(8, 6),)
        outputs = [schedule.eval(*x)]
        stage.submod.eval()
        outputs += [schedule.eval(*x)]
    assert not rank or [int((one == 0).sum()) > 20 for one in outputs] == [True, False]


def accumulation(rank):
    """Several steps before the optimizer's add up (case 34)."""
    blocks = make_blocks(2)
    whole = nn.Sequential(*copy.deepcopy(blocks))
    (stage,) = own_stages(rank, blocks)
    with torch_schedule(stage, M, F.mse_loss) as schedule:
        for step in range(3):
            x, y = batch(step)
            schedule.step(target=y) if rank else schedule.step(x)
            F.mse_loss(whole(x), y).backward()
    for ours, plain in zip(stage.submod.parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-5, atol=1e-6)


def unequal_slices(rank):
    """Nine samples in four micro-batches: the mean over the samples (case 28)."""
    blocks = make_blocks(2)
    whole = nn.Sequential(*copy.deepcopy(blocks))
    (stage,) = own_stages(rank, blocks)
    x, y = batch(0, size=9)
    with torch_schedule(stage, M, F.mse_loss) as schedule:
        schedule.step(target=y) if rank else schedule.step(x)
    F.mse_loss(whole(x), y).backward()
    for ours, plain in zip(stage.submod.parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-5, atol=1e-6)


def freezing(rank):
    """A plan that freezes stage 0 in every micro-batch and nothing of stage 1."""
    blocks = make_blocks(2)
    whole = nn.Sequential(*copy.deepcopy(blocks))
    (stage,) = own_stages(rank, blocks)
    plan = ratio_plan([[1.0] * M, [0.0] * M])
    with torch_schedule(stage, M, F.mse_loss, freeze=FreezeConfig(plan=plan, ramp_steps=0)) as schedule:
        x, y = batch(0)
        for _ in range(2):  # the first one finds out the parameters' work
            stage.submod.zero_grad()
            schedule.step(target=y) if rank else schedule.step(x)
        result = schedule.last_result
        seen = (result.phase, round(result.freeze_ratio, 6), result.outputs)
        assert seen == ("steady", 0.5, None), seen
        assert schedule.pipeline.plan is not None
        assert sorted(schedule.pipeline.state_dict())[0] == f"{rank}.inner.0.bias"
    F.mse_loss(whole(x), y).backward()
    for ours, plain in zip(stage.submod.parameters(), whole[1].parameters(), strict=True):
        if rank:
            torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-5, atol=1e-6)
        else:
            assert ours.grad is None
    assert not stage.submod._forward_pre_hooks


def finding_a_plan(rank):
    """All phases, in a loop that keeps no outputs."""
    (stage,) = own_stages(rank, make_blocks(2))
    losses = []
    with torch_schedule(stage, M, F.mse_loss, freeze=FreezeConfig(max_ratio=0.5, **SHORT)) as schedule:
        phases = []
        while phases[-1:] != ["steady"]:  # the same on all ranks
            assert len(phases) < 5000
            x, y = batch(len(phases))
            given = {"target": y, "losses": losses} if rank else {}
            assert schedule.step(*(() if rank else (x,)), **given, return_outputs=False) is None
            assert len(losses) == (M if rank else 0)
            if rank:
                torch.testing.assert_close(torch.stack(losses).mean(), schedule.last_result.loss)
            phases.append(schedule.last_result.phase)
        assert phases[0] == "warmup", phases
        assert schedule.pipeline.plan is not None


class Front(nn.Module):
    """Hands on floats of which one needs no gradient, a mask, integers, a number and nothing (cases 2, 3, 31, 33)."""

    def __init__(self, *, as_dict):
        super().__init__()
        self.as_dict = as_dict
        self.table = nn.Embedding(11, 6)

    def forward(self, ids, mask=None, power=1):
        h = self.table(ids)
        values = {"h": h, "fixed": h.detach() + 1, "mask": ids > 3, "ids": ids, "power": power, "nothing": mask}
        return values if self.as_dict else tuple(values.values())


class Back(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 3)

    def forward(self, h, fixed=None, mask=None, ids=None, power=None, nothing=None):
        assert (ids.dtype, mask.dtype, power, nothing) == (torch.int64, torch.bool, 2, None)
        return self.lin(h * fixed**power * mask[..., None]) + ids[..., None]


class BackOfDict(Back):
    """The same with the names required, so that a dict goes to them."""

    def forward(self, h, fixed, mask, ids, power, nothing):
        return super().forward(h, fixed, mask, ids, power, nothing)


def boundary_values(rank):
    torch.manual_seed(3)
    ids, y = torch.randint(0, 11, (8, 5)), torch.randn(8, 5, 3)
    for as_dict in (False, True):
        modules = [Front(as_dict=as_dict), BackOfDict() if as_dict else Back()]
        front, back = copy.deepcopy(modules)
        (stage,) = own_stages(rank, modules)
        with torch_schedule(stage, M, F.mse_loss) as schedule:
            for _ in range(2):
                if rank:
                    output = schedule.step(target=y)
                else:
                    schedule.step(ids, mask=None, power=2)
        values = front(ids, mask=None, power=2)
        plain = back(**values) if as_dict else back(*values)
        (2 * F.mse_loss(plain, y)).backward()
        for ours, theirs_ in zip(stage.submod.parameters(), (front, back)[rank].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs_.grad, rtol=1e-5, atol=1e-6)
        if rank:
            torch.testing.assert_close(output, plain, rtol=1e-5, atol=1e-6)


class TimeFirst(nn.Module):
    def __init__(self, *, last):
        super().__init__()
        self.lin, self.last = nn.Linear(3, 3), last

    def forward(self, h):
        h = self.lin(h)
        return {"out": h, "count": h.shape[1]} if self.last else (h,)


def chunk_specs(rank):
    """Batches in dimension 1, a loss with keywords, a tuple of one between the stages; outputs merged by a spec."""
    modules = [TimeFirst(last=False), TimeFirst(last=True)]
    whole = copy.deepcopy(modules)
    (stage,) = own_stages(rank, modules)
    torch.manual_seed(4)
    x, y = torch.randn(5, 8, 3), torch.randn(8)

    def loss_fn(output, target, factor=1.0):
        return factor * (output["out"].sum((0, 2)) - target).square().mean()

    spec = (TensorChunkSpec(1),)
    merge = {"out": TensorChunkSpec(1), "count": None}
    with torch_schedule(stage, M, loss_fn, spec, None, merge) as schedule:
        output = schedule.step(target=y, loss_kwargs={"factor": 3.0}) if rank else schedule.step(x)
    plain = whole[1](whole[0](x)[0])
    loss_fn(plain, y, 3.0).backward()
    for ours, other in zip(stage.submod.parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-4, atol=1e-5)
    if rank:
        torch.testing.assert_close(output["out"], plain["out"], rtol=1e-5, atol=1e-6)
        assert output["count"] == 8 // M


def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def errors(rank):
    """What each rank is told; afterwards the schedule goes on."""
    blocks = make_blocks(4)
    loop, (single,) = own_stages(rank, blocks, "loop"), own_stages(rank, blocks[:2])
    found = {
        "v": raised(torch_schedule, loop, M, F.mse_loss, schedule="ZBVZeroBubble"),
        "swapped": raised(torch_schedule, own_stages(1 - rank, blocks[:2]), M, F.mse_loss),
        "several": raised(torch_schedule, loop, M, F.mse_loss),
        "unknown": raised(torch_schedule, single, M, F.mse_loss, schedule="PipelineScheduleMulti"),
        "none": raised(torch_schedule, [], M, F.mse_loss),
        "module": raised(torch_schedule, blocks[0], M, F.mse_loss),
        "odd": raised(torch_schedule, [PipelineStage(blocks[0], rank, 3, CPU)], M, F.mse_loss),
        "microbatches": raised(torch_schedule, single, 0, F.mse_loss),
    }
    wrapped = PipelineStage(nn.parallel.DistributedDataParallel(make_blocks(1)[0]), rank, 2, CPU)
    found["wrapped"] = raised(torch_schedule, wrapped, M, F.mse_loss)
    x, y = batch(0)

    def loss_fn(output, target):
        if target.isinf().any():
            raise KeyError("from the loss")
        return F.mse_loss(output, target)

    with torch_schedule(single, M, loss_fn) as schedule:

        def step(size=8, target=y, **options):
            dist.barrier()  # a rank that ran ahead and failed would fail the call that the other one is still in
            return schedule.step(target=target[:size], **options) if rank else schedule.step(x[:size], **options)

        found["small"] = raised(step, 3)
        found["failing"] = raised(step, target=y / 0)
        found["losses"] = raised(step, losses=())
        with torch.no_grad():
            found["no_grad"] = raised(step)
        assert all(p.grad is None for p in single.submod.parameters())
        found["after"] = raised(step)
        assert all(p.grad is not None for p in single.submod.parameters())
    found["closed"] = raised(step)
    with torch_schedule(single, M) as schedule:
        found["no loss"] = raised(schedule.step, *(() if rank else (x,)), losses=[])
    return found


def check(rank, num_ranks):
    assert num_ranks == NUM_RANKS
    dist.init_process_group("gloo")
    found = {"parity": parity(rank), "errors": errors(rank)}
    for part in (
        evaluation,
        dropout_is_what_the_modules_say,
        accumulation,
        unequal_slices,
        freezing,
        finding_a_plan,
        boundary_values,
        chunk_specs,
    ):
        try:
            found[part.__name__] = part(rank)
        except Exception:  # seen by the test of this part; the others go on
            found[part.__name__] = traceback.format_exc()
    dist.destroy_process_group()
    return found
