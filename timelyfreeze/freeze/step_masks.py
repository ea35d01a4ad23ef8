"""From phases and plans to the masks of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from timelyfreeze.errors import problem, raise_all
from timelyfreeze.freeze.config import FreezeConfig
from timelyfreeze.freeze.groups import stage_groups
from timelyfreeze.freeze.masks import MaskDrawer
from timelyfreeze.freeze.parameters import Bools, Floats, ParameterWork
from timelyfreeze.freeze.phases import PhaseMachine
from timelyfreeze.freeze.targets import PlanTargets, Ramp, Targets
from timelyfreeze.planner import Plan
from timelyfreeze.schedule import Schedule


@dataclass(frozen=True)
class StepMasks:
    """What one step freezes.

    Attributes:
        live: for each stage, which parameters train for which micro-batch, bool ``[num_microbatches, num_parameters]``.
        needs_input_grad: whether a stage's input must carry a gradient, bool ``[num_stages, num_microbatches]``:
            something below is live, or lower bounds are being measured. Always False in stage 0.
        planned_ratio: share of each stage's work to leave out, float64 ``[num_stages, num_microbatches]``.
        phase: warmup | measure_upper | measure_lower | ramp | steady.
        freeze_ratio: the share of all trainable work that these masks leave out.
        live_probability: with ``rescale``, the planned probability of each parameter to be live, one float64 array
            ``[num_parameters]`` a stage; 0 where the plan never trains it. None without ``rescale``.
        averages_live: whether a gradient is the mean over the micro-batches for which its parameter was live.
        stage_freeze_ratios: the share of each stage's work that masks of a plan leave out, ``[num_stages]``.
    """

    live: list[Bools]
    needs_input_grad: Bools
    planned_ratio: Floats
    phase: str
    freeze_ratio: float
    live_probability: list[Floats] | None = None
    averages_live: bool = False
    stage_freeze_ratios: Floats | None = None

    @property
    def ever_live(self) -> list[Bools]:
        """For each stage, which parameters are live for some micro-batch, bool ``[num_parameters]``."""
        return [np.asarray(live.any(axis=0)) for live in self.live]


class StepDrawer:
    """Draws a step's masks, over the parameters that are trainable just now.

    Args:
        schedule, config, seed: as ``FreezeController`` takes them.

    Attributes:
        work: of every stage; None: not known yet.
        trainable: the user's flags, one bool array a stage.
    """

    def __init__(self, schedule: Schedule, config: FreezeConfig, seed: int) -> None:
        self._schedule = schedule
        self._config = config
        self._seed = seed
        self.work: list[ParameterWork] | None = None
        self.trainable: list[Bools] = []
        self._cache: dict[str, Any] = {}

    @property
    def trains(self) -> Bools:
        """Whether each stage has trainable parameters, ``[num_stages]``."""
        return np.array([bool(flags.any()) for flags in self.trainable])

    def forget(self) -> None:
        """Plan, works or trainable parameters have changed: what was derived from them is stale."""
        self._cache.clear()

    def check(self, flags: Sequence[Bools]) -> None:
        """Raise ValueError unless the flags fit the stages."""
        num_stages = self._schedule.num_stages
        if len(flags) != num_stages:
            raise ValueError(problem("trainable", expected=f"{num_stages} stages", got=len(flags)))
        sizes = [None] * num_stages if self.work is None else [len(work.names) for work in self.work]
        faults = [
            problem(
                "trainable",
                expected="one flag a parameter" if size is None else f"shape ({size},)",
                got=f"shape {stage.shape}",
                where=f"stage {index}",
            )
            for index, (stage, size) in enumerate(zip(flags, sizes, strict=True))
            if stage.ndim != 1 or (size is not None and len(stage) != size)
        ]
        raise_all(ValueError, faults)

    def measuring(self, phase: str, frozen: Bools, probability: float = 1.0) -> StepMasks:
        """All of a micro-batch frozen, or nothing; input gradients as if nothing were.

        Without the latter no backward would run where everything is frozen, and lower bounds would come out as 0.

        Args:
            frozen: which micro-batches, ``[num_microbatches]``.
            probability: that a micro-batch is not frozen.
        """
        trains_below = np.concatenate(([False], np.logical_or.accumulate(self.trains)[:-1]))
        return StepMasks(
            live=[~frozen[:, None] & flags for flags in self.trainable],
            needs_input_grad=np.repeat(trains_below[:, None], len(frozen), axis=1),
            planned_ratio=np.repeat(frozen[None, :].astype(np.float64), len(self.trainable), axis=0),
            phase=phase,
            freeze_ratio=float(frozen.mean()),
            live_probability=[np.where(flags, probability, 0.0) for flags in self.trainable]
            if self._config.rescale
            else None,
            averages_live=self._config.averages_live,
        )

    def planned(self, step: int, machine: PhaseMachine) -> StepMasks:
        """What the machine's plan, or the way to it, leaves out in a step."""
        share = machine.ramp_share(step)
        drawer = self._drawer()
        targets = self._targets(step, machine, share)
        live = drawer.draw(step, targets.ratios, targets.mixes)
        stage_live = np.stack([mask.any(axis=1) for mask in live])
        needs = np.zeros_like(stage_live)
        needs[1:] = np.logical_or.accumulate(stage_live[:-1], axis=0)
        needs[1:] |= stage_live[1:] & np.array([work.reentrant for work in self.work or []])[1:, None]
        frozen_ratios = drawer.frozen_ratios(live)
        return StepMasks(
            live=live,
            needs_input_grad=needs,
            planned_ratio=targets.ratios,
            phase=machine.phase,
            freeze_ratio=self._overall_ratio(frozen_ratios),
            stage_freeze_ratios=frozen_ratios.mean(axis=1),
            live_probability=self._live_probability(machine, share) if self._config.rescale else None,
            averages_live=self._config.averages_live,
        )

    def _targets(self, step: int, machine: PhaseMachine, share: float) -> Targets:
        new = self._plan_targets("new", machine.plan)
        if share >= 1.0:
            return new.targets
        old = self._plan_targets("old", machine.previous)
        ramp: Ramp = self._cached("ramp", Ramp, self._seed, old, new)
        return ramp.at(step, share)

    def _live_probability(self, machine: PhaseMachine, share: float) -> list[Floats]:
        new = self._probability("new", machine.plan)
        if share >= 1.0:
            return new
        old = self._probability("old", machine.previous)
        return [(1.0 - share) * before + share * after for before, after in zip(old, new, strict=True)]

    def _probability(self, role: str, plan: Plan | None) -> list[Floats]:
        targets = self._plan_targets(role, plan).targets
        made: list[Floats] = self._cached(f"{role} probability", self._drawer().live_probability, *targets)
        return made

    def _plan_targets(self, role: str, plan: Plan | None) -> PlanTargets:
        made: PlanTargets = self._cached(role, PlanTargets, self._schedule, plan, self.trains)
        return made

    def _drawer(self) -> MaskDrawer:
        def make() -> MaskDrawer:
            assert self.work is not None
            return MaskDrawer(
                self.work,
                self.trainable,
                self._schedule.num_microbatches,
                seed=self._seed,
                policy=self._config.policy,
                num_live=self._config.options.live_microbatches,
                groups=[stage_groups(self._config.options, stage, work) for stage, work in enumerate(self.work)],
            )

        made: MaskDrawer = self._cached("drawer", make)
        return made

    def _cached(self, key: str, make: Callable[..., Any], *args: Any) -> Any:
        if key not in self._cache:
            self._cache[key] = make(*args)
        return self._cache[key]

    def _overall_ratio(self, frozen_ratios: Floats) -> float:
        """Stages weigh by their trainable work."""
        assert self.work is not None
        weights = np.array([work.work_s[flags].sum() for work, flags in zip(self.work, self.trainable, strict=True)])
        if weights.sum() <= 0:
            return 0.0
        return float(np.clip(np.average(frozen_ratios.mean(axis=1), weights=weights), 0.0, 1.0))
