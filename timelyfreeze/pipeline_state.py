"""What a pipeline can be asked between steps, and what a resumed run goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from timelyfreeze.errors import problem
from timelyfreeze.freeze.session import FreezeSession
from timelyfreeze.runtime.assembly import StageAssembly
from timelyfreeze.runtime.wrapping import ModelWrapper
from timelyfreeze.schedule import Schedule

if TYPE_CHECKING:
    from timelyfreeze.planner import Plan


class ResumablePipeline(ModelWrapper):
    """Where the training of ``FreezingPipeline`` stands."""

    schedule: Schedule
    _assembly: StageAssembly
    _freezing: FreezeSession | None
    _step_index: int

    @property
    def plan(self) -> Plan | None:
        """What is left out where, once it is known."""
        return None if self._freezing is None else self._freezing.controller.plan

    def report(self) -> dict[str, Any]:
        """Planned and measured times by action, phases and plan switches so far, as plain data."""
        base = {"step": self._step_index, "schedule": self.schedule.name, "split_points": self._assembly.split_points}
        return base | ({} if self._freezing is None else self._freezing.controller.report())

    def freeze_state_dict(self) -> dict[str, Any]:
        """Where training stands (step, phase, samples, plan): with it a resumed run goes on exactly."""
        state: dict[str, Any] = {"step": self._step_index, "split_points": self._assembly.split_points}
        if self._freezing is not None:
            state["freezing"] = self._freezing.controller.state_dict()
        return state

    def load_freeze_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``freeze_state_dict`` was taken."""
        if ("freezing" in state) != (self._freezing is not None):
            raise ValueError(
                problem(
                    "freeze state",
                    expected="freezing" if self._freezing is not None else "no freezing",
                    got="freezing" if "freezing" in state else "no freezing",
                    hint="Create the pipeline with the freeze= that it was saved with.",
                )
            )
        points = state["split_points"]
        if points is not None:
            points = self._assembly.check_split_points(points)
        if self._freezing is not None:
            self._freezing.controller.load_state_dict(state["freezing"])
        self._step_index = int(state["step"])
        if points is not None:
            self._assembly.set_split_points(points)
