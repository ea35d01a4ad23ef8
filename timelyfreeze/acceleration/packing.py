"""Weights that are multiplied with one input, laid behind each other in memory, so that packing them costs nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def lay_together(parameters: Sequence[nn.Parameter]) -> str | None:
    """Move the data of ``parameters`` into one storage, in their order; the parameters stay the objects that they are.

    Returns:
        why they are left where they lie, or None.

    >>> a, b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.zeros(1, 3))
    >>> lay_together([a, b]), b.data_ptr() - a.data_ptr()
    (None, 24)
    """
    first = parameters[0]
    if _lie_together(parameters):
        return None
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or parameter.layout != torch.strided or parameter.is_meta:
            return "a weight is no plain tensor"
        if parameter.dtype != first.dtype or parameter.device != first.device:
            return "weights of several dtypes or devices"
        whole = parameter.untyped_storage().nbytes() == parameter.numel() * parameter.itemsize
        if not parameter.is_contiguous() or not whole:
            return "a weight is a part of a larger storage"
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        return "one weight is used twice"
    with torch.no_grad():
        together = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, torch.split(together, [len(p) for p in parameters]), strict=True):
            parameter.data = part
    return None


def _lie_together(parameters: Sequence[nn.Parameter]) -> bool:
    end = parameters[0].data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != end or not parameter.is_contiguous():
            return False
        end += parameter.numel() * parameter.itemsize
    return len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
