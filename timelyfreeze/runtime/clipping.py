"""The norm of all gradients of a pipeline, wherever its ranks are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from timelyfreeze.runtime.engine import Engine
from timelyfreeze.runtime.values import is_sharded, own_part


class Clipping:
    """Clips the gradients of all stages by one norm over all of them.

    Args:
        model: this process's part of it.
        engine: of its stages; None: no step has been made, and all stages are here.
        norm_type: of the p-norm; ``inf``: the largest absolute value.
    """

    def __init__(self, model: nn.Module, engine: Engine | None, norm_type: float) -> None:
        self._parameters = _by_stage(model, engine)
        self._norm_type = float(norm_type)

    @torch.no_grad()
    def own_norms(self, is_copy: Callable[[nn.Parameter], bool]) -> list[Any]:
        """What the other ranks must know, as plain data: stage, place in it, dtype and norm of each gradient.

        Args:
            is_copy: whether a parameter is tied to one that counts on another rank.
        """
        places, norms = [], []
        for place, (stage, parameter) in enumerate(self._parameters):
            if parameter.grad is not None and not is_copy(parameter):
                places.append((stage, place))
                norms.append(_norm(parameter.grad, self._norm_type))
        if not norms:
            return []
        # One wait for the device, and exact.
        values = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).tolist()
        names = [str(norm.dtype).removeprefix("torch.") for norm in norms]
        return [[*place, name, value] for place, name, value in zip(places, names, values, strict=True)]

    @torch.no_grad()
    def clip(self, every: Sequence[list[Any]], max_norm: float, *, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale this process's gradients; returns the norm over all ranks, as it was before.

        Args:
            every: what ``own_norms`` gave on each process. Of replicas the first one counts.

        Raises:
            RuntimeError: the norm is not finite; on all ranks alike.
        """
        total = _total_norm(every, self._norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"The total norm of order {self._norm_type} for gradients from `parameters` is non-finite, so it "
                "cannot be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        coefficient = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        for _, parameter in self._parameters:
            if parameter.grad is not None:
                own_part(parameter.grad).mul_(coefficient.to(parameter.grad.device))
        return total.to(self._parameters[0][1].device) if self._parameters else total


def _by_stage(model: nn.Module, engine: Engine | None) -> list[tuple[int, nn.Parameter]]:
    """All parameters with their (first) stages: stage by stage, in the model's own order; the loss's come last."""
    if engine is None:
        return [(0, parameter) for parameter in model.parameters()]
    owners = engine.ties.owners
    stage_of: dict[int, int] = {}
    for stage, used in enumerate(engine.ties.stage_parameters):
        for parameter in used:
            stage_of.setdefault(id(owners.get(id(parameter), parameter)), stage)
    # What no stage has may still have a gradient that the user made.
    found = [(stage_of.get(id(parameter), len(engine.stages)), parameter) for parameter in model.parameters()]
    known = {id(parameter) for _, parameter in found}
    loss = [(len(engine.stages), p) for p in engine.loss_parameters if id(p) not in known]
    return sorted(found, key=lambda entry: entry[0]) + loss


def _norm(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    if grad.is_sparse:  # what it does not hold is zero
        grad = grad.coalesce().values()
    norm: Any = torch.linalg.vector_norm(grad, norm_type)
    # Of a sharded gradient all replicas ask together.
    total: torch.Tensor = norm.full_tensor() if is_sharded(norm) else norm
    return total


def _total_norm(every: Sequence[list[Any]], norm_type: float) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_`` puts norms together, in the order of the stages."""
    firsts: dict[tuple[int, int], tuple[str, float]] = {}
    for stage, place, name, value in itertools.chain(*every):
        firsts.setdefault((stage, place), (name, value))
    norms = [torch.tensor(value, dtype=getattr(torch, name)) for name, value in (firsts[key] for key in sorted(firsts))]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
    return total
