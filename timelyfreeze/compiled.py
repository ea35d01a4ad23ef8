"""Which modules are compiled as a whole, so that nothing can be seen or changed inside them."""

from __future__ import annotations

from typing import Any

import torch


def is_compiled(module: Any) -> bool:
    """Whether ``module`` itself is compiled: by torch.compile, by its own ``compile()``, or as TorchScript.

    >>> is_compiled(object())
    False
    """
    return (
        hasattr(module, "_orig_mod")  # what torch.compile returns
        or getattr(module, "_compiled_call_impl", None) is not None  # nn.Module.compile
        or isinstance(module, torch.jit.ScriptModule)
    )
