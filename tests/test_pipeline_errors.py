"""What goes wrong in a stage, from outside and in the arguments."""

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

from timelyfreeze import FreezingPipeline, ScheduleError, StageError, create_schedule


class BoomError(RuntimeError):
    pass


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, owner):
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.owner.armed == "B":
            raise BoomError("in backward")
        return grad, None


class Fragile(nn.Module):
    """Raises in the forward or the backward of its ``at``-th call once armed."""

    def __init__(self, at=2):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.armed = None
        self.at = at
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.armed == "F" and self.calls % 4 == self.at:
            raise BoomError("in forward")
        return RaiseInBackward.apply(self.linear(x), self)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", ["F", "B"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("inline", [False, True])
def test_a_users_exception_comes_back_whole_and_training_goes_on(schedule, kind, stage, inline, monkeypatch):
    monkeypatch.setattr("timelyfreeze.runtime.engine.INLINE_BELOW_S", float("inf") if inline else 0.0)
    torch.manual_seed(0)
    stages = [Fragile() for _ in range(3)]
    x = torch.randn(8, 4)
    with FreezingPipeline(stages, num_microbatches=4, schedule=schedule, loss_fn=F.mse_loss) as pipe:
        expected_loss = pipe.step(x, target=x).loss
        before = [p.grad.clone() for p in pipe.parameters()]
        stages[stage].armed = kind
        with pytest.raises(StageError, match=f"stage {stage}") as caught:
            pipe.step(x, target=x)
        assert isinstance(caught.value.__cause__, BoomError)
        assert (caught.value.stage, caught.value.rank, caught.value.step) == (stage, stage, 1)
        assert caught.value.action.startswith(f"{stage}{kind}")
        assert all(torch.equal(p.grad, b) for p, b in zip(pipe.parameters(), before, strict=True))
        assert all(p.requires_grad for p in pipe.parameters())
        stages[stage].armed = None
        pipe.zero_grad()
        assert torch.equal(pipe.step(x, target=x).loss, expected_loss)
        assert all(torch.equal(p.grad, b) for p, b in zip(pipe.parameters(), before, strict=True))


