"""What every rank does in which order: schedules as data, checked, drawn, read, written and simulated. No torch."""

from __future__ import annotations

from timelyfreeze.schedule.actions import Action, Kind
from timelyfreeze.schedule.core import Schedule
from timelyfreeze.schedule.edges import Edge, data_dependencies
from timelyfreeze.schedule.generators import create_schedule, register_schedule, schedule_names
from timelyfreeze.schedule.simulate import Timeline, simulate

__all__ = [
    "Action",
    "Edge",
    "Kind",
    "Schedule",
    "Timeline",
    "create_schedule",
    "data_dependencies",
    "register_schedule",
    "schedule_names",
    "simulate",
]
