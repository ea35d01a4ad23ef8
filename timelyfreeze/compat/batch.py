"""A batch, cut as ``torch.distributed.pipelining`` cuts it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks
from torch.utils._pytree import tree_leaves, tree_map

from timelyfreeze.errors import problem
from timelyfreeze.runtime import NoChunk

_FIRST_DIMENSION = TensorChunkSpec(0)  # type: ignore[no-untyped-call]


def split_as_torch(
    args: Any, kwargs: Any, count: int, args_spec: Any, kwargs_spec: Any
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Cut into exactly ``count`` pieces."""
    if not args and not kwargs:
        return [()] * count, [{}] * count
    if not args:
        args_spec = None
    pieces, own_kwargs = split_args_kwargs_into_chunks(args, kwargs, count, args_spec, kwargs_spec)
    if len(pieces) != count:
        raise ValueError(
            problem(
                "the batch cannot be split",
                expected=f"at least {count} samples, one a micro-batch",
                got=len(pieces),
                hint="Pass a smaller n_microbatches, or drop the last, smaller batch.",
            )
        )
    whole = tree_map(lambda leaf: leaf.value if isinstance(leaf, NoChunk) else leaf, (pieces, own_kwargs))
    return whole[0], whole[1]


def slice_sizes(values: Any, spec: Any, count: int) -> list[int] | None:
    """How many samples each piece has: 1 where all have the same. None: nothing is cut."""

    def is_leaf(value: Any) -> bool:
        return not isinstance(value, tuple | list | dict)

    leaves = tree_leaves(values, is_leaf=is_leaf)
    specs = [_FIRST_DIMENSION] * len(leaves) if spec is None else tree_leaves(spec, is_leaf=is_leaf)
    for leaf, one in zip(leaves, specs, strict=False):
        if isinstance(leaf, torch.Tensor) and isinstance(one, TensorChunkSpec):
            size, rest = divmod(leaf.size(one.split_dim), count)
            return [size + (i < rest) for i in range(count)] if rest else [1] * count
    return None
