"""How many updates fell between the forwards and the backwards of the micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from timelyfreeze import _C


@dataclass(frozen=True)
class StageDrift:
    """What the runtime has counted for one stage.

    Attributes:
        bound: the most updates that the order allows between a micro-batch's forward and its backward there.
        microbatches: how many micro-batches had which drift.
        last: the drift of the last micro-batches, at most 1024 of them, the oldest first.
        num_updates: of the stage's weights.
        num_skipped: updates that were left out, since a gradient was not finite.

    >>> StageDrift(bound=1, microbatches={0: 1, 1: 7}).max_drift
    1
    """

    bound: int
    microbatches: dict[int, int] = field(default_factory=dict)
    last: list[int] = field(default_factory=list, repr=False)
    num_updates: int = 0
    num_skipped: int = 0

    @property
    def max_drift(self) -> int:
        """The largest that there was."""
        return max(self.microbatches, default=0)


@dataclass(frozen=True)
class DriftLedger:
    """The drift of every stage; the runtime stops with an error where a stage breaks its bound.

    Attributes:
        stages: in order.
        num_weight_copies: of one stage's weights each; schedule "paci" makes none, unless it predicts weights.
    """

    stages: list[StageDrift]
    num_weight_copies: int = 0

    @property
    def max_drift(self) -> int:
        """The largest of any micro-batch in any stage."""
        return max((stage.max_drift for stage in self.stages), default=0)


def read_ledger(runtime: _C.AsyncPipeline) -> DriftLedger:
    """What the runtime has counted so far."""
    stages = [
        StageDrift(entry.bound, entry.microbatches, entry.last, entry.num_updates, entry.num_skipped)
        for entry in runtime.ledger
    ]
    return DriftLedger(stages, runtime.num_weight_copies)


def pack_ledger(ledger: DriftLedger, stage: int) -> dict[str, Any]:
    """One stage of it as plain data (JSON), for other ranks."""
    return asdict(ledger.stages[stage]) | {"copies": ledger.num_weight_copies}


def merge_ledgers(every: Sequence[Mapping[str, Any]]) -> DriftLedger:
    """What ``pack_ledger`` made on each rank.

    >>> merge_ledgers([pack_ledger(empty_ledger(2, 1), stage) for stage in (0, 1)]) == empty_ledger(2, 1)
    True
    """
    stages = []
    for one in every:
        counts = {int(drift): count for drift, count in one["microbatches"].items()}
        stages.append(StageDrift(one["bound"], counts, one["last"], one["num_updates"], one["num_skipped"]))
    return DriftLedger(stages, sum(one["copies"] for one in every))


def empty_ledger(num_stages: int, accumulation: int) -> DriftLedger:
    """Before anything has run.

    >>> [stage.bound for stage in empty_ledger(4, 2).stages]
    [2, 1, 1, 0]
    """
    return DriftLedger([StageDrift(-(-(num_stages - 1 - stage) // accumulation)) for stage in range(num_stages)])
