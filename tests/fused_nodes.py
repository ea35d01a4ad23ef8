"""Which of the package's own operators a result was made by."""

from __future__ import annotations

import re
from collections import Counter

import torch

_NAMES = {
    "Norm": "norm",
    "FusedActivation": "activation",
    "RopeQkv": "rope_qkv",
    "Rope": "rope",
    "PackedLinear": "linear",
    "DeferredEmbedding": "embedding",
}


def fused_nodes(output: torch.Tensor) -> dict[str, int]:
    """How many nodes of the autograd graph belong to each of the operators."""
    pending, seen, counts = [output.grad_fn], set(), Counter()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        own = re.search(r"timelyfreeze::(?:.*::)?(\w+)>?$", node.name())
        if own:
            counts[_NAMES.get(own[1], own[1])] += 1
        pending += [following for following, _ in node.next_functions]
    return dict(counts)
