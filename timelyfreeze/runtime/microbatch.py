"""A step's batch, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from timelyfreeze.errors import problem
from timelyfreeze.runtime.values import _rebuild


class NoChunk:
    """Marks a tensor that goes whole to every micro-batch, such as a table that all samples share.

    >>> NoChunk(torch.ones(3)).value.shape
    torch.Size([3])
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class Microbatch:
    """One slice of a batch: the first stage's arguments, the target, and how many samples it holds.

    >>> Microbatch(args=(torch.ones(2, 4),), target=torch.ones(2)).num_samples
    1
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    num_samples: int = 1


def split_batch(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, num_microbatches: int
) -> list[Microbatch]:
    """Cut a batch along dimension 0 into at most ``num_microbatches`` slices that differ by one sample at most.

    Tensors are cut, also inside tuples, lists, dicts and dataclasses; numbers, None, 0-dimensional tensors and
    ``NoChunk`` go whole to each slice. A batch with fewer samples than ``num_microbatches`` gives one slice a sample.

    Raises:
        ValueError: the tensors disagree about the number of samples, or there are none.

    >>> [m.num_samples for m in split_batch((torch.ones(8, 2),), {}, None, 3)]
    [3, 3, 2]
    """
    whole = (args, dict(kwargs), target)
    sizes = _batch_sizes(whole)
    if not sizes:
        raise ValueError(
            problem(
                "the batch cannot be split",
                expected="at least one tensor with a batch dimension",
                got="none",
                hint="Pass the batch as a tensor, or hand over microbatches=[...] that are split already.",
            )
        )
    if len(set(sizes)) > 1:
        raise ValueError(
            problem(
                "the batch cannot be split",
                expected="the same size of dimension 0 in every tensor",
                got=sorted(set(sizes)),
                hint="Wrap what belongs whole to every micro-batch in NoChunk(...).",
            )
        )
    num_samples = sizes[0]
    if num_samples == 0:
        raise ValueError(problem("the batch cannot be split", expected="at least one sample", got=0))
    slice_sizes = _slice_sizes(num_samples, min(num_microbatches, num_samples))
    # Every tensor is cut once, into all its slices; a slice then only picks its own. With 64 micro-batches of next to
    # no work, cutting anew for each slice took a third of the step.
    pieces = _rebuild(whole, lambda leaf: _cut(leaf, slice_sizes))
    if args and not kwargs and all(isinstance(piece, _Pieces) for piece in (*pieces[0], pieces[2])):  # nothing nested
        columns = zip(*(piece.slices for piece in pieces[0]), strict=True)
        return [
            Microbatch(own, {}, label, size)
            for own, label, size in zip(columns, pieces[2].slices, slice_sizes, strict=True)
        ]
    slices = []
    for index, size in enumerate(slice_sizes):
        own_args, own_kwargs, own_target = _rebuild(pieces, _picker(index))
        slices.append(Microbatch(own_args, own_kwargs, own_target, size))
    return slices


def take_batch(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Any,
    microbatches: Sequence[Any] | None,
    most: int,
    *,
    has_target: bool,
    needs: tuple[bool, bool],
) -> list[Microbatch]:
    """A call's batch as micro-batches; none where this process was given none and needs none.

    Args:
        args, kwargs, target, microbatches: as ``FreezingPipeline.step`` takes them.
        most: so many micro-batches at the most.
        has_target: whether items of ``microbatches`` are pairs with a target.
        needs: whether this process needs an input, and whether it needs a target.

    Raises:
        ValueError: the batch cannot be split, something needed is missing, or both forms are given.
    """
    if microbatches is not None:
        if args or kwargs or target is not None:
            raise ValueError(problem("arguments", expected="a batch or microbatches=, not both", got="both"))
        return as_microbatches(microbatches, most, has_target=has_target)
    needs_input, needs_target = needs
    if not (args or kwargs or target is not None or needs_input):
        return []  # what other ranks take is theirs to bring
    if target is None and needs_target:
        raise ValueError(problem("target", expected="what loss_fn takes beside the output", got=None))
    return split_batch(args, kwargs, target, most)


class _Pieces:
    """A tensor's slices."""

    __slots__ = ("slices",)

    def __init__(self, slices: tuple[torch.Tensor, ...]) -> None:
        self.slices = slices


def _picker(index: int) -> Callable[[Any], Any]:
    return lambda leaf: leaf.slices[index] if isinstance(leaf, _Pieces) else leaf


def _cut(leaf: Any, slice_sizes: list[int]) -> Any:
    if isinstance(leaf, NoChunk):
        return leaf.value
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return leaf
    return _Pieces(torch.split(leaf, slice_sizes))


def _slice_sizes(num_samples: int, num_slices: int) -> list[int]:
    size, rest = divmod(num_samples, num_slices)
    return [size + (i < rest) for i in range(num_slices)]


def _batch_sizes(whole: Any) -> list[int]:
    sizes: list[int] = []

    def look(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            sizes.append(leaf.shape[0])

    _rebuild(whole, look)
    return sizes


def as_microbatches(given: Sequence[Any], num_microbatches: int, *, has_target: bool) -> list[Microbatch]:
    """Accept micro-batches that the user has split: ``Microbatch``, ``(input, target)``, or an input alone.

    An input that is a tuple is the first stage's arguments, a dict its keywords, anything else its one argument.

    Raises:
        ValueError: none, or more than the schedule has.
    """
    if not 1 <= len(given) <= num_microbatches:
        raise ValueError(
            problem(
                "microbatches",
                expected=f"1 to {num_microbatches} of them",
                got=len(given),
                hint="Create the pipeline with num_microbatches as large as the longest list.",
            )
        )
    return [_as_microbatch(one, has_target) for one in given]


def _as_microbatch(one: Any, has_target: bool) -> Microbatch:
    if isinstance(one, Microbatch):
        return one
    inputs, target = one if has_target and isinstance(one, tuple) and len(one) == 2 else (one, None)
    args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
    kwargs = inputs if isinstance(inputs, dict) else {}
    sizes = _batch_sizes((args, kwargs, target))
    args, kwargs, target = _rebuild(
        (args, kwargs, target), lambda leaf: leaf.value if isinstance(leaf, NoChunk) else leaf
    )
    return Microbatch(args, kwargs, target, num_samples=sizes[0] if sizes else 1)
