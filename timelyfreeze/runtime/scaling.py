"""Loss scaling over several ranks."""

from __future__ import annotations

from typing import Any

import torch


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a pipeline whose ranks are processes: all of them skip a step, or none does.

    The plain one sees only the gradients of its own process. ``FreezingPipeline.step(grad_scaler=...)`` tells it of an
    overflow elsewhere by an infinite gradient here; but a rank without any gradient in a step (all of its stage frozen,
    or no parameters at all) has no place for one, and the plain scaler refuses to go on there ("No inf checks were
    recorded"). This one is told directly, so that every rank skips alike and has the same scale.

    Args: as ``torch.amp.GradScaler`` takes them.

    Example:
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> parameter = torch.nn.Parameter(torch.ones(1))  # it has no gradient
        >>> optimizer = torch.optim.SGD([parameter], lr=0.1)
        >>> _ = scaler.scale(torch.ones(()))  # pipe.step(..., grad_scaler=scaler) does it
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.get_scale()
        1024.0
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_overflow = False

    def note_overflow(self, has_overflow: bool) -> None:
        """Some rank has a gradient that is not finite (True), in a step since the last ``update``."""
        self._has_overflow |= has_overflow

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As torch's; an overflow on any rank counts, also where no optimizer has stepped here."""
        if self._enabled and new_scale is None and self._scale is not None:
            # The pipeline, as if it were one more optimizer.
            self._per_optimizer_states[id(self)]["found_inf_per_device"] = {
                self._scale.device: torch.full_like(self._scale, float(self._has_overflow))
            }
        super().update(new_scale)
        self._has_overflow = False

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16) or {found_inf.device: found_inf}
        if self._has_overflow:
            for flag in found.values():
                flag.fill_(1.0)
        return found


def note_overflow(scaler: torch.amp.GradScaler | None, has_overflow: bool) -> None:
    """Tell a scaler that can be told what all ranks have found."""
    if isinstance(scaler, GradScaler):
        scaler.note_overflow(has_overflow)
