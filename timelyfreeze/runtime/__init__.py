"""Runs schedules over the stages of a model: splitting, worker threads, and what travels between stages."""

from __future__ import annotations

from timelyfreeze.runtime.engine import Engine, StepTimes
from timelyfreeze.runtime.microbatch import Microbatch, NoChunk
from timelyfreeze.runtime.partition import register_splitter

__all__ = ["Engine", "Microbatch", "NoChunk", "StepTimes", "register_splitter"]
