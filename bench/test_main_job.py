"""How much sooner does a step of the main job end with freezing, and is that what the plan said?

Plain and planned pipelines take turns in one process, on the command's default model and batch.
"""

from __future__ import annotations

from statistics import median

import pytest

from bench.baselines.torch_pipelining import TorchPipelining
from bench.ours import OurPipeline
from bench.record import interleave, record
from bench.workloads import language_model
from timelyfreeze import FreezeConfig

MOST_STEPS = 100  # until the plan is in force


@pytest.mark.parametrize("max_ratio", [0.3, 0.5, 0.8])
def test_steady_step(max_ratio: float) -> None:
    workload = language_model()
    with OurPipeline(workload) as plain, OurPipeline(workload, freeze=FreezeConfig(max_ratio=max_ratio)) as planned:
        for _ in range(MOST_STEPS):
            # Bounds are measured while the plain pipeline rests: its memory traffic would be in them otherwise.
            planned.step()
            if planned.last.phase == "steady" and planned.pipe.plan is not None:
                break
        times_s: list[float] = []

        def step() -> float:
            planned.step()
            times_s.append(planned.last.step_time_s)
            return float(planned.last.step_time_s)

        def plain_step() -> float:
            plain.step()
            return float(plain.last.step_time_s)

        against_plain = interleave(step, plain_step, rounds=40)
        plan = planned.pipe.plan
        assert plan is not None
        error = plan.makespan_s / median(times_s) - 1
        with TorchPipelining(workload) as torch_pipelining:
            against_torch = interleave(planned.step, torch_pipelining.step, rounds=20)
    print(
        f"\ncap {max_ratio}: planned / plain: {against_plain} ({1 / against_plain.ratio:.2f}x), "
        f"predicted {plan.makespan_s * 1e3:.1f} ms ({error:+.1%}), LP {plan.objective_s * 1e3:.1f} ms; "
        f"planned / torch.distributed.pipelining: {against_torch}"
    )
    record(
        "main_job",
        max_ratio=max_ratio,
        planned_over_plain=against_plain,
        planned_over_torch_pipelining=against_torch,
        predicted_s=plan.makespan_s,
        prediction_error=error,
        lp_objective_s=plan.objective_s,
        unfrozen_makespan_s=plan.unfrozen_makespan_s,
        ratios={str(action): ratio for action, ratio in sorted(plan.ratios.items())},
    )
