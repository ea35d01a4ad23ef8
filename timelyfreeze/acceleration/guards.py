"""When an operator of ours may stand in for what a module does; in all other cases the module's own code runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_hooks

from timelyfreeze import ops
from timelyfreeze.acceleration.swap import kind_of

DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
"""What the operators compute in; on a GPU all but float64."""

_PLAIN = (Tensor, nn.Parameter)  # subclasses, such as a DTensor, bring operators of their own


def takes(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the operators take ``x`` with these parameters, and would give what torch's own give, dtype included.

    >>> takes(torch.ones(2)), takes(torch.ones(2), torch.ones(2).double()), takes(torch.ones(2, dtype=torch.int64))
    (True, False, False)
    """
    if type(x) not in _PLAIN:
        return False
    dtype, kind = x.dtype, x.device.type
    if dtype not in DTYPES or not _runs_on(kind) or (kind == "cuda" and dtype.itemsize > 4):
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:  # no vmap, no forward mode
        return False
    return all(p is None or (type(p) in _PLAIN and p.dtype == dtype and p.device == x.device) for p in parameters)


def fits(x: Tensor, *modules: nn.Module) -> bool:
    """Whether ``x`` may go through operators that stand in for all of ``modules`` at once.

    >>> fits(torch.ones(2), nn.Linear(2, 2)), fits(torch.ones(2), nn.Linear(2, 2).double())
    (True, False)
    """
    return takes(x, *(parameter for module in modules for parameter in module._parameters.values()))


def stands_in(module: nn.Module | None, kind: str) -> bool:
    """Whether ``module`` is one of ours, of this kind, and nothing watches its call: then it need not be called.

    >>> stands_in(nn.Linear(2, 2), "linear")
    False
    """
    if module is None or kind_of(module) != kind:
        return False
    watched = (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or "forward" in module.__dict__
    )
    return not watched and not module_hooks._has_any_global_hook()  # type: ignore[no-untyped-call]


_has_kernels = {"cpu": True}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _runs_on(kind: str) -> bool:
    """Whether there are kernels for this kind of device: those for a GPU may have been left out of the build."""
    if kind not in _has_kernels:
        _has_kernels[kind] = kind == "cuda" and _launches()
    return _has_kernels[kind]


def _launches() -> bool:
    try:
        ops.silu(torch.zeros(1, device="cuda"))
    except NotImplementedError:
        return False
    return True
