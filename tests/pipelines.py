"""Plans by hand, and the training without a pipeline that a pipeline under masks must equal."""

from __future__ import annotations

import torch

from timelyfreeze import ActionCosts, Kind, Plan, create_schedule, make_plan

SHORT = {"warmup_steps": 1, "measure_steps": 3, "switch_delay_steps": 1, "ramp_steps": 2}


def costs_of(schedule, forward_s=1.0, upper_s=3.0, lower_s=1.5):
    upper = {a: forward_s if a.kind is Kind.F else upper_s for a in schedule.actions}
    lower = {a: lower_s if a.stage else 0.0 for a in schedule.actions if a.kind is not Kind.F}
    return ActionCosts(upper, lower)


def fixed_plan(num_stages=2, num_microbatches=4, max_ratio=0.5, schedule="1f1b"):
    """The linear program's plan: middling ratios above the cuts, whole micro-batches cut in stage 0."""
    made = create_schedule(schedule, num_ranks=num_stages, num_microbatches=num_microbatches)
    return make_plan(made, costs_of(made), max_ratio=max_ratio, mode="lp")


def ratio_plan(grid, schedule="1f1b", **options):
    """A plan with these ratios ``[num_stages][num_microbatches]``."""
    made = create_schedule(schedule, num_ranks=len(grid), num_microbatches=len(grid[0]))
    ratios = {a: grid[a.stage][a.microbatch] for a in made.actions if a.kind is Kind.B}
    return Plan.of_ratios(made, costs_of(made), ratios, objective_s=1.0, **({"max_ratio": 1.0} | options))


def cut_plan(cuts, num_stages, at_cut=0.0, above=0.0, schedule="1f1b", **options):
    """Micro-batch m trains nothing below stage ``cuts[m]``, freezes ``at_cut`` of that stage and ``above`` above it."""
    grid = [[1.0 if s < cut else at_cut if s == cut else above for cut in cuts] for s in range(num_stages)]
    return ratio_plan(grid, schedule, **options)


def masked_reference(stages, masks, loss_fn, x, y):
    """Plain training of the unsplit stages, each micro-batch with the masks that the pipeline drew for it."""
    num_microbatches = len(masks.live[0])
    for m, (a, b) in enumerate(zip(x.tensor_split(num_microbatches), y.tensor_split(num_microbatches), strict=True)):
        for stage, live in zip(stages, masks.live, strict=True):
            for p, alive in zip(stage.parameters(), live[m], strict=True):
                p.requires_grad_(bool(alive))
        value = a
        for stage in stages:
            value = stage(value)
        loss = loss_fn(value, b)
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, len(a) / len(x)))
    for stage in stages:
        stage.requires_grad_(True)
