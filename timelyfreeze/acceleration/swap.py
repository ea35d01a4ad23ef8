"""How a module gets another forward and stays what it was: its class becomes a subclass of the one it has.

Parameters, buffers, names, hooks and ``isinstance`` are untouched. The subclass has the name of the class; a pickle
or a copy of the module is of the class itself.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

BLOCK = "block"
"""The kind of modules that hold others; all other kinds take one tensor and give one."""

_RULE = "_timelyfreeze_rule"
_PLAIN = "_timelyfreeze_plain"


@dataclass(frozen=True, eq=False)  # a rule is itself alone: hashable
class Rule:
    """What is done with the modules of one class.

    Attributes:
        kind: what such a module is to the blocks that hold it, such as ``"linear"``.
        what: what the swapped forward does, for people.
        forward: takes what the class's forward takes (or one tensor, see ``BLOCK``); returns NotImplemented, before it
            has done anything, where the class's own forward shall run.
        refuse: why a module shall be left alone, or None.
        parts: children that the forward counts on, by name, and their kinds.
        packs: names of linear children that have one input, so that their weights may lie behind each other in memory.
    """

    kind: str
    what: str
    forward: Callable[..., Any]
    refuse: Callable[[nn.Module], str | None] = field(default=lambda module: None)
    parts: Mapping[str, str] = field(default_factory=dict)
    packs: tuple[tuple[str, ...], ...] = ()


RULES: dict[str, Rule] = {}
"""By the full name of the class, so that no library need be imported."""


def full_name(cls: type) -> str:
    """The module and the name of a class.

    >>> full_name(nn.Linear)
    'torch.nn.modules.linear.Linear'
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def register_block(
    cls: type[nn.Module],
    forward: Callable[..., Any],
    *,
    what: str,
    parts: Mapping[str, str] | None = None,
    packs: tuple[tuple[str, ...], ...] = (),
) -> None:
    """Let ``accelerate`` give modules of exactly this class another forward.

    Args:
        cls: the class.
        forward: takes what the class's forward takes, the module first; returns NotImplemented, before it has done
            anything, where the class's own forward shall run.
        what: what it does, for people.
        parts: children that it counts on, by name, and their kinds: ``linear``, ``layer_norm``, ``rms_norm``,
            ``embedding``, ``gelu``, ``gelu_tanh`` or ``silu``. A module without them is left alone.
        packs: names of linear children with one input.

    >>> class Double(nn.Module):
    ...     def forward(self, x):
    ...         return x + x
    >>> register_block(Double, lambda self, x: 2 * x, what="one product")
    """
    RULES[full_name(cls)] = Rule(BLOCK, what, forward, parts=dict(parts or {}), packs=packs)


def only_uses(arguments: tuple[str, ...], names: str) -> Callable[[nn.Module], str | None]:
    """Make a ``Rule.refuse``: against versions of a class whose forward takes other arguments than these, or uses other
    names; what stands in for it knows only these.

    >>> only_uses(("x",), "")(nn.Linear(1, 1))
    "this version's forward takes (input), expected (x)"
    """
    allowed = set(names.split())

    def refuse(module: nn.Module) -> str | None:
        code = inspect.unwrap(type(module).forward).__code__
        taken = code.co_varnames[1 : code.co_argcount]
        if taken != arguments:
            return f"this version's forward takes ({', '.join(taken)}), expected ({', '.join(arguments)})"
        others = sorted(set(code.co_names) - allowed)
        return f"this version's forward uses {', '.join(others)}, which is not known" if others else None

    return refuse


def rule_of(module: nn.Module) -> Rule | None:
    """The rule by which a module was swapped; None where it was not."""
    return type(module).__dict__.get(_RULE)


def kind_of(module: nn.Module) -> str | None:
    """The kind of a swapped module.

    >>> kind_of(nn.Linear(1, 1)) is None
    True
    """
    rule = rule_of(module)
    return None if rule is None else rule.kind


def swap(module: nn.Module, rule: Rule) -> None:
    """Give ``module`` the rule's forward."""
    plain: Any = type(module)
    object.__setattr__(module, "__class__", _swapped_class(plain, rule))


def restore(module: nn.Module) -> None:
    """Give a swapped ``module`` its own forward back."""
    object.__setattr__(module, "__class__", type(module).__dict__[_PLAIN])


@functools.cache
def _swapped_class(plain: Any, rule: Rule) -> type[nn.Module]:
    rule_forward, plain_forward, is_block = rule.forward, plain.forward, rule.kind == BLOCK

    @functools.wraps(plain_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Classes call their one argument differently: x, input, hidden_states.
        if is_block or (len(args) == 1 and not kwargs):
            result = rule_forward(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return plain_forward(self, *args, **kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        # Of protocol 1 at all times: later ones insist on the object's own class.
        reduced: Any = plain.__reduce_ex__(self, 1)
        factory, args, *rest = reduced
        return (factory, tuple(plain if arg is swapped else arg for arg in args), *rest)

    names = ("__module__", "__qualname__", "__doc__")
    body: dict[str, Any] = {name: getattr(plain, name) for name in names}
    body |= {"forward": forward, "__reduce_ex__": reduce_ex, _RULE: rule, _PLAIN: plain}
    swapped: type[nn.Module] = types.new_class(plain.__name__, (plain,), exec_body=lambda space: space.update(body))
    return swapped
