"""Parameters that stages of several processes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from timelyfreeze.distributed.groups import Place
from timelyfreeze.distributed.messages import DisagreementError
from timelyfreeze.errors import problem
from timelyfreeze.runtime.engine import Engine
from timelyfreeze.runtime.ties import sum_gradients
from timelyfreeze.runtime.values import is_sharded


@dataclass
class _Tie:
    """One parameter in several processes.

    Attributes:
        names: what the whole model calls it.
        owner: the rank of its first stage.
        copies: the other ranks, in the order of their stages.
        parameter: this process's own; None: it has none.
        before: what its gradient was before the step, on a rank with a copy.
    """

    names: list[str]
    owner: int
    copies: list[int]
    parameter: nn.Parameter | None
    before: torch.Tensor | None = None
    is_begun: bool = False


class RemoteTies:
    """Keeps tied parameters of different processes one and the same.

    Each process has a parameter of its own, with the same value. At the end of a step the copies' gradients go to the
    owner, are added there in the order of the stages, as in one process, and the sum comes back; so that equal
    optimizers keep equal values. Where nobody has a gradient, nobody gets one.

    Args:
        names: groups of names of the whole model's parameters that are one and the same.
        model: this process's part of it.
        engine: of this process.
        place: of this process.
        gather, transfer: as ``ProcessRanks`` has them.

    Raises:
        DisagreementError: a name is unknown to all ranks, or the shapes differ.
    """

    def __init__(
        self,
        names: Sequence[Sequence[str]],
        model: nn.Module,
        engine: Engine,
        place: Place,
        gather: Callable[[Any], list[Any]],
        transfer: Callable[[Sequence[Any], Sequence[int]], list[Any]],
    ) -> None:
        self._place = place
        self._transfer = transfer
        self._ties: list[_Tie] = []
        groups = [list(group) for group in names]
        if not groups:
            return
        own = dict(model.named_parameters(remove_duplicate=False))
        stages = _stages_of(own, engine)
        wanted = {name for group in groups for name in group}
        every = gather({name: [stages[name], list(own[name].shape)] for name in wanted if name in own})
        known = {  # by name: stage, rank, shape
            name: (stage, rank, tuple(shape))
            for rank in range(place.num_ranks)
            for name, (stage, shape) in every[place.member_of(place.replica, rank)].items()
        }
        for group in groups:
            _check(group, known)
            ordered = sorted(group, key=lambda name: known[name][:2])
            ranks = list(dict.fromkeys(known[name][1] for name in ordered))
            if len(ranks) > 1:
                first = next((name for name in ordered if known[name][1] == place.rank), None)
                if first is not None and is_sharded(own[first]):
                    raise DisagreementError(
                        problem("sharded stages", expected="no tied parameters", got=", ".join(ordered))
                    )
                self._ties.append(_Tie(ordered, ranks[0], ranks[1:], None if first is None else own[first]))
        self._make_equal()

    @property
    def names(self) -> list[list[str]]:
        """Of the parameters that are on several ranks."""
        return [tie.names for tie in self._ties]

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter counts on another rank."""
        return any(tie.parameter is parameter and tie.owner != self._place.rank for tie in self._ties)

    def flags(self) -> list[bool | None]:
        """Whether each tied parameter requires grad on this rank; None: it is not here."""
        return [None if tie.parameter is None else tie.parameter.requires_grad for tie in self._ties]

    def check_flags(self, every: Sequence[Sequence[bool | None]]) -> None:
        """One parameter has one flag: DisagreementError, on all ranks, where a tie's ranks differ.

        Args:
            every: what ``flags`` gave on each process.
        """
        for tie, column in zip(self._ties, zip(*every, strict=True), strict=True):
            if len({flag for flag in column if flag is not None}) > 1:
                raise DisagreementError(
                    problem(
                        f"requires_grad of tied parameters {' and '.join(tie.names)}",
                        expected="the same on every rank",
                        got=f"True on rank {column.index(True)}, False on rank {column.index(False)}",
                        hint="Freeze or unfreeze a tied parameter on all ranks that have it.",
                    )
                )

    def begin(self) -> None:
        """A training step begins: copies' gradients are set aside, so that what the step adds is known."""
        for tie in self._ties:
            if tie.parameter is not None and tie.owner != self._place.rank:
                tie.before, tie.parameter.grad, tie.is_begun = tie.parameter.grad, None, True

    def abort(self) -> None:
        """Give back what ``begin`` has set aside, where ``merge`` has not come."""
        for tie in self._ties:
            if tie.is_begun and tie.parameter is not None:
                tie.parameter.grad, tie.before, tie.is_begun = tie.before, None, False

    @torch.no_grad()
    def merge(self) -> None:
        """After the commit of a step: sums of the gradients, on all ranks that have the parameter."""
        own = self._place.rank
        for tie in self._ties:
            parameter = tie.parameter
            if parameter is None:
                continue
            if own != tie.owner:
                self._transfer([(tie.owner, [parameter.grad], b"")], [])
                parameter.grad = self._transfer([], [tie.owner])[0][1][0]
                tie.before, tie.is_begun = None, False
                continue
            for _, (grad,), _ in self._transfer([], tie.copies):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else sum_gradients(parameter.grad, grad)
            self._transfer([(rank, [parameter.grad], b"") for rank in tie.copies], [])

    @torch.no_grad()
    def _make_equal(self) -> None:
        """The owner's value counts."""
        for tie in self._ties:
            if tie.parameter is None:
                continue
            if tie.owner == self._place.rank:
                self._transfer([(rank, [tie.parameter], b"") for rank in tie.copies], [])
            else:
                value = self._transfer([], [tie.owner])[0][1][0]
                assert value is not None
                tie.parameter.copy_(value)


def _stages_of(own: dict[str, nn.Parameter], engine: Engine) -> dict[str, int]:
    """The first stage that uses each parameter."""
    owners = engine.ties.owners
    stage_of: dict[int, int] = {}
    for stage, used in enumerate(engine.ties.stage_parameters):
        for parameter in used:
            stage_of.setdefault(id(owners.get(id(parameter), parameter)), stage)
    return {name: stage_of[id(parameter)] for name, parameter in own.items() if id(parameter) in stage_of}


def _check(group: list[str], known: dict[str, tuple[int, int, tuple[int, ...]]]) -> None:
    missing = [name for name in group if name not in known]
    if missing:
        raise DisagreementError(problem("tied", expected="names of parameters", got=", ".join(missing)))
    shapes = {name: known[name][2] for name in group}
    if len(set(shapes.values())) > 1:
        raise DisagreementError(problem("tied", expected="parameters of one shape", got=shapes))
