"""What a rank can be asked to do: one kind of work, for one micro-batch, in one stage."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from timelyfreeze.errors import problem


class Kind(str, Enum):
    """The kinds of work, with the letters that torch.distributed.pipelining uses for them.

    >>> Kind("B").name, str(Kind.F)
    ('B', 'F')
    """

    F = "F"  # forward
    B = "B"  # full backward: input gradient and weight gradient
    I = "I"  # input gradient only (the letter is torch's)
    W = "W"  # weight gradient only

    # Enum hashes by name in Python code; str's own hash is in C. Planning looks actions up thousands of times.
    __hash__ = str.__hash__

    def __str__(self) -> str:
        return self.value


_PATTERN = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")


class Action(NamedTuple):
    """One unit of work, written ``{stage}{kind}{micro-batch}`` as torch.distributed.pipelining writes it.

    >>> str(Action(0, Kind.F, 1))
    '0F1'
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action from its text form; ValueError if it is not one.

        >>> Action.parse("2B13")
        Action(stage=2, kind=<Kind.B: 'B'>, microbatch=13)
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                problem(
                    "not an action",
                    expected="{stage}{F|B|I|W}{micro-batch}, such as 0F1",
                    got=repr(text[:40]),
                )
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))
