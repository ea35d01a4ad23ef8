"""Stages whose parameters are sharded over the replicas by ``torch.distributed.fsdp.fully_shard``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from timelyfreeze.distributed.groups import Place
from timelyfreeze.errors import problem
from timelyfreeze.runtime.values import is_sharded


class ShardedStages:
    """The modules of this rank's stages that ``fully_shard`` was applied to, over the replicas.

    FSDP gathers their parameters around forward and backward as it always does. Its reduction waits for the end of the
    step, as in ``torch.distributed.pipelining``: micro-batches' gradients add up in the whole parameters first.

    FSDP talks over the mesh's own groups, which are not made anew after a failure: where one replica fails while
    another waits for its shards, all ranks raise, but training must be started again.

    Args:
        stages: of this process; None: on another rank.
        place: of this process.
        has_ties: whether parameters are shared between stages.

    Raises:
        ValueError: sharded over other ranks than the replicas, or with what does not go with it.
    """

    def __init__(self, stages: Sequence[nn.Module | None], place: Place, *, has_ties: bool) -> None:
        here = [stage for stage in stages if stage is not None]
        sharded: list[Any] = [parameter for stage in here for parameter in stage.parameters() if is_sharded(parameter)]
        self._roots: list[Any] = []
        if not sharded:
            return
        column = sorted(row[place.rank] for row in place.grid)
        meshes = {tuple(parameter.device_mesh.mesh.flatten().tolist()) for parameter in sharded}
        hint = 'Apply fully_shard(stage, mesh=mesh["dp"]) and pass mesh=mesh.'
        if meshes != {tuple(column)} or place.num_replicas < 2:
            got = " and ".join(str(list(ranks)) for ranks in sorted(meshes))
            raise ValueError(
                problem("sharded parameters", expected=f"over ranks {column}, the replicas", got=got, hint=hint)
            )
        if has_ties:
            raise ValueError(problem("sharded stages", expected="no parameters tied between stages"))
        for stage in here:
            self._roots += _roots_of(stage)
        if not self._roots:
            raise ValueError(problem("parameters that are DTensors", expected="modules under fully_shard", hint=hint))
        for root in self._roots:
            # Shares of the samples are those of all replicas: gradients add up, they are not averaged.
            for module in root.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(1.0)

    def __bool__(self) -> bool:
        return bool(self._roots)

    @property
    def objection(self) -> str | None:
        """Why these stages cannot be frozen: masks flip flags of the shards, and others are computed with."""
        if not self:
            return None
        return problem(
            "freeze=",
            expected="stages that are not sharded: FSDP2 computes with parameters that masks do not reach",
            got="stages under fully_shard",
            hint="Leave fully_shard out: with mesh= the pipeline keeps replicas itself, and what is frozen "
            "costs no communication. Or pass freeze=None.",
        )

    def begin(self) -> None:
        """Before a step: backward adds up and reduces nothing."""
        self._set(is_last=False)

    def reduce(self) -> None:
        """After the last backward: reduce-scatter, into the sharded parameters' ``.grad``. All replicas call it."""
        self._set(is_last=True)
        for root in self._roots:
            state = _state_of(root)
            for one in state._state_ctx.all_states:
                for group in one._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()

    def rest(self) -> None:
        """Between calls the modules have their shards only; what a failed step has left is dropped."""
        for root in self._roots:
            for one in _state_of(root)._state_ctx.all_states:
                for group in one._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        parameter.unsharded_accumulated_grad = None
                        if hasattr(parameter, "_unsharded_param"):
                            parameter._unsharded_param.grad = None
            for module in root.modules():
                if hasattr(module, "reshard"):
                    module.reshard()

    def _set(self, *, is_last: bool) -> None:
        for root in self._roots:
            root.set_is_last_backward(is_last)
            root.set_reshard_after_backward(is_last)
            root.set_requires_gradient_sync(is_last)


def _roots_of(module: nn.Module) -> Iterator[Any]:
    """The outermost modules under ``fully_shard``."""
    if hasattr(module, "set_requires_gradient_sync"):
        yield module
        return
    for child in module.children():
        yield from _roots_of(child)


def _state_of(module: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]
