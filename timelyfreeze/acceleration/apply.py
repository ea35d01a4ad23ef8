"""Swap the forwards of a model's modules for those that use the package's own operators."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from timelyfreeze.acceleration.guards import DTYPES
from timelyfreeze.acceleration.modules import is_known
from timelyfreeze.acceleration.packing import lay_together
from timelyfreeze.acceleration.swap import RULES, Rule, full_name, kind_of, restore, rule_of, swap
from timelyfreeze.compiled import is_compiled
from timelyfreeze.errors import problem, raise_all


@dataclass
class Acceleration:
    """What ``accelerate`` did. Printed, it is a table.

    Attributes:
        changed: the name of each module that was changed, and what its forward does now.
        skipped: the name of each that looks as if it could be, and why it was not.
        packed: names of the modules whose weights were laid behind each other.
    """

    changed: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    packed: list[str] = field(default_factory=list)
    _modules: list[tuple[str, nn.Module]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give the modules their own forwards back. Packed weights stay where they lie, which nothing notices.

        Raises:
            RuntimeError: the class of a module was changed since, by someone else; the others are undone.
        """
        problems = []
        for name, module in self._modules:
            if rule_of(module) is None:
                problems.append(
                    problem(f"cannot undo {name}", got=f"a module that is a {full_name(type(module))} by now")
                )
            else:
                restore(module)
        self._modules.clear()
        raise_all(RuntimeError, problems)

    def __str__(self) -> str:
        lines = [f"accelerated {len(self.changed)} modules, skipped {len(self.skipped)}"]
        for title, rows in (("", self.changed), ("skipped ", self.skipped)):
            counts = Counter((re.sub(r"\d+", "*", name), text) for name, text in rows)
            width = max((len(name) for name, _ in counts), default=0)
            lines += [f"  {title}{name:{width}}  ×{count:<4} {text}" for (name, text), count in counts.items()]
        return "\n".join(lines)


def accelerate(model: nn.Module, *, pack: bool = False) -> Acceleration:
    """Let the modules of ``model`` run on the package's own operators, in place, with the same results within rounding.

    Known are ``nn.Linear``, ``LayerNorm``, ``RMSNorm``, ``Embedding``, ``GELU`` and ``SiLU``, the blocks of Hugging
    Face Llama, Mistral, Qwen2, Qwen3 and GPT-2 and of timm's vision transformers, and what ``register_block`` was told.
    Parameters, buffers, hooks, state_dict and ``isinstance`` stay as they are; copies and pickles of the model are
    plain. Where a call brings what the operators do not take, the module's own forward runs. TorchScript reads a
    module's source: script it before, or after ``undo``.

    On AMD processors with AVX-512, large products of float32 are oneDNN's, which torch's own choice there takes twice
    as long for, unless ``torch.backends.mkldnn.enabled`` is False.

    Args:
        model: a module; what has been accelerated before is left as it is.
        pack: lay weights that are multiplied with one input behind each other in memory, so that packing them at each
            call is free. Parameters stay the objects that they are; saved by ``safetensors``, they count as shared.

    Returns:
        what was changed, and what was not.

    Raises:
        TypeError: ``model`` is no module.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    >>> done = accelerate(model)
    >>> [name for name, _ in done.changed]
    ['0', '1', '2']
    >>> type(model[0]).__name__, isinstance(model[0], nn.Linear)
    ('Linear', True)
    >>> done.undo()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(problem("model", expected="an nn.Module", got=type(model).__name__))
    done = Acceleration()
    for name, module in list(_children_first(model, "", set(), done)):
        rule = RULES.get(full_name(type(module)))
        reason = _reason_against(module, rule)
        if reason is not None:
            done.skipped.append((name, reason))
        elif rule is not None and rule_of(module) is None:
            swap(module, rule)
            done.changed.append((name, rule.what))
            done._modules.append((name, module))
        if pack and reason is None and (swapped := rule_of(module)) is not None:
            _pack(name, module, swapped, done)
    return done


def _children_first(
    module: nn.Module, name: str, seen: set[int], done: Acceleration
) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, under its first name; nothing of what is compiled."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if is_compiled(module):
        done.skipped.append((name, "compiled; accelerate the module before it is compiled"))
        return
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _children_first(child, f"{name}.{child_name}" if name else child_name, seen, done)
    yield name, module


def _reason_against(module: Any, rule: Rule | None) -> str | None:
    """Why a module is not swapped, where one may have expected it; None: it is, it was, or nobody expects it."""
    if rule_of(module) is not None:
        return None
    if rule is None:
        if nn.utils.parametrize.is_parametrized(module):
            return "parametrized"
        return f"a class of its own, {full_name(type(module))}" if is_known(module) else None
    if "forward" in module.__dict__:
        return "a forward of its own was set on it"
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter:
            return f"its {name} is a {type(parameter).__name__}"
        if parameter.dtype not in DTYPES:
            return f"its {name} is {str(parameter.dtype).removeprefix('torch.')}"
    for name, kind in rule.parts.items():
        child = module._modules.get(name)
        if child is None or kind_of(child) != kind:
            return f"its {name} is no {kind} that was swapped"
    return rule.refuse(module)


def _pack(name: str, module: Any, rule: Rule, done: Acceleration) -> None:
    for group in rule.packs:
        children = [module._modules[child] for child in group]
        for parameter in ("weight", "bias"):
            together = [child._parameters[parameter] for child in children]
            if any(tensor is None for tensor in together):
                continue
            reason = lay_together(together)
            names = [f"{name}.{child}.{parameter}" if name else f"{child}.{parameter}" for child in group]
            if reason is None:
                done.packed += names
            else:
                done.skipped.append((f"{names[0]} and {len(names) - 1} more", f"not packed: {reason}"))
