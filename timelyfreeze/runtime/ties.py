"""Parameters and modules that more than one stage uses.

Each stage works on an alias of its own: the same storage, its own ``requires_grad`` flag, its own gradient. Two
threads that toggle one flag would record forwards wrongly, and two that accumulate into one gradient would add in no
fixed order. At the end of a step the aliases' gradients are summed into the parameter, in the order of the stages.
"""

from __future__ import annotations

import copy
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
class UnsharedStages:
    """Stages that share no module object, and which of their modules are copies of which."""

    stages: list[nn.Module]
    copies: list[tuple[nn.Module, nn.Module]]  # (copy, original)

    def follow_originals(self) -> None:
        """Take over the originals' train or eval mode, which ``model.eval()`` cannot reach in the copies."""
        for copied, original in self.copies:
            copied.training = original.training


def unshare_modules(stages: Sequence[nn.Module]) -> UnsharedStages:
    """Give each later stage a shallow copy of any module object that an earlier stage uses too.

    The copies hold the very same parameters and buffers, so that only the dictionaries in which aliases are put differ.
    """
    seen: set[int] = set()
    result: list[nn.Module] = []
    copies: list[tuple[nn.Module, nn.Module]] = []
    for stage in stages:
        own_of: dict[int, nn.Module] = {}
        originals = list(stage.modules())
        own = _unshare(stage, seen, own_of)
        copies += [(own_of[id(m)], m) for m in originals if own_of[id(m)] is not m]
        seen |= {id(module) for module in own.modules()}
        result.append(own)
    return UnsharedStages(result, copies)


def _unshare(module: nn.Module, seen: set[int], own_of: dict[int, nn.Module]) -> nn.Module:
    if id(module) in own_of:
        return own_of[id(module)]
    own = module
    if id(module) in seen:
        own = copy.copy(module)
        own._parameters = dict(module._parameters)
        own._buffers = dict(module._buffers)
        own._modules = dict(module._modules)
    own_of[id(module)] = own
    for name, child in list(own._modules.items()):
        if child is not None:
            own._modules[name] = _unshare(child, seen, own_of)
    return own


class TiedParameters:
    """The parameters that several stages share, and the aliases that the later ones use.

    Args:
        stages: the stage modules, whose module objects are distinct (see ``unshare_modules``).
        devices: one a stage.
    """

    def __init__(self, stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self._ties: list[_Tie] = []
        self.stage_parameters: list[list[nn.Parameter]] = []
        owners: set[int] = set()
        for stage, device in zip(stages, devices, strict=True):
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
                tie.owner.grad = grad if tie.owner.grad is None else tie.owner.grad.add_(grad)
