"""Parameters and modules that more than one stage uses.

Each stage works on an alias of its own: the same storage, its own ``requires_grad`` flag, its own gradient. Two
threads that toggle one flag would record forwards wrongly, and two that accumulate into one gradient would add in no
fixed order. At the end of a step the aliases' gradients are summed into the parameter, in the order of the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class _Tie:
    """One use of a shared parameter in a later stage."""

    owner: nn.Parameter
    alias: nn.Parameter
    places: list[tuple[nn.Module, str]]  # where the stage's modules hold it

    def refresh(self) -> None:
        with torch.no_grad():
            if self.alias.device != self.owner.device:
                self.alias.copy_(self.owner)
            elif self.alias.data_ptr() != self.owner.data_ptr() or self.alias.dtype != self.owner.dtype:
                self.alias.data = self.owner.detach()
        self.alias.requires_grad_(self.owner.requires_grad)


@dataclass(frozen=True)
class _Place:
    """Where a copy stands in for an original while a step runs."""

    parent: nn.Module
    name: str
    original: nn.Module
    copied: nn.Module


class UnsharedStages:
    """Stages of which each works on module objects of its own.

    Where an earlier stage uses a module too, a later one gets a shallow copy: the same parameters and buffers, but
    dictionaries of its own to put aliases in. The copies stand in the model only between ``install`` and ``restore``.

    Args:
        stages: the stage modules; None: not here. They are left installed.
    """

    def __init__(self, stages: Sequence[nn.Module | None]) -> None:
        self._places: list[_Place] = []
        self._copies: list[tuple[nn.Module, nn.Module]] = []  # (copy, original)
        seen: set[int] = set()
        self.stages: list[nn.Module | None] = []
        for stage in stages:
            if stage is None:
                self.stages.append(None)
                continue
            own = self._unshare(stage, seen, {})
            seen |= {id(module) for module in own.modules()}
            self.stages.append(own)

    @property
    def is_stale(self) -> bool:
        """Whether, restored, the user has put other modules where copies shall stand."""
        return any(place.parent._modules.get(place.name) is not place.original for place in self._places)

    def install(self) -> None:
        """Put the copies in, with all that the user has set on their originals since: mode, buffers, any attribute."""
        for copied, original in self._copies:
            _share_attributes(copied, original)
        for place in self._places:
            place.parent._modules[place.name] = place.copied

    def restore(self) -> None:
        """Put the originals back."""
        for place in self._places:
            place.parent._modules[place.name] = place.original

    def _unshare(self, module: nn.Module, seen: set[int], own_of: dict[int, nn.Module]) -> nn.Module:
        if id(module) in own_of:
            return own_of[id(module)]
        own = module
        if id(module) in seen:
            own = type(module).__new__(type(module))  # copy.copy() is refused by parametrized modules
            _share_attributes(own, module)
            own.__dict__["_parameters"] = dict(module._parameters)
            own.__dict__["_modules"] = dict(module._modules)
            self._copies.append((own, module))
        own_of[id(module)] = own
        for name, child in list(own._modules.items()):
            if child is None:
                continue
            own_child = self._unshare(child, seen, own_of)
            if own_child is not child and own is module:  # in a copy nobody sees it
                self._places.append(_Place(own, name, child, own_child))
            own._modules[name] = own_child
        return own


_OWN = ("_parameters", "_modules")  # where a copy differs: aliases and other copies are put there


def _share_attributes(copied: nn.Module, original: nn.Module) -> None:
    copied.__dict__.update({name: value for name, value in original.__dict__.items() if name not in _OWN})


class TiedParameters:
    """The parameters that several stages share, and the aliases that the later ones use.

    Args:
        stages: the stage modules, whose module objects are distinct (see ``UnsharedStages``); None: not here.
        devices: one a stage.
    """

    def __init__(self, stages: Sequence[nn.Module | None], devices: Sequence[torch.device]) -> None:
        self._ties: list[_Tie] = []
        self.stage_parameters: list[list[nn.Parameter]] = []
        owners: set[int] = set()
        for stage, device in zip(stages, devices, strict=True):
            if stage is None:
                self.stage_parameters.append([])
                continue
            places: dict[int, list[tuple[nn.Module, str]]] = {}
            for module in stage.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) in owners:
                        places.setdefault(id(parameter), []).append((module, name))
            used: list[nn.Parameter] = []
            for parameter in stage.parameters():
                if id(parameter) in places:
                    data = parameter.detach().to(device)
                    alias = nn.Parameter(data, requires_grad=parameter.requires_grad)
                    self._ties.append(_Tie(parameter, alias, places[id(parameter)]))
                    used.append(alias)
                else:
                    used.append(parameter)
            owners |= {id(parameter) for parameter in stage.parameters()}
            self.stage_parameters.append(used)

    @property
    def owners(self) -> dict[int, nn.Parameter]:
        """The parameter that each alias (by ``id``) stands for."""
        return {id(tie.alias): tie.owner for tie in self._ties}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While it lasts, the later stages' modules hold the aliases."""
        for tie in self._ties:
            tie.refresh()
        try:
            for tie in self._ties:
                for module, name in tie.places:
                    module._parameters[name] = tie.alias
            yield
        finally:
            for tie in self._ties:
                for module, name in tie.places:
                    module._parameters[name] = tie.owner

    def merge_gradients(self) -> None:
        """Move the aliases' gradients to the parameters."""
        with torch.no_grad():
            for tie in self._ties:
                grad, tie.alias.grad = tie.alias.grad, None
                if grad is None:
                    continue
                grad = grad.to(tie.owner.device)
                tie.owner.grad = grad if tie.owner.grad is None else sum_gradients(tie.owner.grad, grad)


def sum_gradients(total: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Both added up, in ``total`` where that can be."""
    # Dense plus sparse exists, sparse plus dense does not.
    return grad + total if total.is_sparse and not grad.is_sparse else total.add_(grad)
