"""What an asynchronous pipeline can be asked between batches, and what a resumed run goes on with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from timelyfreeze.asynchronous.engine import AsyncEngine, AsyncOptions
from timelyfreeze.asynchronous.freezing import StreamFreezing
from timelyfreeze.asynchronous.ledger import DriftLedger, empty_ledger, merge_ledgers, pack_ledger
from timelyfreeze.errors import problem
from timelyfreeze.planner import Plan
from timelyfreeze.runtime.assembly import StageAssembly
from timelyfreeze.runtime.ranks import Ranks
from timelyfreeze.runtime.wrapping import ModelWrapper


class ResumableAsyncPipeline(ModelWrapper):
    """Where the training of ``AsyncPipeline`` stands."""

    num_stages: int
    _options: AsyncOptions
    _schedule_name: str
    _ranks: Ranks
    _assembly: StageAssembly
    _async: AsyncEngine | None
    _freezing: StreamFreezing | None
    _num_batches: int

    @abstractmethod
    def drain(self) -> Any:
        """Run what is left."""

    @abstractmethod
    def _calling(self, *, loses: bool = True) -> AbstractContextManager[None]:
        """Around a call of all ranks."""

    @property
    def ledger(self) -> DriftLedger:
        """How many updates fell between forward and backward, by stage; grows while the stages run. Where ranks are
        processes, of this one's stage: ``report()`` has all of them."""
        return empty_ledger(self.num_stages, self._options.accumulation) if self._async is None else self._async.ledger

    @property
    def optimizers(self) -> list[torch.optim.Optimizer | None]:
        """Each stage's own, None where nothing trains, or the stage is on another rank; empty before the stages are
        known. Touch them when drained."""
        return [] if self._async is None else self._async.optimizers

    @property
    def plan(self) -> Plan | None:
        """What is frozen now, or being ramped up to; None: nothing yet."""
        return None if self._freezing is None else self._freezing.plan

    @property
    def process_group(self) -> Any:
        """The pipeline's own group of its processes; None where ranks are threads. Another one after a failure: ask for
        it on all ranks together."""
        return self._ranks.process_group

    def report(self) -> dict[str, Any]:
        """The drift of every stage and what was skipped so far, as plain data; with ``freeze``, under "freezing", the
        plan, the periods predicted and measured, and the freeze ratios of every stage. All ranks call it together."""
        ledger = self.ledger
        loss_scale = None if self._async is None else self._async.loss_scale
        own = self._ranks.own_rank
        if own is not None:
            ledger = merge_ledgers(self._gather(pack_ledger(ledger, own)))
        return {
            "batches": self._num_batches,
            "schedule": self._schedule_name,
            "accumulation": self._options.accumulation,
            "split_points": self._assembly.split_points,
            "max_drift": ledger.max_drift,
            "drift_bounds": [stage.bound for stage in ledger.stages],
            "drift_microbatches": [dict(stage.microbatches) for stage in ledger.stages],
            "updates": [stage.num_updates for stage in ledger.stages],
            "skipped_updates": [stage.num_skipped for stage in ledger.stages],
            "weight_copies": ledger.num_weight_copies,
            "loss_scale": None if loss_scale is None else loss_scale.scale,
            "freezing": None if self._freezing is None else self._freezing.report(),
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own ``state_dict``, drained first; where ranks are processes, this one's part of it."""
        self.drain()
        return super().state_dict(*args, **kwargs)

    def training_state_dict(self) -> dict[str, Any]:
        """Optimizers, schedulers and where training stands, drained first: with it and the model's state, a resumed run
        goes on exactly as this one does. Where ranks are processes, it is for this rank."""
        self.drain()
        engine = self._async
        return self._place() | {
            "optimizers": [] if engine is None else [_state_of(one) for one in engine.optimizers],
        }

    def load_training_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``training_state_dict`` was taken; the stages must be split alike."""
        self.drain()
        self._take_place(state)
        _load_states([] if self._async is None else self._async.optimizers, state["optimizers"])

    def freeze_state_dict(self) -> dict[str, Any]:
        """What ``save_checkpoint`` keeps beside weights and optimizers, drained first: plain data, the same on every
        rank. Each rank gives it the optimizer of its own stage."""
        self.drain()
        own = self._ranks.own_rank
        place = self._place()
        if own is not None:
            for key in ("lr_schedulers", "norms", "skipped"):
                place[key] = [one[stage] for stage, one in enumerate(self._gather(place[key]))]
        return {"step": self._num_batches, "asynchronous": place}

    def load_freeze_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``freeze_state_dict`` was taken.

        Raises:
            ValueError: it is of another kind of pipeline, or of another number of stages.
        """
        self.drain()
        saved = state.get("asynchronous")
        if saved is None or len(saved["lr_schedulers"]) not in (0, self.num_stages):
            got = "that of another pipeline" if saved is None else f"{len(saved['lr_schedulers'])} stages"
            expected = f"that of an AsyncPipeline with {self.num_stages} stages"
            raise ValueError(problem("the state of training", expected=expected, got=got))
        self._take_place({**saved, "batches": state["step"]})

    def _place(self) -> dict[str, Any]:
        engine = self._async
        return {
            "batches": self._num_batches,
            "microbatches": 0 if engine is None else engine.runtime.num_microbatches,
            "split_points": self._assembly.split_points,
            "lr_schedulers": [] if engine is None else [_state_of(one) for one in engine.schedulers],
            "norms": [] if engine is None else engine.norms_by_stage(),
            "skipped": [] if engine is None else engine.skipped_in_a_row,
            "loss_scale": _state_of(None if engine is None else engine.loss_scale),
            "freezing": _state_of(None if self._freezing is None else self._freezing.controller),
        }

    def _take_place(self, place: Mapping[str, Any]) -> None:
        if self._freezing is not None and place["freezing"] is not None:
            self._freezing.controller.load_state_dict(place["freezing"])
        if place["split_points"] is not None:
            self._assembly.set_split_points(self._assembly.check_split_points(place["split_points"]))
            assert self._async is not None
            self._async.runtime.num_microbatches = int(place["microbatches"])
            self._async.load_norms(place["norms"])
            self._async.load_skipped(place["skipped"])
            _load_states([self._async.loss_scale], [place["loss_scale"]])
            _load_states(self._async.schedulers, place["lr_schedulers"])
        self._num_batches = int(place["batches"])

    def _gather(self, own: Any) -> list[Any]:
        with self._calling():
            return self._ranks.gather(own)


def _state_of(owner: Any) -> Any:
    return None if owner is None else owner.state_dict()


def _load_states(owners: list[Any], states: list[Any]) -> None:
    for owner, saved in zip(owners, states, strict=bool(states)):
        if owner is not None and saved is not None:
            owner.load_state_dict(saved)
