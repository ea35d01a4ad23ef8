"""The same gradients, sooner: is a step with more micro-batches, k of them live, as much faster as planned?

Plain training with k micro-batches and the planned step take turns in one process, on the command's default model.
"""

from __future__ import annotations

from statistics import median

import pytest

from bench.ours import OurPipeline
from bench.record import interleave, record
from bench.workloads import language_model
from timelyfreeze import FreezeConfig
from timelyfreeze.planner import choose_microbatches, make_plan
from timelyfreeze.schedule import create_schedule


@pytest.mark.parametrize("live", [2, 4])
def test_same_gradients_sooner(live: int) -> None:
    few = language_model(num_microbatches=live)
    with OurPipeline(few, freeze=FreezeConfig(live_microbatches=live)) as calibration:
        calibration.step_until_planned()
        assert calibration.pipe.plan is not None
        chosen = choose_microbatches("1f1b", calibration.pipe.plan.costs, live_microbatches=live)
    num = chosen.schedule.num_microbatches
    config = FreezeConfig(live_microbatches=live)
    with OurPipeline(few) as plain, OurPipeline(language_model(num_microbatches=num), freeze=config) as planned:
        planned.step_until_planned()
        times_s: list[float] = []

        def step() -> float:
            planned.step()
            times_s.append(planned.last.step_time_s)
            return float(planned.last.step_time_s)

        def plain_step() -> float:
            plain.step()
            return float(plain.last.step_time_s)

        against_plain = interleave(step, plain_step, rounds=60)
        plan = planned.pipe.plan
        assert plan is not None
    plain_schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=live)
    plain_s = make_plan(plain_schedule, plan.costs.adapted(plain_schedule), 0.0).makespan_s
    planned_ratio = plan.makespan_s / plain_s
    error = plan.makespan_s / median(times_s) - 1
    print(
        f"\nk = {live}, M = {num}: planned / plain: {against_plain}, planned ratio {planned_ratio:.3f}, "
        f"predicted {plan.makespan_s * 1e3:.1f} ms ({error:+.1%})"
    )
    record(
        "live_microbatches",
        live_microbatches=live,
        num_microbatches=num,
        planned_over_plain=against_plain,
        planned_ratio=planned_ratio,
        predicted_s=plan.makespan_s,
        prediction_error=error,
    )
