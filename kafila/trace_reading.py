"""A trace read again: each plan with the batches that went round under it.

Traces come from other machines and from killed processes. What is not one is refused with the line that shows it; a
last line without its end is what a killed node leaves, and is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kafila.errors import ProtocolError, TraceError
from kafila.plan import Plan

MAX_BYTES = 1 << 30
"""A week of decoding; what is larger is no trace."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch's way round."""

    rows: int
    decode: bool
    stage_s: tuple[float, ...]
    """Measured, by ring position."""
    circuit_s: float
    hop_bytes: int | None
    """Of its rows; None in traces of older versions."""
    back_bytes: int | None
    """Of those that the last member sent back to the head: all of them where that is not said."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer."""

    answer_tokens: int
    first_token_s: float
    rest_s: float


@dataclass(slots=True)
class Epoch:
    """A plan and what happened under it."""

    plan: Plan
    batches: list[Batch] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    """By neighbour: how its link's datagrams went last."""


@dataclass(frozen=True, slots=True)
class Trace:
    """All of a file."""

    epochs: tuple[Epoch, ...]
    cut: bool
    """Whether the last line lacked its end."""


def read_trace(path: Path) -> Trace:
    """The trace in ``path``. Raises TraceError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TraceError(f"{path} is too large for a trace")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise TraceError(f"{path} is no trace: it is not text") from error
    whole, _, rest = text.rpartition("\n")
    epochs = _epochs(path, whole.split("\n") if whole else [])
    if not epochs:
        what = "it ends before" if text.startswith('{"at_s":') else "it is no trace, or of a session that never came to"
        raise TraceError(f"{path} holds no plan: {what} one; write one with kafila-node --trace FILE")
    return Trace(tuple(epochs), bool(rest))


def _epochs(path: Path, lines: Iterable[str]) -> list[Epoch]:
    epochs: list[Epoch] = []
    early: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            what = record["what"]
            _number(record["at_s"])
            if what == "plan":
                epochs.append(Epoch(Plan.from_json(record["plan"]), paths=early))
            elif what == "path" and "kind" in record:
                (epochs[-1].paths if epochs else early)[_text(record["member"])] = _text(record["kind"])
            elif epochs:
                _take(epochs[-1], what, record)
        except (ValueError, KeyError, TypeError, RecursionError, ProtocolError) as error:
            raise TraceError(f"{path} is no trace, or damaged: line {number} cannot be read") from error
    return epochs


def _take(epoch: Epoch, what: str, record: dict[str, Any]) -> None:
    if what == "batch":
        stages = tuple(map(_number, record["stage_s"]))
        if len(stages) != len(epoch.plan.stages):
            raise ValueError("another ring's batch")
        hop_bytes = record.get("hop_bytes")
        back_bytes = hop_bytes if record.get("back_bytes") is None else record["back_bytes"]
        epoch.batches.append(
            Batch(
                rows=_whole(record["rows"]),
                decode={"decode": True, "prefill": False}[record["phase"]],
                stage_s=stages,
                circuit_s=_number(record["circuit_s"]),
                hop_bytes=None if hop_bytes is None else _whole(hop_bytes),
                back_bytes=None if back_bytes is None else _whole(back_bytes),
            )
        )
    elif what == "answer":
        numbers = (_number(record["first_token_s"]), _number(record["rest_s"]))
        epoch.answers.append(Answer(_whole(record["answer_tokens"]), *numbers))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise TypeError("expected a time")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError("expected a whole number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value
