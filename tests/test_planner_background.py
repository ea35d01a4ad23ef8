"""Planning while something else goes on."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.random_schedules import published_costs, scattered_costs
from timelyfreeze.cost import ActionCosts
from timelyfreeze.errors import PlanError
from timelyfreeze.planner import BackgroundPlanner, Planner, PlanOptions, make_plan
from timelyfreeze.planner import highs as highs_module
from timelyfreeze.schedule import Schedule, create_schedule

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 120.0
LP = PlanOptions(mode="lp")


@pytest.fixture
def schedule() -> Schedule:
    return create_schedule("1f1b", num_ranks=4, num_microbatches=8)


def planner_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "timelyfreeze-planner"]


def test_the_same_plan_as_in_the_foreground(schedule: Schedule) -> None:
    costs = scattered_costs(schedule, seed=0)
    with BackgroundPlanner(schedule, PlanOptions(0.6, "lp")) as background:
        assert background.take() is None
        background.start(costs)
        assert background.wait(PATIENCE_S)
        assert background.take() == make_plan(schedule, costs, 0.6, "lp")
        assert background.take() is None
        assert not background.is_busy
    assert planner_threads() == []


def test_errors_come_out_once_and_the_planner_goes_on(schedule: Schedule) -> None:
    costs = scattered_costs(schedule, seed=0)
    foreign = ActionCosts({schedule.actions[0]: 1.0})
    with BackgroundPlanner(schedule, LP) as background:
        background.start(foreign)
        assert background.wait(PATIENCE_S)
        with pytest.raises(ValueError, match="costs lack actions"):
            background.take()
        assert background.take() is None
        background.start(costs)
        assert background.wait(PATIENCE_S)
        assert background.take() == make_plan(schedule, costs, mode="lp")


def test_an_unsolved_program_comes_out_as_plan_error(schedule: Schedule) -> None:
    with BackgroundPlanner(schedule, LP, time_limit_s=1e-9) as background:
        background.start(scattered_costs(schedule, seed=0))
        assert background.wait(PATIENCE_S)
        with pytest.raises(PlanError, match="Time limit"):
            background.take()


def test_a_new_start_replaces_the_old_one() -> None:
    schedule = create_schedule("1f1b", num_ranks=12, num_microbatches=48)
    new = published_costs(schedule, 15, 43, 20)
    with BackgroundPlanner(schedule, PlanOptions(0.5, "lp")) as background:
        background.start(scattered_costs(schedule, seed=0))
        background.start(new)
        assert background.wait(PATIENCE_S)
        plan = background.take()
    assert plan is not None
    assert plan.costs == new
    assert plan.objective_s == pytest.approx(make_plan(schedule, new, 0.5, "lp").objective_s, rel=1e-9)


def test_two_solves_never_overlap(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled solve may still be in its last slice when the next one starts; the solver is not for two threads."""
    num_inside = 0
    overlaps = []
    both_started = threading.Event()

    def watched(*_: object) -> None:
        nonlocal num_inside
        num_inside += 1
        both_started.wait(PATIENCE_S)
        overlaps.append(num_inside > 1)
        num_inside -= 1

    monkeypatch.setattr(Planner, "solve", watched)
    with BackgroundPlanner(schedule, LP) as background:
        background.start(scattered_costs(schedule, seed=0))
        background.start(scattered_costs(schedule, seed=1))
        assert len(planner_threads()) == 2
        both_started.set()
        assert background.wait(PATIENCE_S)
    assert overlaps == [False, False]


def test_cancel_drops_the_plan(schedule: Schedule) -> None:
    with BackgroundPlanner(schedule, LP) as background:
        background.start(scattered_costs(schedule, seed=0))
        background.cancel()
        background.cancel()
        assert background.take() is None
        assert background.wait(0.0)


def test_close_ends_the_thread_and_can_be_called_again() -> None:
    schedule = create_schedule("1f1b", num_ranks=16, num_microbatches=64)
    background = BackgroundPlanner(schedule, LP)
    background.start(scattered_costs(schedule, seed=0))
    background.close()
    background.close()
    assert planner_threads() == []
    assert background.take() is None
    with pytest.raises(RuntimeError, match="closed"):
        background.start(scattered_costs(schedule, seed=0))


def test_a_forgotten_planner_is_collected(schedule: Schedule) -> None:
    background = BackgroundPlanner(schedule, LP)
    background.start(scattered_costs(schedule, seed=0))
    assert background.wait(PATIENCE_S)
    del background
    gc.collect()
    assert planner_threads() == []


def test_arguments_are_checked_at_once(schedule: Schedule) -> None:
    with pytest.raises(ValueError, match="max_ratio"):
        BackgroundPlanner(schedule, PlanOptions(2.0))


def test_the_solver_runs_without_the_gil(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread is made to give the GIL away here, so this one can go on only if the solver lets go of it by itself."""
    entered, others_ran = threading.Event(), threading.Event()

    class Repeated(highs_module._Highs):  # type: ignore[misc, name-defined]
        def run(self) -> object:
            entered.set()
            for _ in range(1000):  # a solve lasts a millisecond, less than it may take the other thread to wake up
                self.clearSolver()
                status = super().run()
                if others_ran.is_set():
                    break
            return status

    monkeypatch.setattr(highs_module, "_Highs", Repeated)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        with BackgroundPlanner(schedule, LP) as background:
            background.start(scattered_costs(schedule, seed=0))
            assert entered.wait(PATIENCE_S)
            was_busy = background.is_busy
            others_ran.set()
            assert background.wait(PATIENCE_S)
            assert background.take() is not None
    finally:
        sys.setswitchinterval(interval)
    assert was_busy


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE_S, cwd=ROOT
    )


def test_the_interpreter_ends_cleanly_in_the_middle_of_a_solve() -> None:
    """32 x 128 takes seconds; the process does not wait for it, does not crash, and says nothing."""
    done = run_python("""
from tests.random_schedules import scattered_costs
from timelyfreeze.planner import BackgroundPlanner, PlanOptions
from timelyfreeze.schedule import create_schedule
schedule = create_schedule("1f1b", num_ranks=32, num_microbatches=128)
background = BackgroundPlanner(schedule, PlanOptions(mode="lp"))
background.start(scattered_costs(schedule, seed=0))
print("ended", background.wait(0.5))
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended False\n", "")
