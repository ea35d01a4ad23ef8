"""Leads ``torch.get_rng_state`` and its kin to a stage's own generator while an action runs.

Random operators of a stage draw from a generator of their own (csrc/runtime/rng.h), so that dropout depends on (seed,
step, stage, micro-batch) alone and the user's generator is never touched. Activation checkpointing saves the random
state in forward and restores it to recompute: it must save and restore that generator.
"""

from __future__ import annotations

from typing import Any

import torch

from timelyfreeze import _C


class _ActionAwareGenerator:
    """``torch.default_generator``, but on a thread that runs an action it stands for the action's generator."""

    def __init__(self, default: torch.Generator) -> None:
        self._default = default

    def __getattr__(self, name: str) -> Any:
        return getattr(self._default, name)

    def get_state(self) -> torch.Tensor:
        state = _C.action_rng_state()
        return self._default.get_state() if state is None else state

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        if not _C.set_action_rng_state(state):
            self._default.set_state(state)
        return self._default

    def manual_seed(self, seed: int) -> torch.Generator:
        if _C.action_rng_state() is None:
            return self._default.manual_seed(seed)
        _C.set_action_rng_state(torch.Generator().manual_seed(seed).get_state())
        return self._default


def follow_action_generator() -> None:
    """Install it once for the process. Off the stages' threads everything stays as it was."""
    module: Any = torch.random
    if not isinstance(module.default_generator, _ActionAwareGenerator):
        module.default_generator = _ActionAwareGenerator(module.default_generator)
