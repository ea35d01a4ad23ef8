"""What to freeze where: the linear program, the true cost of its plans, and plans as files. No torch."""

from __future__ import annotations

from timelyfreeze.planner.background import BackgroundPlanner
from timelyfreeze.planner.make import Planner, make_plan
from timelyfreeze.planner.model import predict_makespans
from timelyfreeze.planner.plan import Plan
from timelyfreeze.planner.true_cost import PlannedDurations, planned_durations

__all__ = [
    "BackgroundPlanner",
    "Plan",
    "PlannedDurations",
    "Planner",
    "make_plan",
    "planned_durations",
    "predict_makespans",
]
