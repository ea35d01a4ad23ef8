"""How much sooner does a step of the main job end with freezing, and is that what the plan said?

Plain and planned pipelines take turns in one process, on the command's default model and batch.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import pytest

from bench.baselines.torch_pipelining import TorchPipelining
from bench.ours import OurPipeline
from bench.record import interleave, record
from bench.workloads import language_model
from timelyfreeze import FreezeConfig
from timelyfreeze.planner import fewer_microbatches
from timelyfreeze.schedule import default_stages_per_rank, schedule_names


@pytest.mark.parametrize("max_ratio", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("mode", ["cut", "lp"])
def test_steady_step(mode: str, max_ratio: float) -> None:
    workload = language_model()
    config = FreezeConfig(max_ratio=max_ratio, mode=mode)
    with OurPipeline(workload) as plain, OurPipeline(workload, freeze=config) as planned:
        planned.step_until_planned()
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
        f"\n{mode}, cap {max_ratio}: planned / plain: {against_plain} ({1 / against_plain.ratio:.2f}x), "
        f"predicted {plan.makespan_s * 1e3:.1f} ms ({error:+.1%}), bound {plan.objective_s * 1e3:.1f} ms; "
        f"planned / torch.distributed.pipelining: {against_torch}"
    )
    record(
        "main_job",
        mode=mode,
        max_ratio=max_ratio,
        planned_over_plain=against_plain,
        planned_over_torch_pipelining=against_torch,
        predicted_s=plan.makespan_s,
        prediction_error=error,
        objective_s=plan.objective_s,
        unfrozen_makespan_s=plan.unfrozen_makespan_s,
        cuts=plan.cuts,
        ratios={str(action): ratio for action, ratio in sorted(plan.ratios.items())},
    )


@pytest.mark.parametrize("schedule", schedule_names())
def test_schedules(schedule: str) -> None:
    """Two ranks: every schedule, planned against plain, and plain against 1F1B; what the plan promised."""
    workload = language_model(2 * default_stages_per_rank(schedule))
    config = FreezeConfig(max_ratio=0.5)
    with (
        OurPipeline(language_model()) as baseline,
        OurPipeline(workload, schedule=schedule) as plain,
        OurPipeline(workload, schedule=schedule, freeze=config) as planned,
    ):
        planned.step_until_planned()
        times_s: list[float] = []

        def run(pipeline: OurPipeline) -> float:
            pipeline.step()
            if pipeline is planned:
                times_s.append(pipeline.last.step_time_s)
            return float(pipeline.last.step_time_s)

        against_plain = interleave(partial(run, planned), partial(run, plain), rounds=40)
        plain_over_baseline = interleave(partial(run, plain), partial(run, baseline), rounds=20)
        plan = planned.pipe.plan
        assert plan is not None
        error = plan.makespan_s / median(times_s) - 1
        pending = max(plain.last.peak_pending_bytes)
    print(
        f"\n{schedule}: planned / plain: {against_plain} ({1 / against_plain.ratio:.2f}x), "
        f"predicted {plan.makespan_s * 1e3:.1f} ms ({error:+.1%}); plain / plain 1f1b: {plain_over_baseline}; "
        f"waiting for W: {pending / 2**20:.1f} MiB"
    )
    record(
        "schedules",
        schedule=schedule,
        max_ratio=config.max_ratio,
        mode=config.mode,
        planned_over_plain=against_plain,
        plain_over_1f1b=plain_over_baseline,
        predicted_s=plan.makespan_s,
        prediction_error=error,
        peak_pending_bytes=pending,
    )


@pytest.mark.parametrize("max_ratio", [0.3, 0.5, 0.8])
def test_fewer_microbatches(max_ratio: float) -> None:
    """The alternative that sees as many gradients: a plain step with a smaller batch."""
    num = fewer_microbatches(8, max_ratio)
    with OurPipeline(language_model()) as plain, OurPipeline(language_model(num_microbatches=num)) as few:
        against_plain = interleave(few.step, plain.step, rounds=30)
    print(f"\nM = {num} / plain: {against_plain} ({1 / against_plain.ratio:.2f}x)")
    record("fewer_microbatches", max_ratio=max_ratio, num_microbatches=num, over_plain=against_plain)
