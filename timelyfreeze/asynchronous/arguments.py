"""Checks of what an asynchronous pipeline is created with and given to train on."""

from __future__ import annotations

from typing import Any

import torch

from timelyfreeze.errors import problem, raise_all
from timelyfreeze.runtime.microbatch import Microbatch, as_microbatches, split_batch
from timelyfreeze.schedule.asynchronous import STREAM_SCHEDULES

MEMORIES = ("keep", "recompute")


def check_async_arguments(
    optimizer: Any,
    accumulation: int,
    schedule: str,
    memory: str,
    max_skipped: int,
    max_grad_norm: float | None,
    grad_scaler: Any,
) -> None:
    """Raise ValueError with everything that is wrong."""
    problems = []
    if not callable(optimizer):
        problems.append(
            problem(
                "optimizer",
                expected="a function: a stage's parameters -> its optimizer",
                got=type(optimizer).__name__,
                hint="Pass optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3).",
            )
        )
    if accumulation < 1:
        problems.append(problem("accumulation", expected="1 or more", got=accumulation))
    if schedule not in STREAM_SCHEDULES:
        problems.append(problem("schedule", expected=" or ".join(STREAM_SCHEDULES), got=schedule))
    if memory not in MEMORIES:
        problems.append(problem("memory", expected=" or ".join(MEMORIES), got=memory))
    if max_skipped < 1:
        problems.append(problem("max_skipped", expected="1 or more", got=max_skipped))
    if max_grad_norm is not None and not max_grad_norm > 0:
        problems.append(problem("max_grad_norm", expected="None, or a number above 0", got=max_grad_norm))
    if grad_scaler is not None and not isinstance(grad_scaler, torch.amp.GradScaler):
        got = type(grad_scaler).__name__
        problems.append(problem("grad_scaler", expected="None, or a torch.amp.GradScaler", got=got))
    raise_all(ValueError, problems)


def refuse_prediction(predict_weights: bool, schedule: str) -> None:
    """Raise ValueError where forward's weights are kept for backward: there is nothing to predict."""
    if predict_weights and schedule != "paci":
        raise ValueError(
            problem("predict_weights", expected='schedule="paci"', got=repr(schedule), hint="Leave one of them out.")
        )


def refuse_in_processes(**arguments: object) -> None:
    """Raise ValueError naming those that are not None: they work where ranks are threads of one process."""
    problems = [
        problem(f"{name} with process_group", expected="None", hint="Train in one process, or leave it out.")
        for name, value in arguments.items()
        if value is not None
    ]
    raise_all(ValueError, problems)


def slices_of(batch: Any, num_microbatches: int) -> list[Microbatch]:
    """A batch as ``AsyncPipeline.run`` takes it, cut into micro-batches.

    Raises:
        ValueError, TypeError: it is neither ``(input, ..., target)`` nor a list of ``Microbatch``.

    >>> import torch
    >>> [one.num_samples for one in slices_of((torch.ones(3, 2), torch.ones(3)), 2)]
    [2, 1]
    """
    if isinstance(batch, list) and batch and all(isinstance(one, Microbatch) for one in batch):
        return as_microbatches(batch, num_microbatches, has_target=True)
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise TypeError(
            problem(
                "a batch",
                expected="(input, ..., target), or a list of Microbatch",
                got=type(batch).__name__,
                hint="Yield (input, target) tuples.",
            )
        )
    *args, target = batch
    return split_batch(tuple(args), {}, target, num_microbatches)
