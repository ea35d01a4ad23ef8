"""Freezing as a pipeline uses it: profiles the stages once, then asks the controller what to leave out in each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from timelyfreeze.freeze.samples import Durations
from timelyfreeze.freeze.step_masks import StepMasks
from timelyfreeze.freeze.work import parameter_work

_ALL_OR_NOTHING = 2  # masks in a palette

if TYPE_CHECKING:
    from timelyfreeze.freeze.config import FreezeConfig
    from timelyfreeze.freeze.parameters import ParameterWork
    from timelyfreeze.freeze.solve import PlansInBackground
    from timelyfreeze.schedule import Schedule


class FreezeSession:
    """What to leave out in each step of one pipeline.

    Args:
        config: the user's choices.
        schedule: the pipeline's.
        seed: masks draw from (seed, step, stage, micro-batch).
        planner, overlapping: as ``FreezeController`` takes them.

    """

    def __init__(
        self,
        config: FreezeConfig,
        schedule: Schedule,
        seed: int,
        planner: PlansInBackground | None = None,
        *,
        overlapping: bool = False,
    ) -> None:
        self.controller = FreezeController(config, schedule, seed, planner=planner, overlapping=overlapping)
        # Masks under a fixed plan shall repeat from run to run, so they must not depend on what a clock says.
        self._rates_of = measured_rates if config.fixed_plan is None else nominal_rates
        self._found_works: dict[int, ParameterWork] = {}
        self._stages: dict[int, nn.Module] = {}
        self._names: list[list[str]] = []

    def attach(self, stages: Sequence[nn.Module | None]) -> bool:
        """Say which modules the stages are now; None: on another rank.

        Returns:
            Whether their parameters are others than before. Then the works of all stages are to be forgotten.
        """
        self._stages = {index: stage for index, stage in enumerate(stages) if stage is not None}
        names = [[name for name, _ in stage.named_parameters()] for stage in self._stages.values()]
        before, self._names = self._names, names
        return bool(before) and names != before

    def begin_step(self, trainable: Sequence[Bools | None], num_microbatches: int, *, renew: bool = False) -> StepMasks:
        """The masks of the next step: see ``FreezeController.begin_step``.

        Args:
            trainable: of all the stages.
            renew: ``attach`` has returned True on some rank.
        """
        if renew:
            self.controller.forget_work()
        return self.controller.begin_step([flags for flags in trainable if flags is not None], num_microbatches)

    def take_works(self) -> dict[int, ParameterWork]:
        """What the ``profiling`` of this step has found, by stage; empty if there was none."""
        found, self._found_works = self._found_works, {}
        return found

    def end_step(
        self,
        durations_s: Durations,
        works: Mapping[int, ParameterWork],
        transfers_s: Mapping[tuple[int, int], Sequence[float]],
    ) -> None:
        """The step is done on all ranks.

        Args:
            durations_s: of the actions.
            works: what ``take_works`` has returned, of all the ranks.
            transfers_s: how long data took between ranks, by (from stage, to stage).
        """
        if works:
            self.controller.set_work([works[stage] for stage in sorted(works)])
        self.controller.end_step(durations_s, transfers_s)

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
            [names.get(id(parameter), name) for name, parameter in stage.named_parameters()]
            for stage in self._stages.values()
        ]
        with ExitStack() as recording:
            profiles = [recording.enter_context(record_forward(stage)) for stage in self._stages.values()]
            yield
        works = [
            replace(parameter_work(profile, self._rates_of), names=own)
            for profile, own in zip(profiles, owners, strict=True)
        ]
        self._found_works = dict(zip(self._stages, works, strict=True))
        if 0 in self._found_works and self._found_works[0].reentrant:
            # The first stage's input carries no gradient, so a frozen prefix would cut off the regions behind it too:
            # there all is live or nothing.
            self._found_works[0] = replace(self._found_works[0], palette_size=_ALL_OR_NOTHING)


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
