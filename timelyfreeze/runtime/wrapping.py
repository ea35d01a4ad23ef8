"""A module around a model that shows the model's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class ModelWrapper(nn.Module):
    """Calls parameters, buffers and state what the wrapped ``model`` calls them.

    >>> wrapper = ModelWrapper()
    >>> wrapper.model = nn.Sequential(nn.Linear(2, 2, bias=False))
    >>> list(wrapper.state_dict()), [name for name, _ in wrapper.named_parameters()]
    (['0.weight'], ['0.weight'])
    """

    model: nn.Module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's own ``state_dict``."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the wrapped model's own ``state_dict``."""
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The wrapped model's own names."""
        return self.model.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The wrapped model's own names."""
        return self.model.named_buffers(prefix, recurse, remove_duplicate)
