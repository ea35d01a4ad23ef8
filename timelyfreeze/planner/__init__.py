"""What to freeze where: how to plan, the true cost of plans, and plans as files. No torch."""

from __future__ import annotations

from timelyfreeze.planner.background import BackgroundPlanner
from timelyfreeze.planner.fewer import fewer_microbatches
from timelyfreeze.planner.make import Planner, make_plan
from timelyfreeze.planner.microbatches import choose_microbatches
from timelyfreeze.planner.model import predict_makespans
from timelyfreeze.planner.options import GOALS, MODES, ParameterLimits, PlanOptions
from timelyfreeze.planner.plan import Plan
from timelyfreeze.planner.true_cost import PlannedDurations, planned_durations

__all__ = [
    "GOALS",
    "MODES",
    "BackgroundPlanner",
    "ParameterLimits",
    "Plan",
    "PlanOptions",
    "PlannedDurations",
    "Planner",
    "choose_microbatches",
    "fewer_microbatches",
    "make_plan",
    "planned_durations",
    "predict_makespans",
]
