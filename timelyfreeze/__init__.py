"""Pipeline-parallel training for PyTorch that leaves out weight gradients where the schedule can use the time."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it. Looked up on first use (PEP 562), so that planning a schedule needs
# neither torch nor the extension.
_EXPORTS = {
    "Action": "timelyfreeze.schedule",
    "ActionCosts": "timelyfreeze.cost",
    "AsyncPipeline": "timelyfreeze.asynchronous",
    "FreezeConfig": "timelyfreeze.freeze",
    "FreezingPipeline": "timelyfreeze.pipeline",
    "GradScaler": "timelyfreeze.runtime.scaling",
    "Kind": "timelyfreeze.schedule",
    "NoChunk": "timelyfreeze.runtime",
    "Plan": "timelyfreeze.planner",
    "PlanError": "timelyfreeze.errors",
    "Schedule": "timelyfreeze.schedule",
    "ScheduleError": "timelyfreeze.errors",
    "StageError": "timelyfreeze.errors",
    "StepResult": "timelyfreeze.runtime.results",
    "TimelyFreezeError": "timelyfreeze.errors",
    "TransportError": "timelyfreeze.errors",
    "accelerate": "timelyfreeze.acceleration",
    "create_schedule": "timelyfreeze.schedule",
    "make_plan": "timelyfreeze.planner",
    "simulate": "timelyfreeze.schedule",
}

__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from timelyfreeze.acceleration import accelerate as accelerate
    from timelyfreeze.asynchronous import AsyncPipeline as AsyncPipeline
    from timelyfreeze.cost import ActionCosts as ActionCosts
    from timelyfreeze.errors import PlanError as PlanError
    from timelyfreeze.errors import ScheduleError as ScheduleError
    from timelyfreeze.errors import StageError as StageError
    from timelyfreeze.errors import TimelyFreezeError as TimelyFreezeError
    from timelyfreeze.errors import TransportError as TransportError
    from timelyfreeze.freeze import FreezeConfig as FreezeConfig
    from timelyfreeze.pipeline import FreezingPipeline as FreezingPipeline
    from timelyfreeze.planner import Plan as Plan
    from timelyfreeze.planner import make_plan as make_plan
    from timelyfreeze.runtime import NoChunk as NoChunk
    from timelyfreeze.runtime.results import StepResult as StepResult
    from timelyfreeze.runtime.scaling import GradScaler as GradScaler
    from timelyfreeze.schedule import Action as Action
    from timelyfreeze.schedule import Kind as Kind
    from timelyfreeze.schedule import Schedule as Schedule
    from timelyfreeze.schedule import create_schedule as create_schedule
    from timelyfreeze.schedule import simulate as simulate


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'timelyfreeze' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
