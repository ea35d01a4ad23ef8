"""The work of each parameter: the expected time of its gradient for one micro-batch.

Operations over the rate of a matrix product for what enters one, bytes over the bandwidth for the rest, and for every
gradient the bytes of adding it up. So an action's time is linear in the share of work that is frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from timelyfreeze.freeze.parameters import ParameterWork
from timelyfreeze.freeze.profile import ModuleUse, StageProfile
from timelyfreeze.freeze.rates import Rates, measured_rates

RatesOf = Callable[[torch.device, torch.dtype], Rates]

# Where nothing tells how many rows a stage works on. Of matrices among themselves it does not change the shares.
_DEFAULT_TOKENS = 1024
_NORMS_PASSES = 2  # a norm's or bias's gradient reads input and output gradient


class GradientCost(NamedTuple):
    """What a gradient takes for one micro-batch: operations of matrix products, and bytes moved."""

    flops: float
    num_bytes: float


def parameter_work(profile: StageProfile, rates_of: RatesOf = measured_rates) -> ParameterWork:
    """Estimate a stage's works from what ``record_forward`` saw.

    Parameters of compiled or unwatched modules count by their shape and the stage's rows. A parameter that forward
    does not use has no work.

    Args:
        rates_of: ``measured_rates``, or ``nominal_rates`` where masks must repeat from run to run (a fixed plan).

    >>> from timelyfreeze.freeze.profile import record_forward
    >>> from timelyfreeze.freeze.rates import nominal_rates
    >>> stage = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 32, bias=False))
    >>> with record_forward(stage) as profile:
    ...     _ = stage(torch.ones(64, 8))
    >>> work = parameter_work(profile, nominal_rates)
    >>> float(work.work_s[1] / work.work_s[0]), work.forward_order.tolist()
    (4.0, [0, 1])
    """
    num_tokens = _stage_tokens(profile)
    works = []
    used = []
    for index, places in enumerate(profile.places):
        parameter = _parameter(places)
        is_used = _is_used(profile, index, parameter)
        cost = GradientCost(0.0, 0.0)
        if is_used:
            cost = _cost_of_places(profile, places, parameter, num_tokens)
        dtype = parameter.dtype if profile.autocast_dtype is None else profile.autocast_dtype
        rates = rates_of(parameter.device, dtype)
        works.append(cost.flops / rates.flops_per_s + cost.num_bytes / rates.bytes_per_s)
        used.append(is_used)
    return ParameterWork(
        names=profile.names,
        work_s=np.array(works, dtype=np.float64),
        forward_order=np.array(_forward_order(profile, used), dtype=np.int64),
        groups=np.array(_groups(profile), dtype=np.int64),
        used=np.array(used, dtype=bool),
        palette_size=profile.palette_size,
        reentrant=profile.opaque,
    )


def gradient_cost(
    module: nn.Module, name: str, parameter: nn.Parameter, use: ModuleUse | None, num_tokens: float
) -> GradientCost:
    """What the gradient of one parameter takes where one module uses it, without adding it up.

    Args:
        module, name: the module that holds it, and what it is called there.
        use: what the module did in one pass; None where it was not watched.
        num_tokens: rows of a pass, for want of ``use``.
    """
    numel, size = parameter.numel(), parameter.element_size()
    rows = num_tokens if use is None else use.num_tokens
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and name == "weight":
        looked_up = 2.0 * rows * module.embedding_dim * size
        # A dense gradient is a table of zeros first, whatever is looked up.
        return GradientCost(0.0, looked_up if module.sparse else looked_up + numel * size)
    if isinstance(module, _ConvNd) and use is not None:
        if name == "weight":
            positions = (
                use.input_numel / module.in_channels if module.transposed else use.output_numel / module.out_channels
            )
            return GradientCost(2.0 * positions * numel, 0.0)
        return GradientCost(0.0, float(use.output_numel * size))
    if parameter.ndim >= 2:
        return GradientCost(2.0 * rows * numel, 0.0)
    return GradientCost(0.0, _NORMS_PASSES * float(rows) * numel * size)


def _cost_of_places(
    profile: StageProfile, places: list[tuple[nn.Module, str]], parameter: nn.Parameter, num_tokens: float
) -> GradientCost:
    """Summed over the modules that use the parameter, plus reading, adding and writing its gradient once."""
    passes = max(profile.num_passes, 1)
    flops = num_bytes = 0.0
    called = [place for place in places if id(place[0]) in profile.uses]
    for module, name in called or places[:1]:
        use = profile.uses.get(id(module))
        cost = gradient_cost(module, name, parameter, use, num_tokens * passes if use is None else num_tokens)
        flops += cost.flops / passes
        num_bytes += cost.num_bytes / passes
    if not all(getattr(module, "sparse", False) for module, _ in places):
        num_bytes += 3.0 * parameter.numel() * parameter.element_size()
    return GradientCost(flops, num_bytes)


def _parameter(places: list[tuple[nn.Module, str]]) -> nn.Parameter:
    module, name = places[0]
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _is_used(profile: StageProfile, index: int, parameter: nn.Parameter) -> bool:
    if index in profile.first_use or index in profile.in_graph or index in profile.compiled:
        return True
    # Unseen, but perhaps only because nothing could be seen: it ran hidden, was frozen by the user, or did not run.
    return profile.opaque or not parameter.requires_grad or profile.num_passes == 0


def _stage_tokens(profile: StageProfile) -> float:
    """Rows of one pass: the most that a watched module took in, else the stage's first argument's."""
    most = max((use.num_tokens for use in profile.uses.values()), default=0) or profile.num_tokens
    return most / profile.num_passes if most and profile.num_passes else _DEFAULT_TOKENS


def _forward_order(profile: StageProfile, used: list[bool]) -> list[int]:
    """Indices by first use. A used parameter whose use was not seen follows its predecessor by name."""
    keys = []
    last = 0
    for index, is_used in enumerate(used):
        last = profile.first_use.get(index, last)
        keys.append(last if is_used else -1)
    return sorted(range(len(used)), key=lambda index: keys[index])


def _groups(profile: StageProfile) -> list[int]:
    """Groups numbered by their first parameter."""
    first_of: dict[int, int] = {}
    groups = []
    for index in range(len(profile.names)):
        call = profile.groups.get(index)
        groups.append(index if call is None else first_of.setdefault(call, index))
    return groups
