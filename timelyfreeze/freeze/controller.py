"""Decides for every step which parameters are live, from what earlier steps took."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from timelyfreeze.errors import PlanError, problem
from timelyfreeze.freeze.config import FreezeConfig
from timelyfreeze.freeze.groups import with_limits
from timelyfreeze.freeze.parameters import Bools, ParameterWork
from timelyfreeze.freeze.phases import STEADY, PhaseMachine
from timelyfreeze.freeze.reporting import build_report, planned_stage_times_s
from timelyfreeze.freeze.samples import BoundSamples, Durations, RecentSteps, check_durations
from timelyfreeze.freeze.solve import PendingPlan, PlansInBackground
from timelyfreeze.freeze.state import pack_state, unpack_state
from timelyfreeze.freeze.step_masks import StepDrawer, StepMasks
from timelyfreeze.planner import BackgroundPlanner, Plan
from timelyfreeze.schedule import Schedule


class _OpenStep(NamedTuple):
    """A step that was begun: its masks, its frozen micro-batches, whether all run, whether it is to be timed."""

    masks: StepMasks
    frozen: Bools
    is_full: bool
    is_timed: bool


class FreezeController:
    """Runs the phases, keeps the plan and draws the masks. Not thread-safe: one caller, one step at a time.

    ``begin_step`` and ``end_step`` enclose each training step. A step that failed ends with ``abort_step`` instead: it
    is not counted, and the next ``begin_step`` draws the same masks again, so that a repeated step repeats.

    Args:
        config: what to leave out, and when.
        schedule: of the pipeline.
        seed: masks are a function of (seed, step, stage, micro-batch), the plan, the works and the trainable flags.
        work: of every stage's parameters, if it is known already; else see ``set_work``.
        transfer_s: between ranks, for the plan: one number, or by (from stage, to stage).
        planner: makes the plans; default: a ``BackgroundPlanner`` with the config's options.
        overlapping: steps begin before earlier ones have ended, as where nothing is flushed; they end in order. Then
            phases last a few steps longer.

    Raises:
        PlanError: the config's plan does not fit the schedule; says what differs.
        ValueError: the config names stages, or more micro-batches, than the schedule has.

    >>> from timelyfreeze.schedule import create_schedule
    >>> schedule = create_schedule("1f1b", num_ranks=2, num_microbatches=4)
    >>> controller = FreezeController(FreezeConfig(), schedule, seed=0)
    >>> masks = controller.begin_step([np.ones(3, bool), np.ones(2, bool)])
    >>> masks.phase, masks.live[1].shape, bool(masks.live[1].all())
    ('warmup', (4, 2), True)
    >>> controller.end_step({action: 0.001 for action in schedule.actions})
    >>> controller.step
    1
    """

    def __init__(
        self,
        config: FreezeConfig,
        schedule: Schedule,
        seed: int = 0,
        work: Sequence[ParameterWork] | None = None,
        *,
        transfer_s: Any = 0.0,
        planner: PlansInBackground | None = None,
        overlapping: bool = False,
    ) -> None:
        config.check(schedule)
        self.config = config
        self.schedule = schedule
        self.seed = seed
        self.transfer_s = transfer_s
        self._machine = PhaseMachine(config)
        self._drawer = StepDrawer(schedule, config, seed)
        self._samples = BoundSamples()
        self._recent = RecentSteps(schedule, config.replan_window_steps)
        self._actions = frozenset(schedule.actions)
        self._step = 0
        self._pending = PendingPlan(planner or BackgroundPlanner(schedule, config.plan_options))
        self._signature: str | None = None  # of the trainable parameters
        self._measured_signature: str | None = None
        self._overlapping = overlapping
        self._open: deque[_OpenStep] = deque()  # begun and not ended
        self._freeze_ratio_sum = 0.0
        if work is not None:
            self.set_work(work)

    # --- what is known ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """How many steps have ended."""
        return self._step

    @property
    def next_step(self) -> int:
        """The number of the step that begins next: as many have begun."""
        return self._step + len(self._open)

    @property
    def phase(self) -> str:
        """warmup | measure_upper | measure_lower | ramp | steady: of the step that runs, or else of the next one."""
        return self._machine.phase

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or being ramped up to."""
        return self._machine.plan

    @property
    def mean_freeze_ratio(self) -> float:
        """The share of all trainable work that was left out so far, mean over steps."""
        return self._freeze_ratio_sum / max(self._step, 1)

    @property
    def needs_work(self) -> bool:
        """Whether ``set_work`` is still to come. Until then plans freeze nothing."""
        return self._drawer.work is None

    def set_work(self, work: Sequence[ParameterWork]) -> None:
        """Tell the work of every stage's parameters.

        Works that a checkpoint brought stay, if they are of the same parameters: a resumed run must draw the same masks
        though its clock measured other rates.

        Raises:
            ValueError: the number of stages is not the schedule's.
        """
        if len(work) != self.schedule.num_stages:
            raise ValueError(problem("work", expected=f"{self.schedule.num_stages} stages", got=len(work)))
        known = self._drawer.work
        if known is not None and [stage.names for stage in known] == [stage.names for stage in work]:
            return
        self._drawer.work = list(work)
        self._drawer.forget()

    def forget_work(self) -> None:
        """The stages have other parameters now: ``set_work`` is to come again, and until then nothing is frozen."""
        self._drawer.work = None
        self._drawer.trainable = []
        self._drawer.forget()

    def report(self) -> dict[str, Any]:
        """Where the run stands, as plain data: see ``timelyfreeze.freeze.reporting.build_report``."""
        return build_report(
            self._machine, self._samples, self._recent, step=self._step, mean_freeze_ratio=self.mean_freeze_ratio
        )

    # --- a step -----------------------------------------------------------------------------------------------

    def begin_step(self, trainable: Sequence[Bools], num_microbatches: int | None = None) -> StepMasks:
        """Draw the masks of the next step.

        Args:
            trainable: the user's ``requires_grad`` flags, one bool array ``[num_parameters]`` a stage.
            num_microbatches: how many of the schedule's micro-batches the step has; default: all. A step with fewer is
                not used to measure.

        Raises:
            ValueError: the arrays do not fit the stages.
        """
        flags = [np.array(stage, dtype=bool) for stage in trainable]
        self._drawer.check(flags)
        if not self._overlapping:
            self._open.clear()
        step = self.next_step
        full = num_microbatches in (None, self.schedule.num_microbatches)
        # A smaller batch may lack all the micro-batches that are to train a parameter.
        freezes = full or not self.config.averages_live
        machine = self._machine
        self._note_trainable(flags)
        self._look_for_plan()
        frozen = np.zeros(self.schedule.num_microbatches, dtype=bool)
        if machine.follows_plan and not self.needs_work and freezes:
            masks = self._drawer.planned(step, machine)
        elif machine.freezes_halves and full:
            # Every other micro-batch, the others in the next step: no step trains nothing, unless it has only one.
            frozen = (np.arange(len(frozen)) + machine.phase_step(step)) % 2 == 1
            masks = self._drawer.measuring(machine.phase, frozen, probability=0.5)
        else:
            masks = self._drawer.measuring(machine.phase, frozen)
        self._open.append(_OpenStep(masks, frozen, full, full and machine.is_timed(step)))
        return masks

    def end_step(
        self, durations_s: Durations, transfers_s: Mapping[tuple[int, int], Sequence[float]] | None = None
    ) -> None:
        """Take in how long each action took, in seconds; skipped actions may be left out. The oldest step is done.

        Args:
            transfers_s: how long data was on its way between ranks, by (from stage, to stage), if that was measured.

        Raises:
            RuntimeError: no step was begun.
            ValueError: a time is negative or not finite, or of an action that the schedule lacks; nothing is counted.
        """
        if not self._open:
            raise RuntimeError(problem("end_step", expected="a begin_step before it", got="none"))
        machine = self._machine
        check_durations(durations_s, self.schedule, self._actions)
        done = self._open.popleft()
        if done.is_timed:
            self._samples.add(durations_s, done.masks.phase, done.frozen)
            self._samples.add_transfers(transfers_s or {})
        if done.is_full and done.masks.phase == STEADY:
            self._recent.add(durations_s)
        self._freeze_ratio_sum += done.masks.freeze_ratio
        self._step += 1
        phase = machine.phase
        if machine.advance(self._step, self.next_step):
            self._begin_solve()
        if machine.may_measure(self.next_step):
            self._judge_plan()
        if machine.phase != phase:
            self._recent.clear()

    def abort_step(self) -> None:
        """What was begun has failed: it is not counted, and the next ``begin_step`` draws its masks again."""
        self._open.clear()

    def close(self) -> None:
        """Give up the plan in the making, if there is one, and wait for its thread. No other plan can be made."""
        self._pending.close()

    def _note_trainable(self, flags: list[Bools]) -> None:
        machine, drawer = self._machine, self._drawer
        old = drawer.trainable
        if len(old) != len(flags) or not all(map(np.array_equal, old, flags)):
            signature = _signature(flags)
            if self._signature not in (None, signature):
                num_trainable = int(sum(stage.sum() for stage in flags))
                machine.log(self.next_step, "trainable_changed", num_trainable=num_trainable)
            self._signature = signature
            drawer.trainable = flags
            drawer.forget()
        if self._measured_signature not in (None, self._signature):
            machine.note_change(self.next_step)
        if machine.begins_measuring(self.next_step):
            self._measured_signature = self._signature
            self._samples.clear()
            self._recent.clear()
            self._pending.drop()

    # --- plans ------------------------------------------------------------------------------------------------

    def _begin_solve(self) -> None:
        try:
            costs = self._samples.costs(self.schedule, self._drawer.trains.tolist(), self.transfer_s)
        except (PlanError, ValueError) as error:
            self._machine.give_up(self.next_step, str(error))
            return
        options = with_limits(self.config.plan_options, self._drawer.work or (), self._drawer.trainable)
        self._pending.start(costs, options)
        self._machine.announce(self.next_step)

    def _look_for_plan(self) -> None:
        """At the announced step: take the plan, or state a later step, or go on without. Else look for a better one."""
        machine = self._machine
        if machine.switch_step is None:
            self._look_for_better_plan()
            return
        if self.next_step < machine.switch_step:
            return
        outcome = self._pending.poll()
        if outcome is None and machine.postpone(self.next_step):
            return
        if isinstance(outcome, Plan):
            machine.adopt(self.next_step, outcome)
            self._drawer.forget()
        else:
            if outcome is not None:
                machine.give_up(self.next_step, f"{type(outcome).__name__}: {outcome}")
            self._pending.drop()
        self._recent.clear()

    def _look_for_better_plan(self) -> None:
        """While the planner goes on looking: announce what it finds, if it is better enough than the plan in force."""
        if self._machine.phase != STEADY or self._machine.plan is None or self._pending.costs is None:
            return
        is_busy = self._pending.is_busy  # before the poll: what it finds after that is not lost
        found = self._pending.poll()
        announced = isinstance(found, Plan) and self._machine.announce_better(self.next_step, found)
        if not announced and not is_busy:
            self._pending.drop()

    def _judge_plan(self) -> None:
        """Measure again if there is no plan, or if the stages' times have drifted from the planned ones."""
        machine, limit = self._machine, self.config.replan_drift_ratio
        if machine.plan is None:
            machine.measure(self.next_step, "there is no plan yet")
        elif limit is not None and self._recent.full:
            planned = planned_stage_times_s(machine.plan)
            measured = self._recent.stage_medians_s()
            drifts = np.abs(measured - planned) / np.maximum(planned, np.finfo(np.float64).tiny)
            stage = int(np.argmax(drifts))
            if drifts[stage] > limit:
                times = f"{measured[stage]:.3g} s measured, {planned[stage]:.3g} s planned"
                machine.measure(self.next_step, f"stage {stage} has drifted: {times}")

    # --- resume -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on, as plain data: JSON, or ``torch.load(weights_only=True)``, brings it back.

        Taken between steps. A plan in the making is saved as the bounds that it is for, and begun again by
        ``load_state_dict``, as is the search for a better one; a plan that waits for its step is saved itself.
        """
        was_busy = self._pending.is_busy
        outcome = self._pending.poll()
        is_busy = self._pending.is_busy
        if was_busy and not is_busy:
            outcome = self._pending.poll()  # the search has ended in between: its last plan must not be lost
        return pack_state(
            self.schedule,
            step=self._step,
            seed=self.seed,
            machine=self._machine,
            samples=self._samples,
            recent=self._recent,
            work=self._drawer.work,
            signatures=(self._signature, self._measured_signature),
            freeze_ratio_sum=self._freeze_ratio_sum,
            costs=self._pending.costs,
            options=self._pending.options,
            pending=None if isinstance(outcome, Exception) else outcome,
            improving=is_busy,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``state_dict`` was taken: step, phase, masks, samples, plan and announced switch.

        Raises:
            PlanError: it is damaged, of another schedule, or of another plan than the config's; nothing has changed.
        """
        loaded = unpack_state(state, self.schedule, self.config)
        self._step = loaded.step
        self.seed = loaded.seed
        self._machine = loaded.machine
        self._samples = loaded.samples
        self._recent.load_json(loaded.recent)
        self._drawer = StepDrawer(self.schedule, self.config, loaded.seed)
        self._drawer.work = loaded.work
        self._signature, self._measured_signature = loaded.signatures
        self._freeze_ratio_sum = loaded.freeze_ratio_sum
        self._open.clear()
        self._pending.drop()
        if loaded.costs is not None:
            options = loaded.options or self.config.plan_options
            self._pending.start(loaded.costs, options, loaded.pending, improve=loaded.improving)


def _signature(flags: Sequence[Bools]) -> str:
    """A hash by which sets of trainable parameters are told apart."""
    digest = hashlib.sha256()
    for stage in flags:
        digest.update(len(stage).to_bytes(8, "little") + np.packbits(stage).tobytes())
    return digest.hexdigest()[:16]
