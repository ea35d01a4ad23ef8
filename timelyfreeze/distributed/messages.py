"""What ranks tell each other around a step, as plain data."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from timelyfreeze.errors import problem
from timelyfreeze.freeze.parameters import ParameterWork
from timelyfreeze.runtime.engine import StepTimes
from timelyfreeze.runtime.ranks import Closing, Flags, Opening, merged_loss, shares_of
from timelyfreeze.runtime.results import StepLoss
from timelyfreeze.schedule import Schedule


class DisagreementError(ValueError):
    """Something is wrong that all ranks know of, say that they do not do the same thing: all of them raise it."""


def pack_opening(own: Opening) -> dict[str, Any]:
    """As plain data."""
    return {
        "call": own.call,
        "step": own.step,
        "num_samples": own.num_samples,
        "trainable": [None if flags is None else _pack_flags(flags) for flags in own.trainable],
        "new": own.has_new_parameters,
    }


def check_same_call(calls: Sequence[str]) -> None:
    """DisagreementError where ranks have told of different calls."""
    different = sorted(set(calls))
    if len(different) > 1:
        hint = "Make the same calls on every rank, also where a rank has nothing to bring."
        raise DisagreementError(
            problem("the ranks", expected="one and the same call", got=" and ".join(different), hint=hint)
        )


def merge_openings(own: Opening, replicas: Sequence[Sequence[Mapping[str, Any]]], replica: int) -> Opening:
    """What all know at the begin of a step.

    Args:
        replicas: what ``pack_opening`` made, a replica, a rank of the pipeline.
        replica: this process's own.

    Raises:
        DisagreementError: the ranks are in different calls or steps, or were given batches that do not fit.
    """
    every = [one for ranks in replicas for one in ranks]
    check_same_call([f"{one['call']} in step {one['step']}" for one in every])
    batches = [_samples_of(ranks) for ranks in replicas]
    if len({len(batch) for batch in batches}) > 1:
        counts = [len(batch) for batch in batches]
        expected = "the same number of micro-batches in every replica"
        raise DisagreementError(problem("the replicas' batches", expected=expected, got=counts))
    total = sum(map(sum, batches))
    trainable: list[Flags | None] = []
    for packed in zip(*(one["trainable"] for one in replicas[replica]), strict=True):
        known = [flags for flags in packed if flags is not None]
        trainable.append(_unpack_flags(known[0]) if known else None)
    return Opening(
        own.call,
        own.step,
        batches[replica],
        shares_of(batches[replica], total),
        trainable,
        any(one["new"] for one in every),
    )


def _samples_of(ranks: Sequence[Mapping[str, Any]]) -> list[int]:
    given = {rank: one["num_samples"] for rank, one in enumerate(ranks) if one["num_samples"]}
    if not given:
        raise DisagreementError(problem("the batch", expected="an input on the rank of the first stage", got="none"))
    sizes = list(given.values())
    if any(size != sizes[0] for size in sizes):
        got = ", ".join(f"{size} on rank {rank}" for rank, size in given.items())
        expected = "micro-batches of the same sizes on every rank that is given a batch"
        raise DisagreementError(problem("the batch", expected=expected, got=got))
    return list(sizes[0])


def pack_closing(own: Closing, ids: Sequence[int]) -> dict[str, Any]:
    """As plain data; ``ids``: of this rank's own actions."""
    times = own.times
    loss = own.loss
    return {
        "origin_s": times.origin_s,
        "starts": _pack_floats(np.asarray(times.starts_s)[ids]),
        "ends": _pack_floats(np.asarray(times.ends_s)[ids]),
        "skipped": list(times.skipped_ids),
        "transfers": [[*ends, list(seconds)] for ends, seconds in own.transfers_s.items()],
        "loss": None
        if loss is None
        else {
            "mean": float(loss.mean),
            "total": None if loss.total is None else float(loss.total),
            "dtype": str(loss.mean.dtype).removeprefix("torch."),
            "divisor": loss.divisor,
            "weights": loss.weights,
        },
        "works": {str(stage): work.to_json() for stage, work in own.works.items()},
        "pending": own.peak_pending_bytes,
        "overflow": own.overflow,
    }


def merge_closings(
    own: Closing,
    replicas: Sequence[Sequence[Mapping[str, Any]]],
    replica: int,
    ids: Sequence[Sequence[int]],
    schedule: Schedule,
) -> Closing:
    """What all know at the end of a step.

    Args:
        replicas: what ``pack_closing`` made, a replica, a rank of the pipeline.
        replica: this process's own.
        ids: of each rank's actions.
    """
    ranks = replicas[replica]
    times = _merge_times(own.times, ranks, ids)
    durations_s = None
    if len(replicas) > 1:
        every = [_merge_times(own.times, one, ids).durations_s for one in replicas]
        durations_s = {action: max(one[action] for one in every) for action in times.durations_s}
    transfers_s: dict[tuple[int, int], list[float]] = {}
    for one in (one for each in replicas for one in each):
        for below, above, seconds in one["transfers"]:
            transfers_s.setdefault((below, above), []).extend(seconds)
    last = schedule.stage_to_rank[-1]
    return Closing(
        times=times,
        loss=merged_loss([_unpack_loss(one[last]["loss"]) for one in replicas]),
        durations_s=durations_s,
        transfers_s=transfers_s,
        # The first replica's on all of them: masks follow from it, and they must be the same.
        works={
            int(stage): ParameterWork.from_json(work) for one in replicas[0] for stage, work in one["works"].items()
        },
        peak_pending_bytes=[one["pending"][rank] for rank, one in enumerate(ranks) if one["pending"]],
        overflow=any(one["overflow"] for each in replicas for one in each),
    )


def _merge_times(own: StepTimes, ranks: Sequence[Mapping[str, Any]], ids: Sequence[Sequence[int]]) -> StepTimes:
    """All ranks' times on one clock, from the first one's begin on."""
    origin_s = min(one["origin_s"] for one in ranks)
    starts_s, ends_s = np.zeros(len(own.actions)), np.zeros(len(own.actions))
    for one, of_rank in zip(ranks, ids, strict=True):
        late_s = one["origin_s"] - origin_s
        starts_s[of_rank] = _unpack_floats(one["starts"]) + late_s
        ends_s[of_rank] = _unpack_floats(one["ends"]) + late_s
    skipped = [index for one in ranks for index in one["skipped"]]
    return StepTimes(own.actions, starts_s.tolist(), ends_s.tolist(), skipped, origin_s)


def _unpack_loss(data: Mapping[str, Any]) -> StepLoss:
    dtype = getattr(torch, data["dtype"])
    total = None if data["total"] is None else torch.tensor(data["total"], dtype=dtype)
    return StepLoss(torch.tensor(data["mean"], dtype=dtype), data["divisor"], data["weights"], total)


def _pack_flags(flags: Flags) -> list[Any]:
    return [len(flags), base64.b64encode(np.packbits(flags).tobytes()).decode()]


def _unpack_flags(data: Sequence[Any]) -> Flags:
    bits = np.unpackbits(np.frombuffer(base64.b64decode(data[1]), dtype=np.uint8), count=data[0])
    return bits.astype(bool)


def _pack_floats(values: Any) -> str:
    return base64.b64encode(np.asarray(values, dtype="<f8").tobytes()).decode()


def _unpack_floats(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype="<f8")
