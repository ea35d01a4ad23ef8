"""What the ranks of a pipeline must know of each other before and after a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from timelyfreeze.errors import problem
from timelyfreeze.runtime.engine import Engine, StepTimes
from timelyfreeze.runtime.results import StepLoss

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Exchange:
    """Tells everyone's bytes to all processes of a pipeline, which make the same calls of it.

    Attributes:
        rank, num_ranks: of this process among them.
        tell: gives what each told, by rank.
    """

    rank: int
    num_ranks: int
    tell: Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class Opening:
    """What a rank brings to a step, and, once merged, what all of them know.

    Attributes:
        call: train | evaluate | forward.
        step: its index.
        num_samples: of each micro-batch; empty: this rank was given no batch.
        shares: of each micro-batch in the samples of all replicas. Filled in by the merge.
        trainable: the user's flags, one array a stage; None: the stage is on another rank.
        has_new_parameters: what the stages' parameters are called has changed since the last step.
    """

    call: str
    step: int
    num_samples: list[int]
    shares: list[float] = field(default_factory=list)
    trainable: list[Flags | None] = field(default_factory=list)
    has_new_parameters: bool = False


@dataclass(frozen=True)
class Closing:
    """What a rank has to tell of a step, and, once merged, what all of them know.

    Attributes:
        times: of the rank's own actions.
        loss: of the rank with the last stage, else None.
        durations_s: what the plan goes by: of several replicas the slowest. None: those of ``times``.
        transfers_s: how long data took on its way, one number a transfer, by (from stage, to stage).
        works: of the rank's stages, by stage, if they were found out in this step.
        peak_pending_bytes: for every rank.
        overflow: some gradient is not finite; looked for with a ``GradScaler`` only.
    """

    times: StepTimes
    loss: StepLoss | None
    durations_s: Mapping[Any, float] | None = None
    transfers_s: Mapping[tuple[int, int], Sequence[float]] = field(default_factory=dict)
    works: Mapping[int, Any] = field(default_factory=dict)
    peak_pending_bytes: list[int] = field(default_factory=list)
    overflow: bool = False


class Ranks(Protocol):
    """The other ranks of a pipeline: threads of this process, or processes."""

    @property
    def process_group(self) -> Any:
        """All processes of the pipeline; None: there is only this one. Where it is to be made anew, all ranks ask."""

    @property
    def own_rank(self) -> int | None:
        """Which of the schedule's ranks this process is; None: all of them."""

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether this process has the first stage, and whether it has the last one."""

    def making(self) -> Any:
        """A context for making the pipeline: where it fails on one rank, it fails on all of them."""

    @property
    def objection(self) -> str | None:
        """Why the stages of this process cannot be frozen; None: they can."""

    def judging_alike(self) -> Any:
        """A context for checks of what all ranks know: where one raises ValueError, all of them do."""

    def connect(self, engine: Engine) -> None:
        """From now on the ranks talk to each other through this engine's workers."""

    def call(self, step: int) -> Any:
        """A context for one call of all ranks: where it fails on one, it fails on all of them."""

    def open(self, own: Opening) -> Opening:
        """Everyone's openings, merged. All ranks call it together."""

    def reduce_gradients(self, live: Sequence[Flags] | None) -> None:
        """Add the step's gradients over the replicas of this rank.

        Args:
            live: for each stage, which parameters are live for some micro-batch; the others have no gradient anywhere.
        """

    def close(self, own: Closing) -> Closing:
        """Everyone's closings, merged. All ranks call it together."""

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is tied to one that counts on another rank."""

    def commit(self, scale: float, factors: list[list[float]] | None) -> None:
        """End a training step on all ranks: the gradients become the parameters' own (see ``Engine.commit``)."""

    def share_outputs(self, outputs: list[Any] | None) -> list[Any]:
        """The last stage's outputs, on every rank. All ranks call it together."""

    def gather(self, own: Any) -> list[Any]:
        """Everyone's plain value (JSON), by rank. All ranks call it together."""

    def together(self, what: str, step: int) -> Any:
        """A context, inside ``call``, for other work that all do together: gives an ``Exchange``."""

    def shut(self) -> None:
        """The pipeline is being closed."""


class ThreadRanks:
    """All ranks are threads of this process, so this process knows all there is to know."""

    process_group = None
    own_rank = None
    ends = (True, True)
    objection = None

    def __init__(self) -> None:
        self._engine: Engine | None = None

    @contextmanager
    def making(self) -> Iterator[None]:
        yield

    @contextmanager
    def judging_alike(self) -> Iterator[None]:
        yield

    def connect(self, engine: Engine) -> None:
        self._engine = engine

    @contextmanager
    def call(self, step: int) -> Iterator[None]:
        yield

    def open(self, own: Opening) -> Opening:
        return replace(own, shares=shares_of(own.num_samples, sum(own.num_samples)))

    def reduce_gradients(self, live: Sequence[Flags] | None) -> None:
        pass

    def close(self, own: Closing) -> Closing:
        return own

    def is_copy(self, parameter: nn.Parameter) -> bool:
        return False

    def commit(self, scale: float, factors: list[list[float]] | None) -> None:
        assert self._engine is not None
        self._engine.commit(scale, factors)

    def share_outputs(self, outputs: list[Any] | None) -> list[Any]:
        assert outputs is not None
        return outputs

    def gather(self, own: Any) -> list[Any]:
        return [own]

    @contextmanager
    def together(self, what: str, step: int) -> Iterator[Exchange]:
        yield Exchange(0, 1, lambda own: [own])

    def shut(self) -> None:
        pass


def shares_of(num_samples: Sequence[int], total: int) -> list[float]:
    """Each micro-batch's share of the samples.

    >>> shares_of([1, 3], 4)
    [0.25, 0.75]
    """
    return [count / total for count in num_samples]


def merged_loss(parts: Sequence[StepLoss]) -> StepLoss:
    """The loss of a step whose samples several replicas have shared out.

    >>> part = StepLoss(torch.tensor(1.0), 1.0, [0.25, 0.25], None)
    >>> merged_loss([part, part]).mean
    tensor(2.)
    """
    if len(parts) == 1:
        return parts[0]
    weights = [sum(column) for column in zip(*(part.weights for part in parts), strict=True)]
    if parts[0].total is None:
        return StepLoss(torch.stack([part.mean for part in parts]).sum(), 1.0, weights, None)
    divisor = sum(part.divisor for part in parts)
    totals = [part.total for part in parts if part.total is not None]
    if divisor <= 0:
        raise ValueError(problem("the step's (sum, count) loss", expected="a count above 0", got=divisor))
    total = torch.stack(totals).sum()
    return StepLoss(total / divisor, divisor, weights, total)