def test_the_traceback_of_the_cause_shows_the_users_line():
    stages = [Fragile(), Fragile()]
    stages[1].armed = "F"
    with FreezingPipeline(stages, num_microbatches=4, loss_fn=F.mse_loss) as pipe, pytest.raises(StageError) as caught:
        pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
    trace = caught.value.__cause__.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert trace.tb_frame.f_code.co_name == "forward"


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_names_stage_and_microbatch(stage, value):
    class Spoil(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y + value if bool((x == 7).any()) and spoiled is self else y

    torch.manual_seed(0)
    stages = [Spoil(4, 4, bias=False) for _ in range(3)]
    for module in stages:
        nn.init.eye_(module.weight)
    spoiled = stages[stage]
    x = torch.zeros(8, 4)
    x[5] = 7  # micro-batch 2 of 4
    with FreezingPipeline(stages, num_microbatches=4, loss_fn=F.mse_loss) as pipe:
        with pytest.raises(StageError, match=rf"micro-batch 2 is .*leaves stage {stage}\.") as caught:
            pipe.step(x, target=torch.zeros(8, 4))
        assert isinstance(caught.value.__cause__, FloatingPointError)
        assert all(p.grad is None for p in pipe.parameters())
    with FreezingPipeline(stages, num_microbatches=4, loss_fn=F.mse_loss, check_finite=False) as pipe:
        assert not torch.isfinite(pipe.step(x, target=torch.zeros(8, 4)).loss)


def test_wrong_losses_are_explained():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    for loss_fn, message in [
        (lambda o, t: o, "one element"),
        (lambda o, t: 3.0, "one element"),
        (lambda o, t: o.detach().sum(), "does not depend on any trainable parameter"),
    ]:
        with FreezingPipeline(model, 2, 2, loss_fn=loss_fn) as pipe, pytest.raises(StageError, match=message):
            pipe.step(x, target=x)


def test_a_step_longer_than_timeout_s_is_given_up():
    release = threading.Event()

    class Wait(nn.Linear):
        def forward(self, x):
            while blocked and not release.is_set():
                release.wait(0.01)
            return super().forward(x)

    blocked = True
    x = torch.randn(4, 4)
    with FreezingPipeline([nn.Linear(4, 4), Wait(4, 4)], num_microbatches=2, loss_fn=F.mse_loss, timeout_s=0.2) as pipe:
        with pytest.raises(TimeoutError, match="timeout_s"):
            pipe.step(x, target=x)
        blocked = False
        assert torch.isfinite(pipe.step(x, target=x).loss)


SCRIPT = """
import os, signal, sys, threading, time
import torch
from torch import nn
from timelyfreeze import FreezingPipeline

class Slow(nn.Linear):
    told = False

    def forward(self, x):
        if not Slow.told:
            Slow.told = True
            print("inside", flush=True)
        {body}
        return super().forward(x)

if __name__ == "__main__":
    torch.set_num_threads(1)
    x = torch.randn(8, 4)
    pipe = FreezingPipeline([nn.Linear(4, 4), Slow(4, 4)], num_microbatches=8, loss_fn=nn.functional.mse_loss)
    try:
        while True:
            pipe.step(x, target=x)
    except KeyboardInterrupt:
        stopped = time.monotonic()
        assert all(p.requires_grad for p in pipe.parameters())
        interrupted = True
        {after}
        pipe.close()
        print("stopped", threading.active_count(), flush=True)
"""


@pytest.mark.parametrize("body", ["pass", "time.sleep(0.02)", "[time.sleep(0.001) for _ in range(10**6)]"])
def test_ctrl_c_stops_and_leaves_no_thread(tmp_path, body):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{body}", body).replace("{after}", "pass"))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "inside\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert out == "stopped 1\n"
    assert process.returncode == 0


def test_a_pipeline_left_open_does_not_keep_the_process():
    script = "import torch; from torch import nn; from timelyfreeze import FreezingPipeline as P\n"
    script += "p = P([nn.Linear(2, 2), nn.Linear(2, 2)], num_microbatches=2, loss_fn=nn.functional.mse_loss)\n"
    script += "p.step(torch.ones(4, 2), target=torch.ones(4, 2)); print('done')\n"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=os.environ, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_wrong_arguments_are_named_all_at_once(tmp_path):
    linear = [nn.Linear(2, 2) for _ in range(3)]
    with pytest.raises(ValueError, match=r"(?s)3 problems.*num_stages.*num_microbatches.*timeout_s"):
        FreezingPipeline(nn.Sequential(*linear), 4, 0, loss_fn=F.mse_loss, timeout_s=0)
    with pytest.raises(ValueError, match="num_stages: expected 3"):
        FreezingPipeline(linear, 2, loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match=r"an nn\.Sequential, a list"):
        FreezingPipeline(nn.Linear(2, 2), 1, loss_fn=F.mse_loss)
    with pytest.raises(TypeError, match="list of stage modules"):
        FreezingPipeline([nn.Linear(2, 2), 3], loss_fn=F.mse_loss)
    with pytest.raises(ValueError, match="rising indices"):
        FreezingPipeline(nn.Sequential(*linear), 2, loss_fn=F.mse_loss, split_points=[0])
    with pytest.raises(ValueError, match="devices: expected 2"):
        FreezingPipeline(nn.Sequential(*linear), 2, loss_fn=F.mse_loss, devices=["cpu"])
    other = create_schedule("gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match="3 stages and 2 micro-batches"):
        FreezingPipeline(nn.Sequential(*linear), 3, 2, loss_fn=F.mse_loss, schedule=other)
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0B0\n1F0,1F0\n")
    with pytest.raises(ScheduleError):  # CASES 26
        FreezingPipeline(nn.Sequential(*linear), 2, 1, loss_fn=F.mse_loss, schedule=path)


def test_wrong_batches_are_named():
    with FreezingPipeline([nn.Linear(4, 4), nn.Linear(4, 4)], num_microbatches=2, loss_fn=F.mse_loss) as pipe:
        with pytest.raises(ValueError, match="same size of dimension 0"):
            pipe.step(torch.ones(4, 4), target=torch.ones(3, 4))
        with pytest.raises(ValueError, match="at least one tensor"):
            pipe.step(3, target="x")
        with pytest.raises(ValueError, match="at least one sample"):
            pipe.step(torch.ones(0, 4), target=torch.ones(0, 4))
        with pytest.raises(ValueError, match="target: expected"):
            pipe.step(torch.ones(4, 4))
        with pytest.raises(ValueError, match="1 to 2 of them"):
            pipe.step(microbatches=[(torch.ones(1, 4), torch.ones(1, 4))] * 3)
        with torch.no_grad(), pytest.raises(ValueError, match=r"pipe\.evaluate"):
            pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    with pytest.raises(ValueError, match="closed"):
        pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))


def test_a_call_from_inside_a_stage_is_refused():
    class Nested(nn.Linear):
        def forward(self, x):
            pipe.evaluate(x.detach(), target=x.detach())
            return super().forward(x)

    pipe = FreezingPipeline([nn.Linear(4, 4), Nested(4, 4)], num_microbatches=2, loss_fn=F.mse_loss)
    with pipe, pytest.raises(StageError, match="the pipeline is busy"):
        pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))


def test_schedule_from_csv_runs(tmp_path):  # CASES 26
    path = tmp_path / "schedule.csv"
    create_schedule("1f1b", num_ranks=2, num_microbatches=3).to_csv(path)
    x = torch.randn(6, 4)
    with FreezingPipeline(
        [nn.Linear(4, 4), nn.Linear(4, 4)], num_microbatches=3, loss_fn=F.mse_loss, schedule=path
    ) as pipe:
        assert torch.isfinite(pipe.step(x, target=x).loss)
