"""What every rank does in which order: schedules as data, checked, drawn, read, written and simulated. No torch."""

from __future__ import annotations

from timelyfreeze.schedule import generators as generators  # the schedules register themselves
from timelyfreeze.schedule.actions import Action, Kind
from timelyfreeze.schedule.core import Schedule
from timelyfreeze.schedule.edges import Edge, data_dependencies
from timelyfreeze.schedule.passes import merge_backward
from timelyfreeze.schedule.registry import (
    create_schedule,
    default_stages_per_rank,
    register_schedule,
    schedule_names,
)
from timelyfreeze.schedule.simulate import Timeline, simulate

__all__ = [
    "Action",
    "Edge",
    "Kind",
    "Schedule",
    "Timeline",
    "create_schedule",
    "data_dependencies",
    "default_stages_per_rank",
    "merge_backward",
    "register_schedule",
    "schedule_names",
    "simulate",
]
