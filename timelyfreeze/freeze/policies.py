"""How parameters are chosen above a micro-batch's cut, where every choice takes the same time: small functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.errors import problem


class MaskRequest(NamedTuple):
    """What a policy is asked: masks of one stage for some micro-batches of one step.

    Attributes:
        shares: each trainable parameter's share of the stage's work, sum 1, ``[num_parameters]``.
        groups: parameters of the same number share one forward activation, ``[num_parameters]``.
        ratios: the share of work to freeze in each mask, in (0, 1), ``[num_masks]``.
        points: one number in [0, 1) a mask, uniform over seeds and evenly spread over steps, ``[num_masks]``.
        generator: keyed by (seed, stage, block of steps): the same for all masks of a block.
    """

    shares: NDArray[np.float64]
    groups: NDArray[np.int64]
    ratios: NDArray[np.float64]
    points: NDArray[np.float64]
    generator: np.random.Generator


Policy = Callable[[MaskRequest], NDArray[np.bool_]]
"""Returns which parameters are live, ``[num_masks, num_parameters]``; frozen work must be ``ratios`` in expectation."""

_POLICIES: dict[str, Policy] = {}


def register_policy(name: str) -> Callable[[Policy], Policy]:
    """Decorator: make a policy known to ``FreezeConfig(policy=name)``. It must be a function of its request alone."""

    def register(policy: Policy) -> Policy:
        _POLICIES[name] = policy
        return policy

    return register


def policy_names() -> list[str]:
    """The names that ``FreezeConfig(policy=...)`` knows."""
    return sorted(_POLICIES)


def get_policy(name: str) -> Policy:
    """A policy by name; ValueError for one that is not known."""
    if name not in _POLICIES:
        raise ValueError(problem("unknown policy", expected=f"one of {', '.join(policy_names())}", got=repr(name)))
    return _POLICIES[name]


@register_policy("random")
def freeze_random(request: MaskRequest) -> NDArray[np.bool_]:
    """Tensors in random order, from a random point on, until the planned share of work is frozen.

    The order is laid round a circle, each tensor as long as its share. The live ones are those that begin in an arc of
    length 1 - ratio whose end is the mask's point: systematic sampling (Madow, 1949). Each tensor begins there with
    probability 1 - ratio exactly, whatever its size, so the frozen work meets the ratio in expectation; one mask is off
    by less than its largest tensor. As the arc goes round evenly over steps, no tensor starves.

    >>> shares = np.full(4, 0.25)
    >>> request = MaskRequest(shares, np.arange(4), np.array([0.5]), np.array([0.6]), np.random.default_rng(0))
    >>> int(freeze_random(request).sum())
    2
    """
    # Raw words are the same in every numpy version; what Generator.permutation makes of them may change.
    order = np.argsort(request.generator.bit_generator.random_raw(len(request.shares)), kind="stable")
    starts = np.empty_like(request.shares)
    in_order = request.shares[order]
    starts[order] = np.cumsum(in_order) - in_order
    behind = request.points[:, None] - starts
    behind -= np.floor(behind)
    live: NDArray[np.bool_] = behind < (1.0 - request.ratios)[:, None]
    return live


@register_policy("grouped")
def freeze_grouped(request: MaskRequest) -> NDArray[np.bool_]:
    """As "random", but parameters that one activation feeds are frozen together.

    The activation is kept for backward as long as one of them is live: freezing query, key and value in different
    micro-batches keeps it in all of them. Saves memory, at the price of coarser masks.
    """
    units, unit_of = np.unique(request.groups, return_inverse=True)
    shares = np.bincount(unit_of, request.shares).astype(np.float64)
    return freeze_random(request._replace(shares=shares, groups=units))[:, unit_of]
