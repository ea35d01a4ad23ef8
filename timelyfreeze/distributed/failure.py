"""What went wrong on a rank, as text that other ranks can read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from timelyfreeze.errors import problem

KINDS = ("stage", "call", "lost", "stopped", "timeout")
MAX_DETAIL_BYTES = 64 * 1024
MAX_TEXT_BYTES = 4 * 1024


def cut_middle(text: str, max_bytes: int) -> str:
    """The text in at most ``max_bytes`` of UTF-8 and a short line: a long one keeps its head and its tail.

    >>> cut_middle("short", 100)
    'short'
    >>> cut_middle("a" * 50 + "b" * 50, 10)
    'aaaaa\\n[90 bytes left out]\\nbbbbb'
    """
    encoded = text.encode("utf-8", "backslashreplace")  # lone surrogates cannot be sent as they are
    if len(encoded) <= max_bytes:
        return encoded.decode()
    half = max_bytes // 2
    head, tail = encoded[:half].decode(errors="ignore"), encoded[-half:].decode(errors="ignore")
    return f"{head}\n[{len(encoded) - 2 * half} bytes left out]\n{tail}"


@dataclass(frozen=True)
class Failure:
    """A rank's failure. It travels as JSON, never as a pickle, and its texts are cut to bounded lengths.

    Attributes:
        kind: ``"stage"`` (user code raised), ``"call"`` (a call failed elsewhere: wrong arguments),
            ``"lost"`` (a rank's connection broke, or it does not answer),
            ``"stopped"`` (Ctrl-C, SystemExit, closed) or ``"timeout"``.
        rank: the rank that failed, not the one that reports; -1 where it is not known.
        text: one line, such as ``"RuntimeError: boom"``.
        detail: the traceback.
        stage, action, step: where it happened, if that is known; ``action`` as text, such as ``"1F2"``.
        call: the number of the call that failed, counted alike on all ranks.
        reporter: the rank that reported it; -1 until it is reported.

    >>> failure = Failure("stage", rank=1, text="RuntimeError: boom", stage=1, action="1F2", step=7)
    >>> Failure.from_json(failure.to_json()) == failure
    True
    """

    kind: str
    rank: int
    text: str
    detail: str = ""
    stage: int | None = None
    action: str | None = None
    step: int | None = None
    call: int = 0
    reporter: int = -1

    def to_json(self) -> str:
        """One line of JSON with every attribute."""
        action = None if self.action is None else cut_middle(self.action, MAX_TEXT_BYTES)
        short = replace(
            self,
            text=cut_middle(self.text, MAX_TEXT_BYTES),
            detail=cut_middle(self.detail, MAX_DETAIL_BYTES),
            action=action,
        )
        return json.dumps(asdict(short), ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> Failure:
        """The failure that ``to_json`` wrote.

        Raises:
            ValueError: it is not such a text.
        """
        try:
            values = json.loads(text)
            failure = Failure(**values)
        except (ValueError, TypeError) as error:
            raise ValueError(problem("a failure's JSON", expected="what to_json writes", got=error)) from error
        optional = (failure.stage, failure.step)
        fits = (
            failure.kind in KINDS
            and all(isinstance(number, int) for number in (failure.rank, failure.call, failure.reporter))
            and all(isinstance(words, str) for words in (failure.text, failure.detail))
            and all(number is None or isinstance(number, int) for number in optional)
            and (failure.action is None or isinstance(failure.action, str))
        )
        if not fits:
            got = cut_middle(repr(values), 200)
            raise ValueError(problem("a failure's JSON", expected=f"kind in {KINDS}, numbers and text", got=got))
        return failure
