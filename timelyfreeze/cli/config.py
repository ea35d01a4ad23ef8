"""What a training run is: its options with their defaults, checked, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any

from timelyfreeze.errors import problem, raise_all

DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
MODES = ("lp",)

# Options that resuming may change, because they change neither the numbers of a run nor what its files mean. Text may
# have moved: its fingerprint is compared instead.
FREE_TO_CHANGE = frozenset({"checkpoint_every", "text"})


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        width: features of the residual stream; a multiple of ``2 * num_heads``, because rotary embedding turns pairs.
        num_layers: transformer blocks.
        num_heads: attention heads of ``width / num_heads`` features each.
        sequence_length: longest sequence the rotary table covers, in tokens.
        tied: whether the head uses the embedding's weight.
    """

    width: int = 256
    num_layers: int = 6
    num_heads: int = 4
    sequence_length: int = 128
    tied: bool = False

    def problems(self) -> list[str]:
        """Everything that is wrong with these sizes, each in the package's error form; empty where all is well."""
        found = [
            problem(f"{name} is out of range", expected="at least 1", got=value)
            for name, value in (
                ("--width", self.width),
                ("--layers", self.num_layers),
                ("--heads", self.num_heads),
                ("--sequence-length", self.sequence_length),
            )
            if value < 1
        ]
        if not found and self.width % (2 * self.num_heads):
            found.append(
                problem(
                    "the heads do not divide the width into even parts",
                    expected=f"a width that is a multiple of 2 * heads = {2 * self.num_heads}",
                    got=self.width,
                    hint=f"Take --width {-(-self.width // (2 * self.num_heads)) * 2 * self.num_heads}.",
                )
            )
        return found

    @property
    def hidden_width(self) -> int:
        """Features inside the SwiGLU: 8/3 of the width, which keeps the weights of a 4x MLP, rounded up to 32."""
        return -(-8 * self.width // 3 // 32) * 32


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run of ``timelyfreeze train``. Each field is the option of the same name.

    Raises ValueError on construction, naming every option that is out of range.

    >>> TrainConfig(steps=10).evaluation_interval
    1
    """

    text: tuple[str, ...] = ()
    width: int = 256
    layers: int = 6
    heads: int = 4
    sequence_length: int = 128
    tied: bool = False
    stages: int = 2
    microbatches: int = 8
    microbatch_size: int = 2
    schedule: str = "1f1b"
    steps: int = 220
    learning_rate: float = 7e-4
    learning_rate_warmup: int = 20
    weight_decay: float = 0.1
    mode: str = "lp"
    max_ratio: float = 0.8
    plan: str | None = None
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    compare: bool = True
    evaluate_every: int = 0
    validation_sequences: int = 64
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        raise_all(ValueError, self._problems())

    def _problems(self) -> list[str]:
        whole = [
            *((name, 1) for name in ("stages", "microbatches", "microbatch_size", "steps", "validation_sequences")),
            *((name, 0) for name in ("learning_rate_warmup", "evaluate_every", "checkpoint_every", "seed")),
        ]
        found = [
            problem(f"{option(name)} is out of range", expected=f"at least {low}", got=getattr(self, name))
            for name, low in whole
            if getattr(self, name) < low
        ]
        found += self.model.problems()
        if self.seed >= 2**64:
            found.append(problem("--seed is out of range", expected="below 2**64", got=self.seed))
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            found.append(problem("--learning-rate is out of range", expected="above 0", got=self.learning_rate))
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            found.append(problem("--weight-decay is out of range", expected="at least 0", got=self.weight_decay))
        if not 0 <= self.max_ratio <= 1:
            found.append(problem("--max-ratio is out of range", expected="a share in [0, 1]", got=self.max_ratio))
        for name, allowed in (("dtype", DTYPES), ("device", DEVICES), ("mode", MODES)):
            if getattr(self, name) not in allowed:
                found.append(
                    problem(
                        f"{option(name)} is unknown",
                        expected=f"one of {', '.join(allowed)}",
                        got=repr(getattr(self, name)),
                    )
                )
        if self.layers >= 1 and self.stages > self.layers + 2:
            found.append(
                problem(
                    "there are more stages than parts of the model",
                    expected=f"at most {self.layers + 2} stages: the embedding, {self.layers} blocks and the head",
                    got=self.stages,
                    hint="Take fewer --stages or more --layers.",
                )
            )
        return found

    @property
    def model(self) -> ModelConfig:
        """The sizes of the model."""
        return ModelConfig(self.width, self.layers, self.heads, self.sequence_length, self.tied)

    @property
    def has_schedule_file(self) -> bool:
        """Whether the schedule is a file rather than a name."""
        return self.schedule.endswith(".csv")

    @property
    def batch_size(self) -> int:
        """Sequences of one step of the plain run."""
        return self.microbatches * self.microbatch_size

    @property
    def evaluation_interval(self) -> int:
        """Steps between validations: as asked, else a tenth of the run."""
        return self.evaluate_every or max(1, self.steps // 10)

    @property
    def checkpoint_interval(self) -> int:
        """Steps between checkpoints: as asked, else as often as validations."""
        return self.checkpoint_every or self.evaluation_interval

    @property
    def num_fewer_microbatches(self) -> int:
        """Micro-batches of the "fewer" run: those that see as many gradients a parameter, ceil(M (1 - cap)).

        >>> TrainConfig(microbatches=10, max_ratio=0.7).num_fewer_microbatches  # 10 * (1 - 0.7) is above 3 in floats
        3
        """
        return max(1, math.ceil(self.microbatches * (1 - Fraction(str(self.max_ratio)))))

    def learning_rate_at(self, step: int) -> float:
        """The rate of a step counted from 1: a linear warm-up, then constant."""
        return self.learning_rate * min(1.0, step / max(1, self.learning_rate_warmup))

    def to_json(self) -> dict[str, Any]:
        """As plain data; ``from_json`` reads it."""
        return {**asdict(self), "text": list(self.text)}

    @classmethod
    def from_json(cls, data: object) -> TrainConfig:
        """Read ``to_json``'s form.

        Raises:
            ValueError: an option is missing, unknown, of another type or out of range.
        """
        if not isinstance(data, Mapping):
            raise ValueError(problem("the options are not an object", got=type(data).__name__))
        known = {f.name: f.default for f in fields(cls)}
        found = [problem(f"option {name!r} is missing") for name in known.keys() - data.keys()]
        found += [problem(f"option {name!r} is unknown") for name in data.keys() - known.keys()]
        found += [
            problem(f"option {name!r} has the wrong type", got=repr(value))
            for name, value in data.items()
            if name in known and not _fits(value, name, known[name])
        ]
        raise_all(ValueError, sorted(found))
        return cls(**{**data, "text": tuple(data["text"])})

    def differences(self, other: TrainConfig) -> list[str]:
        """Options that differ and may not when a run is resumed, as ``--width: 256 there, 128 here``."""
        return [
            f"{option(f.name)}: {shown(getattr(self, f.name))} there, {shown(getattr(other, f.name))} here"
            for f in fields(self)
            if f.name not in FREE_TO_CHANGE and getattr(self, f.name) != getattr(other, f.name)
        ]


def option(name: str) -> str:
    """The option as typed: ``sequence_length`` is ``--sequence-length``."""
    return "--no-compare" if name == "compare" else "--" + name.replace("_", "-")


def shown(value: object) -> str:
    """A value as a person would type it."""
    return " ".join(map(str, value)) or "default" if isinstance(value, tuple) else str(value)


def _fits(value: object, name: str, default: object) -> bool:
    if name == "text":
        return isinstance(value, list) and all(isinstance(path, str) for path in value)
    if name == "plan":
        return value is None or isinstance(value, str)
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default)
