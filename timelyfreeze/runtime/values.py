"""What travels between stages: any nesting of tensors, tuples, lists, dicts, dataclasses, None and plain values.

The tensors are taken out, in order, and what is left is a *spec* that puts them back. A value that is one bare tensor
has no spec; the C++ runtime then never enters this file.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from timelyfreeze.errors import problem


class _Slot:
    """The place of one tensor in a skeleton."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. The class itself is not imported for those who have none."""
    return hasattr(tensor, "to_local")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor, which shares its memory; any other tensor itself."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of ``value`` with ``function`` applied to each of its tensors; anything unknown is kept as it is.

    >>> map_tensors({"a": torch.ones(2), "b": None, "c": (3,)}, lambda t: t.shape[0])
    {'a': 2, 'b': None, 'c': (3,)}
    """
    return _rebuild(value, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def _rebuild(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, tuple):
        items = [_rebuild(item, leaf) for item in value]
        if hasattr(value, "_make"):  # a namedtuple; _make goes round a __new__ of its own (PackedSequence)
            return value._make(items)
        return type(value)(items) if hasattr(value, "n_sequence_fields") else tuple(items)  # torch.return_types
    if isinstance(value, list):
        return [_rebuild(item, leaf) for item in value]
    if isinstance(value, Mapping):
        if type(value) is dict:
            return {key: _rebuild(item, leaf) for key, item in value.items()}
        copied: Any = copy.copy(value)  # keeps a subclass, such as a model's output class, and its own attributes
        for key in value:
            copied[key] = _rebuild(value[key], leaf)
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, _rebuild(getattr(value, field.name), leaf))
        return copied
    return leaf(value)


class ValueSpec:
    """Puts one value together again from its tensors."""

    def __init__(self, skeleton: Any) -> None:
        self._skeleton = skeleton

    def decode(self, tensors: Sequence[torch.Tensor]) -> Any:
        return _rebuild(self._skeleton, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Slot) else leaf)

    def call(self, forward: Callable[..., Any], tensors: Sequence[torch.Tensor], *extra: Any) -> Any:
        return forward(self.decode(tensors), *extra)

    def to_bytes(self) -> bytes:
        """The spec for another process of the same job: ``spec_from_bytes`` brings it back. Equal specs, equal bytes.

        Raises:
            TypeError: something in the value cannot be pickled.
        """
        try:
            return pickle.dumps(self._skeleton, protocol=5)
        except Exception as error:  # whatever a class's own pickling raises
            raise TypeError(
                problem(
                    "a value between stages on different ranks",
                    expected="tensors, and other values that can be pickled",
                    got=f"{type(error).__name__}: {error}",
                    hint="Return tensors and plain values from the stage.",
                )
            ) from error


class CallSpec(ValueSpec):
    """The same for the arguments of a call: ``(args, kwargs)``."""

    def call(self, forward: Callable[..., Any], tensors: Sequence[torch.Tensor], *extra: Any) -> Any:
        args, kwargs = self.decode(tensors)
        return forward(*args, *extra, **kwargs)


def spec_from_bytes(text: bytes) -> ValueSpec:
    """What ``ValueSpec.to_bytes`` made in another process of this job, which is trusted as this one is."""
    return ValueSpec(pickle.loads(text))


def encode(value: Any) -> tuple[list[torch.Tensor], ValueSpec]:
    """Take ``value`` apart into its tensors and the spec that puts them back.

    >>> tensors, spec = encode({"h": torch.ones(2), "mask": None})
    >>> sorted(spec.decode(tensors))
    ['h', 'mask']
    """
    tensors, skeleton = _take_tensors(value)
    return tensors, ValueSpec(skeleton)


def encode_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], CallSpec | None]:
    """The same for the arguments of the first stage; no spec where they are one bare tensor."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        return [args[0]], None
    tensors, skeleton = _take_tensors((args, dict(kwargs)))
    return tensors, CallSpec(skeleton)


def _take_tensors(value: Any) -> tuple[list[torch.Tensor], Any]:
    tensors: list[torch.Tensor] = []
    slots: dict[int, _Slot] = {}

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            _refuse_hidden_graph(leaf)
            return leaf
        # A tensor that stands there twice stays one, so that writing one in place writes the other.
        if id(leaf) not in slots:
            slots[id(leaf)] = _Slot(len(tensors))
            tensors.append(leaf)
        return slots[id(leaf)]

    return tensors, _rebuild(value, take)


def _refuse_hidden_graph(leaf: Any) -> None:
    """A tensor inside an object that cannot be taken apart would carry one stage's graph into another's backward."""
    for name, value in getattr(leaf, "__dict__", {}).items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise TypeError(
                problem(
                    "a value between stages",
                    expected="tensors in tuples, lists, dicts or dataclasses",
                    got=f"a tensor that requires grad in {type(leaf).__name__}.{name}",
                    hint="Make the class a dataclass, or pass the tensor itself.",
                )
            )


def stage_entry(module: nn.Module, *, takes_target: bool) -> Callable[..., Any]:
    """How a stage after the first is entered with what the stage before returned.

    A module with one argument gets the value as it is, as in ``nn.Sequential``. One that needs several gets a tuple
    spread over them, and a dict whose keys are their names as keywords.
    """
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return module
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional) - takes_target
    if required <= 1 and not any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return module
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any_name = any(p.kind == p.VAR_KEYWORD for p in parameters)

    def enter(value: Any, *extra: Any) -> Any:
        if isinstance(value, tuple | list):
            return module(*value, *extra)
        if isinstance(value, Mapping) and (takes_any_name or set(value) <= names):
            # The target, if any, is the one positional argument that no key names.
            target_names = [p.name for p in positional if p.name not in value][: len(extra)]
            return module(**value, **dict(zip(target_names, extra, strict=True)))
        return module(value, *extra)

    return enter
