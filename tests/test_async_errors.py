"""What goes wrong in an asynchronous pipeline: the first error comes back, nothing hangs, training can go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from timelyfreeze import AsyncPipeline, StageError


class BoomError(RuntimeError):
    pass


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, owner):
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.owner.backwards += 1
        if ctx.owner.armed == "B" and ctx.owner.backwards == 6:
            raise BoomError("in backward")
        return grad, None


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.armed = None
        self.calls = self.backwards = 0

    def forward(self, x):
        self.calls += 1
        if self.armed == "F" and self.calls == 6:
            raise BoomError("in forward")
        return RaiseInBackward.apply(self.linear(x), self)


def make_batches(num_batches=4):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, generator=generator), torch.zeros(8, 4)) for _ in range(num_batches)]


@pytest.mark.parametrize("memory", ["keep", "recompute"])
@pytest.mark.parametrize("kind", ["F", "B", "U"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_users_exception_comes_back_whole_and_training_goes_on(stage, kind, memory):
    torch.manual_seed(0)
    stages = [Fragile() for _ in range(3)]
    stages[stage].armed = kind

    class Failing(torch.optim.SGD):
        updates = 0

        def step(self, closure=None):
            self.updates += 1
            own = any(p is stages[stage].linear.weight for group in self.param_groups for p in group["params"])
            if own and stages[stage].armed == "U" and self.updates == 3:
                raise BoomError("in update")
            return super().step(closure)

    def make(parameters):
        return Failing(parameters, lr=0.1)

    with AsyncPipeline(
        stages, num_microbatches=4, optimizer=make, accumulation=2, loss_fn=F.mse_loss, memory=memory
    ) as pipe:
        with pytest.raises(StageError, match=f"stage {stage}") as caught:
            list(pipe.run(make_batches()))
        assert isinstance(caught.value.__cause__, BoomError)
        assert caught.value.stage == caught.value.rank == stage
        calls_twice = memory == "recompute" and stage < 2 and kind == "F"
        place = caught.value.action if not calls_twice else f"{stage}{kind}5"  # the 6th call may be a second one
        assert place == {"F": f"{stage}F5", "B": f"{stage}B5", "U": f"{stage}U5"}[kind]
        assert all(p.grad is None for p in pipe.parameters())
        stages[stage].armed = None
        assert len(list(pipe.run(make_batches()))) == 4
        assert pipe.ledger.max_drift == 1


@pytest.mark.parametrize("schedule", ["paci", "pipedream"])
def test_weights_stay_whole_after_an_error_in_backward(schedule):
    """Copies that a backward had put in place are taken out again."""
    stages = [Fragile() for _ in range(3)]
    pointers = []

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    stages[0].armed = "B"
    with AsyncPipeline(stages, num_microbatches=4, optimizer=make, loss_fn=F.mse_loss, schedule=schedule) as pipe:
        optimizer = pipe.optimizers[0]
        assert optimizer is not None
        optimizer.register_step_post_hook(lambda *_: pointers.append(stages[0].linear.weight.data_ptr()))
        with pytest.raises(StageError):
            list(pipe.run(make_batches()))
        assert stages[0].linear.weight.data_ptr() == pointers[-1]


def test_a_failing_loss_and_a_failing_source_of_batches():
    def loss_fn(output, target):
        return output  # not a scalar

    def batches():
        yield from make_batches(2)
        raise BoomError("no more data")

    make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe = AsyncPipeline(stages, num_microbatches=4, optimizer=make, loss_fn=loss_fn)
    with pipe, pytest.raises(StageError, match="one element"):
        list(pipe.run(make_batches()))
    with AsyncPipeline(stages, num_microbatches=4, optimizer=make, loss_fn=F.mse_loss) as pipe:
        with pytest.raises(BoomError):
            list(pipe.run(batches()))
        assert [result.index for result in pipe.drain()] == [1]
        assert [stage.num_updates for stage in pipe.ledger.stages] == [8, 8]


def test_what_hangs_is_given_up_after_the_timeout():
    class Hanging(nn.Module):
        def forward(self, x):
            release.wait()
            return x

    release = threading.Event()
    stages = [nn.Linear(4, 4), Hanging(), nn.Linear(4, 4)]
    make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    with AsyncPipeline(stages, num_microbatches=4, optimizer=make, loss_fn=F.mse_loss, timeout_s=0.2) as pipe:
        threading.Timer(0.6, release.set).start()
        with pytest.raises(TimeoutError, match="timeout_s"):
            list(pipe.run(make_batches()))
        assert len(list(pipe.run(make_batches(2)))) == 2


def test_a_stage_that_writes_its_input_in_place_cannot_be_recomputed():
    stages = [nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), nn.Linear(4, 4)]
    make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    pipe = AsyncPipeline(stages, num_microbatches=4, optimizer=make, loss_fn=F.mse_loss, memory="recompute")
    with pipe, pytest.raises(StageError, match="stage 1 wrote its input in place"):
        list(pipe.run(make_batches()))


def test_a_closed_pipeline_says_so_and_may_be_closed_in_the_middle():
    make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    pipe = AsyncPipeline([nn.Linear(4, 4), nn.Linear(4, 4)], num_microbatches=4, optimizer=make, loss_fn=F.mse_loss)
    for _ in pipe.run(make_batches()):
        break
    pipe.close()
    pipe.close()
    with pytest.raises(ValueError, match="closed"):
        list(pipe.run(make_batches()))


def test_ctrl_c_ends_a_stream():
    program = textwrap.dedent(
        """
        import sys, time, torch
        from torch import nn
        from timelyfreeze import AsyncPipeline

        class Slow(nn.Module):
            def forward(self, x):
                print("running", flush=True)
                while True:
                    time.sleep(0.01)

        make, loss = lambda p: torch.optim.SGD(p, lr=0.1), nn.functional.mse_loss
        pipe = AsyncPipeline([nn.Linear(4, 4), Slow()], num_microbatches=2, optimizer=make, loss_fn=loss)
        try:
            list(pipe.run([(torch.ones(4, 4), torch.ones(4, 4))] * 3))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            pipe.close()
            sys.exit(3)
        """
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        child.send_signal(signal.SIGINT)
        assert "interrupted" in child.stdout.read()
        assert child.wait(timeout=30) == 3
