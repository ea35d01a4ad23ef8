"""Freezing as a pipeline uses it: profiles the stages once, then asks the controller what to leave out in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from timelyfreeze.freeze.controller import FreezeController
from timelyfreeze.freeze.parameters import Bools
from timelyfreeze.freeze.profile import record_forward
from timelyfreeze.freeze.rates import measured_rates, nominal_rates
from timelyfreeze.freeze.step_masks import StepMasks
from timelyfreeze.freeze.work import parameter_work

_ALL_OR_NOTHING = 2  # masks in a palette

if TYPE_CHECKING:
    from timelyfreeze.freeze.config import FreezeConfig
    from timelyfreeze.schedule import Schedule


class FreezeSession:
    """What to leave out in each step of one pipeline.

    Args:
        config: the user's choices.
        schedule: the pipeline's.
        seed: masks draw from (seed, step, stage, micro-batch).
    """

    def __init__(self, config: FreezeConfig, schedule: Schedule, seed: int) -> None:
        self.controller = FreezeController(config, schedule, seed)
        # Masks under a fixed plan shall repeat from run to run, so they must not depend on what a clock says.
        self._rates_of = measured_rates if config.fixed_plan is None else nominal_rates
        self._stages: Sequence[nn.Module] = []
        self._names: list[list[str]] = []

    def attach(self, stages: Sequence[nn.Module]) -> None:
        """Say which modules the stages are now. Where their parameters are others than before, they are profiled."""
        names = [[name for name, _ in stage.named_parameters()] for stage in stages]
        if self._names and names != self._names:
            self.controller.forget_work()
        self._stages, self._names = stages, names

    @contextmanager
    def profiling(self, model: nn.Module) -> Iterator[None]:
        """Around a step: where the parameters' work is not known yet, it is found out from what runs inside.

        Args:
            model: names the parameters. One that it does not hold keeps the name that its stage has for it.
        """
        if not self.controller.needs_work:
            yield
            return
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        owners = [
            [names.get(id(parameter), name) for name, parameter in stage.named_parameters()] for stage in self._stages
        ]
        with ExitStack() as recording:
            profiles = [recording.enter_context(record_forward(stage)) for stage in self._stages]
            yield
        works = [
            replace(parameter_work(profile, self._rates_of), names=own)
            for profile, own in zip(profiles, owners, strict=True)
        ]
        if works[0].reentrant:
            # The first stage's input carries no gradient, so a frozen prefix would cut off the regions behind it too:
            # there all is live or nothing.
            works[0] = replace(works[0], palette_size=_ALL_OR_NOTHING)
        self.controller.set_work(works)


def as_tensors(masks: StepMasks) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Masks as the runtime takes them, uint8, one tensor a stage.

    Returns:
        Which parameters are live ``[microbatches, parameters]``; and for which micro-batches an input gradient is
        computed although nothing below is live ``[microbatches]``: where lower bounds are measured.
    """
    live = [torch.from_numpy(np.ascontiguousarray(stage)).view(torch.uint8) for stage in masks.live]
    live_below = np.zeros(masks.needs_input_grad.shape[1], dtype=bool)
    forced = []
    for stage, needed in zip(masks.live, masks.needs_input_grad, strict=True):
        forced.append(torch.from_numpy(needed & ~live_below).view(torch.uint8))
        live_below = live_below | stage.any(axis=1)
    return live, forced


def gradient_factors(masks: StepMasks, scale: float, weights: Sequence[float]) -> list[list[float]]:
    """What each parameter's accumulated gradient is multiplied by, one list a stage.

    That is ``scale``; divided by the planned chance of being live if that is asked for; or, where gradients are means
    over the live micro-batches, one over the weights of those.

    Args:
        masks: of the step.
        scale: one over the sum of the weights.
        weights: of the step's micro-batches in the accumulated gradients: shares of the samples, or counts.
    """
    if masks.averages_live:
        return [_mean_factors(live[: len(weights)], scale, weights) for live in masks.live]
    if masks.live_probability is None:
        return [[scale] * stage.shape[1] for stage in masks.live]
    return [np.where(row > 0, scale / np.maximum(row, 1e-12), scale).tolist() for row in masks.live_probability]


def _mean_factors(live: Bools, scale: float, weights: Sequence[float]) -> list[float]:
    seen = np.asarray(weights) @ live
    # Seen in all of them: as in a plain step, to the last bit. In none that counts: the gradient is zero, or not there.
    plain = live.all(axis=0) | (seen <= 0)
    factors: list[float] = np.where(plain, scale, 1.0 / np.where(plain, 1.0, seen)).tolist()
    return factors
