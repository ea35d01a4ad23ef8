"""Leads ``torch.get_rng_state`` and its kin to a stage's own generator while an action runs.

Random operators of a stage draw from a generator of their own (csrc/runtime/rng.h), so that dropout depends on (seed,
step, stage, micro-batch) alone and the user's generator is never touched. Activation checkpointing saves the random
state in forward and restores it to recompute: it must save and restore that generator.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from timelyfreeze import _C

_installed = False


def _get_rng_state(original: Any) -> Any:
    state = _C.action_rng_state()
    return original() if state is None else state


def _set_rng_state(original: Any, new_state: torch.Tensor) -> None:
    if not _C.set_action_rng_state(new_state):
        original(new_state)


def _manual_seed(original: Any, seed: int) -> Any:
    if _C.action_rng_state() is None:
        return original(seed)
    generator = torch.Generator().manual_seed(seed)
    _C.set_action_rng_state(generator.get_state())
    return generator


def _seed(original: Any) -> Any:
    if _C.action_rng_state() is None:
        return original()
    generator = torch.Generator()
    seed = generator.seed()
    _C.set_action_rng_state(generator.get_state())
    return seed


def follow_action_generator() -> None:
    """Install it once for the process. Off the stages' threads everything stays as it was."""
    global _installed
    if _installed:
        return
    _installed = True
    for name, led in (
        ("get_rng_state", _get_rng_state),
        ("set_rng_state", _set_rng_state),
        ("manual_seed", _manual_seed),
        ("seed", _seed),
    ):
        original = getattr(torch.random, name)
        function = functools.wraps(original)(functools.partial(led, original))
        setattr(torch.random, name, function)
        setattr(torch, name, function)
