"""Which parameters train in which micro-batch: works, masks, phases. Names that need torch load it on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from timelyfreeze.freeze.config import FreezeConfig
from timelyfreeze.freeze.controller import FreezeController
from timelyfreeze.freeze.masks import MaskDrawer, mixing
from timelyfreeze.freeze.parameters import ParameterWork
from timelyfreeze.freeze.policies import MaskRequest, policy_names, register_policy
from timelyfreeze.freeze.step_masks import StepMasks

if TYPE_CHECKING:
    from timelyfreeze.freeze.profile import StageProfile as StageProfile
    from timelyfreeze.freeze.profile import record_forward as record_forward
    from timelyfreeze.freeze.rates import measured_rates as measured_rates
    from timelyfreeze.freeze.rates import nominal_rates as nominal_rates
    from timelyfreeze.freeze.work import parameter_work as parameter_work

_WITH_TORCH = {
    "StageProfile": "profile",
    "measured_rates": "rates",
    "nominal_rates": "rates",
    "parameter_work": "work",
    "record_forward": "profile",
}

__all__ = [
    "FreezeConfig",
    "FreezeController",
    "MaskDrawer",
    "MaskRequest",
    "ParameterWork",
    "StageProfile",
    "StepMasks",
    "measured_rates",
    "mixing",
    "nominal_rates",
    "parameter_work",
    "policy_names",
    "record_forward",
    "register_policy",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
    globals()[name] = value
    return value
