"""Pipelines without a flush: every stage updates its own weights while micro-batches keep coming (PACI)."""

from __future__ import annotations

from timelyfreeze.asynchronous.ledger import DriftLedger, StageDrift
from timelyfreeze.asynchronous.pipeline import AsyncPipeline
from timelyfreeze.asynchronous.results import AsyncResult

__all__ = ["AsyncPipeline", "AsyncResult", "DriftLedger", "StageDrift"]
