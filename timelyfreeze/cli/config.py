"""What a training run is: its options with their defaults, checked, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from timelyfreeze.cli.drains import Drains, shortest_stream
from timelyfreeze.errors import problem, raise_all
from timelyfreeze.planner import MODES, fewer_microbatches
from timelyfreeze.schedule import Schedule, create_schedule, default_stages_per_rank
from timelyfreeze.schedule.asynchronous import STREAM_SCHEDULES
from timelyfreeze.schedule.checks import is_number

DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
MEMORIES = ("keep", "recompute")  # of AsyncPipeline
DEFAULT_RANKS = 2
FLUSHED = "1f1b"  # what a schedule without a flush is set beside
_FROM_FILE = "a schedule from a file"

StageRatios = tuple[tuple[int, float], ...]

# Options that resuming may change, because they change neither the numbers of a run nor what its files mean. Text may
# have moved: its fingerprint is compared instead.
FREE_TO_CHANGE = frozenset({"checkpoint_every", "text"})
# And those that say how many ranks there are, where nothing depends on it but times, which are then measured anew.
RESIZED = frozenset({"stages"})


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
    stages_per_rank: int | None = None
    microbatches: int = 8
    microbatch_size: int = 2
    schedule: str = "1f1b"
    accumulation: int | None = None
    memory: str = MEMORIES[0]
    predict_weights: bool = False
    data_parallel: int = 1
    steps: int = 220
    learning_rate: float = 7e-4
    learning_rate_warmup: int = 20
    weight_decay: float = 0.1
    mode: str = MODES[0]
    max_ratio: float = 0.3
    stage_max_ratio: StageRatios = ()
    min_live_ratio: float = 0.25
    target_ms: float | None = None
    live_microbatches: int | None = None
    plan: str | None = None
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    compare: bool = True
    compare_modes: bool = False
    evaluate_every: int = 0
    validation_sequences: int = 64
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        raise_all(ValueError, self._problems())

    def _problems(self) -> list[str]:
        whole = [
            *((name, 1) for name in ("stages", "microbatches", "microbatch_size", "steps", "validation_sequences")),
            ("data_parallel", 1),
            *((name, 0) for name in ("learning_rate_warmup", "evaluate_every", "checkpoint_every", "seed")),
        ]
        found = [
            problem(f"{option(name)} is out of range", expected=f"at least {low}", got=getattr(self, name))
            for name, low in whole
            if getattr(self, name) < low
        ]
        found += [
            problem(f"{option(name)} is out of range", expected="at least 1", got=getattr(self, name))
            for name in ("stages_per_rank", "accumulation")
            if getattr(self, name) is not None and getattr(self, name) < 1
        ]
        found += self.model.problems()
        if self.seed >= 2**64:
            found.append(problem("--seed is out of range", expected="below 2**64", got=self.seed))
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            found.append(problem("--learning-rate is out of range", expected="above 0", got=self.learning_rate))
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            found.append(problem("--weight-decay is out of range", expected="at least 0", got=self.weight_decay))
        found += self._schedule_problems()
        found += self._freezing_problems()
        found += self._conflicts()
        for name, allowed in (("dtype", DTYPES), ("device", DEVICES), ("mode", MODES), ("memory", MEMORIES)):
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

    def _schedule_problems(self) -> list[str]:
        """Whether the schedule is known, and the stages can be dealt out to ranks."""
        if self.has_schedule_file:
            return []
        try:
            per_rank = self._num_chunks
        except ValueError as error:
            return [str(error)]
        if per_rank < 1 or self.stages < 1 or self.stages % per_rank == 0:
            return []
        least = self.stages // per_rank * per_rank
        counts = " or ".join(str(count) for count in (least, least + per_rank) if count)
        return [
            problem(
                "the stages cannot be dealt out to ranks",
                expected=f"a multiple of {per_rank}, the stages that a rank holds under {self.schedule}",
                got=f"--stages {self.stages}",
                hint=f"Take --stages {counts}.",
            )
        ]

    def _freezing_problems(self) -> list[str]:
        shares = [("--max-ratio", self.max_ratio), ("--min-live-ratio", self.min_live_ratio)]
        shares += [(f"--stage-max-ratio of stage {stage}", ratio) for stage, ratio in self.stage_max_ratio]
        found = [
            problem(f"{name} is out of range", expected="a share in [0, 1]", got=share)
            for name, share in shares
            if not 0 <= share <= 1
        ]
        stages = [stage for stage, _ in self.stage_max_ratio]
        if stages and not (min(stages) >= 0 and max(stages) < self.stages):
            found.append(
                problem("--stage-max-ratio names no stage", expected=f"0 to {self.stages - 1}", got=f"{stages}"[1:-1])
            )
        if len(set(stages)) < len(stages):
            found.append(problem("--stage-max-ratio names a stage twice", got=shown(self.stage_max_ratio)))
        if self.target_ms is not None and not (math.isfinite(self.target_ms) and self.target_ms > 0):
            found.append(problem("--target-ms is out of range", expected="above 0", got=self.target_ms))
        if self.live_microbatches is not None and self.live_microbatches < 1:
            found.append(
                problem("--live-microbatches is out of range", expected="at least 1", got=self.live_microbatches)
            )
        return found

    def _conflicts(self) -> list[str]:
        """Options that say two things about one matter."""
        live, given = self.live_microbatches is not None, self.plan is not None
        pairs = [
            (live and self.microbatches != self.live_microbatches, "--live-microbatches", "--microbatches"),
            (live and bool(self.stage_max_ratio), "--live-microbatches", "--stage-max-ratio"),
            (live and self.target_ms is not None, "--live-microbatches", "--target-ms"),
            (live and given, "--live-microbatches", "--plan"),
            (live and self.has_schedule_file, "--live-microbatches", _FROM_FILE),
            (given and self.target_ms is not None, "--plan", "--target-ms"),
            (given and self.compare_modes, "--plan", "--compare-modes"),
            (self.compare_modes and not self.compare, "--compare-modes", "--no-compare"),
            (self.has_schedule_file and self.stages_per_rank is not None, "--stages-per-rank", _FROM_FILE),
        ]
        return [
            problem(f"{one} and {other} exclude each other", hint="Leave one of them out.")
            for conflict, one, other in pairs
            if conflict
        ] + self._stream_problems()

    def _stream_problems(self) -> list[str]:
        """Options of schedules without a flush where there is none, and what such a schedule cannot do."""
        if not self.is_stream:
            given = {"accumulation": self.accumulation is not None, "memory": self.memory != MEMORIES[0]}
            given["predict_weights"] = self.predict_weights
            return [
                problem(
                    f"{option(name)} needs a schedule without a flush",
                    expected=f"--schedule {' or '.join(STREAM_SCHEDULES)}",
                    got=self.schedule,
                    hint=f"Leave out {option(name)}, or name such a schedule.",
                )
                for name, is_given in given.items()
                if is_given
            ]
        if self.tied and self.stages > 1:
            return [unfit("tied", self.schedule, "where no two stages may share a parameter")]
        if self.predict_weights and self.schedule != STREAM_SCHEDULES[0]:
            return [unfit("predict_weights", self.schedule, "where backward goes by what its forward saw")]
        return []

    @property
    def is_stream(self) -> bool:
        """Whether nothing is flushed: every stage updates its own weights while micro-batches keep coming."""
        return self.schedule in STREAM_SCHEDULES

    @property
    def flushed_schedule(self) -> str:
        """The schedule's name, or that of the one which a schedule without a flush is set beside."""
        return FLUSHED if self.is_stream else self.schedule

    @property
    def num_accumulated(self) -> int:
        """Backwards of a stage between two of its updates, without a flush: as asked, else one update a batch."""
        return self.accumulation or self.microbatches

    @property
    def drains(self) -> Drains:
        """After which steps a pipeline without a flush is drained."""
        num_counted = -(-self.stages // self.microbatches) + 1  # enough to have all in flight that ever is
        return Drains(self.steps, self.evaluation_interval, self._shortest_stream, num_counted)

    @property
    def _shortest_stream(self) -> int:
        return shortest_stream(self.stages, self.microbatches, self.num_accumulated)

    @property
    def model(self) -> ModelConfig:
        """The sizes of the model."""
        return ModelConfig(self.width, self.layers, self.heads, self.sequence_length, self.tied)

    @property
    def has_schedule_file(self) -> bool:
        """Whether the schedule is a file rather than a name."""
        return self.schedule.endswith(".csv")

    @property
    def can_be_resized(self) -> bool:
        """Whether the run may go on with another number of stages: alone, and without a plan made for this one."""
        fixed = self.plan is not None or self.has_schedule_file or self.live_microbatches is not None or self.is_stream
        return not (fixed or self.compare or self.stage_max_ratio)

    @property
    def _num_chunks(self) -> int:
        return default_stages_per_rank(self.flushed_schedule) if self.stages_per_rank is None else self.stages_per_rank

    def sized_schedule(self, num_microbatches: int) -> Schedule:
        """The schedule of that name with so many micro-batches; ValueError where it cannot have these counts.

        Of a schedule without a flush, the one that it is set beside.
        """
        return create_schedule(
            self.flushed_schedule,
            num_ranks=self.stages // self._num_chunks,
            num_microbatches=num_microbatches,
            stages_per_rank=self._num_chunks,
        )

    def num_sequences(self, num_microbatches: int) -> int:
        """Sequences of one step with so many micro-batches, of all replicas together."""
        return num_microbatches * self.microbatch_size * self.data_parallel

    @property
    def batch_size(self) -> int:
        """Sequences of one step of the plain run."""
        return self.num_sequences(self.microbatches)

    @property
    def evaluation_interval(self) -> int:
        """Steps between validations: as asked, else a tenth of the run, but no streams that are mostly drained."""
        return self.evaluate_every or max(self._shortest_stream if self.is_stream else 1, self.steps // 10)

    @property
    def checkpoint_interval(self) -> int:
        """Steps between checkpoints: as asked, else as often as validations."""
        return self.checkpoint_every or self.evaluation_interval

    @property
    def num_fewer_microbatches(self) -> int:
        """Micro-batches of a plain step that sees as many gradients a parameter as the largest cap leaves."""
        caps = dict.fromkeys(range(self.stages), self.max_ratio) | dict(self.stage_max_ratio)
        return fewer_microbatches(self.microbatches, max(caps.values()))

    @property
    def other_mode(self) -> str:
        """The mode that ``compare_modes`` sets beside ``mode``."""
        return next(mode for mode in MODES if mode != self.mode)

    def learning_rate_at(self, step: int) -> float:
        """The rate of a step counted from 1: a linear warm-up, then constant."""
        return self.learning_rate * min(1.0, step / max(1, self.learning_rate_warmup))

    def to_json(self) -> dict[str, Any]:
        """As plain data; ``from_json`` reads it."""
        pairs = [list(pair) for pair in self.stage_max_ratio]
        return {**asdict(self), "text": list(self.text), "stage_max_ratio": pairs}

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
        pairs = tuple((stage, float(ratio)) for stage, ratio in data["stage_max_ratio"])
        return cls(**{**data, "text": tuple(data["text"]), "stage_max_ratio": pairs})

    def differences(self, values: Mapping[str, object]) -> list[str]:
        """Options that differ from ``values`` and may not on resuming, as ``--width: 256 there, 128 here``."""
        return [
            f"{option(f.name)}: {shown(getattr(self, f.name))} there, {shown(values[f.name])} here"
            for f in fields(self)
            if f.name in values and f.name not in FREE_TO_CHANGE and getattr(self, f.name) != values[f.name]
        ]


def unfit(name: str, schedule: str, why: str) -> str:
    """An option that a schedule without a flush cannot take, in the package's error form."""
    hint = f"Leave it out, or take --schedule {FLUSHED}."
    return problem(f"{option(name)} does not go with --schedule {schedule}, {why}", hint=hint)


def option(name: str) -> str:
    """The option as typed: ``sequence_length`` is ``--sequence-length``."""
    return "--no-compare" if name == "compare" else "--" + name.replace("_", "-")


def shown(value: object) -> str:
    """A value as a person would type it.

    >>> shown(((0, 0.2), (3, 0.5))), shown(("a.txt", "b.txt"))
    ('0=0.2,3=0.5', 'a.txt b.txt')
    """
    if not isinstance(value, tuple):
        return str(value)
    if value and isinstance(value[0], tuple):
        return ",".join(f"{stage}={ratio}" for stage, ratio in value)
    return " ".join(map(str, value)) or "default"


def _fits(value: object, name: str, default: object) -> bool:
    if name == "text":
        return isinstance(value, list) and all(isinstance(path, str) for path in value)
    if name == "stage_max_ratio":
        return isinstance(value, list) and all(
            isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and is_number(pair[1]) for pair in value
        )
    if name in _OPTIONAL:
        return value is None or (is_number(value) if _OPTIONAL[name] is float else type(value) is _OPTIONAL[name])
    return is_number(value) if isinstance(default, float) else type(value) is type(default)


_OPTIONAL = {
    "plan": str,
    "target_ms": float,
    "live_microbatches": int,
    "stages_per_rank": int,
    "accumulation": int,
}
