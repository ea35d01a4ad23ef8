"""What every action costs: bounds, and how measurements become bounds. No torch."""

from __future__ import annotations

from timelyfreeze.cost.bounds import ActionCosts
from timelyfreeze.cost.samples import Measured, summarize

__all__ = ["ActionCosts", "Measured", "summarize"]
