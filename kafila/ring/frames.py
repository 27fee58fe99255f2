"""What ring neighbours say to each other over a link (pure codec).

Three shapes. An :class:`Activation` is a binary frame on the bulk stream: a ragged batch of hidden rows on its way
round the ring. :class:`Scores` are another: what the last member found in its rows of the vocabulary, behind the
activation that asked for it. Everything else is a small JSON object on the control stream, routed forward round the
ring until it reaches the member it is for: a question to the head, text back to whoever asked.

    activation:  0x01, or 0x04 where scores are asked for
                 | dtype u8 | segments u16 | hops u8 | epoch u32 | batch u32 | hidden u32
                 | segments x (slot u16, start u32, length u32, flags u8) | hops x (stage_us u32) | numbers
    control:     0x02 | UTF-8 JSON object with a "kind"
    scores:      0x05 | epoch u32 | count u16 | batch u32 | count x (logit f32, token u32)

0x03 is ``ring/parts.py``'s. An activation's header names the dtype, so a link need not assume the model's. A frame that
is not exactly as long as its header says, or that names no rows, is refused where it enters: what comes in over a link
is checked here, once.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar

from kafila.errors import ProtocolError
from kafila.ring import records
from kafila.types import Best, FinishReason, NodeId, PathKind, Question, Segment, SpelledLogprobs

_ACTIVATION = 0x01
_CONTROL = 0x02
_SCORED_ACTIVATION = 0x04
_SCORES = 0x05
_HEADER = struct.Struct("!BBHBIII")
_SEGMENT = struct.Struct("!HIIB")
_SCORES_HEADER = struct.Struct("!BIHI")
_BEST = struct.Struct("!fI")
_FLAG_SAMPLE = 0x01

_DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}
_DTYPE_NAMES = {code: name for name, code in _DTYPE_CODES.items()}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

MAX_SEGMENTS = 1024
"""More requests in one batch than any plan reserves slots for."""
MAX_ROWS = 65_536
"""Tokens in one frame: far above a prefill chunk, far below what would exhaust a receiver."""


@dataclass(frozen=True, slots=True)
class Activation:
    """Hidden rows of one ragged batch.

    ``payload`` holds ``sum(segment.length) x hidden`` numbers of ``dtype``, row-major, little-endian. ``hop_us`` lists
    the stage time of every member passed so far, in microseconds, so the head sees the whole circuit. The last member
    may send each segment's last row alone (:data:`kafila.ring.agreement.LAST_ROWS`).
    """

    epoch: int
    batch: int
    dtype: str
    hidden: int
    segments: tuple[Segment, ...]
    payload: bytes
    hop_us: tuple[int, ...] = ()
    score: bool = False
    """The last member also scores its rows of the vocabulary, for each segment that wants a token. Stays on all the way
    round; only where every member knows it (:data:`kafila.ring.agreement.SCORES`)."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The best of the last member's rows of the vocabulary, one for each segment of a batch that wants a token."""

    epoch: int
    batch: int
    best: tuple[Best, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """A question on its way to the head. ``request`` is unique in the session: the asker's id and a counter."""

    kind: ClassVar[str] = "ask"
    request: str
    asker: NodeId
    question: Question


@dataclass(frozen=True, slots=True)
class Text:
    """Part of an answer on its way to its asker; the last one has a ``finish``, and the counts and times in full."""

    kind: ClassVar[str] = "text"
    request: str
    asker: NodeId
    delta: str
    finish: FinishReason | None = None
    note: str = ""
    """For people: why the answer ended as it did, or the asker's place in the queue."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Tokens at the front of the prompt that were in the cache already."""
    answer_tokens: int = 0
    """So far, the one that ended the answer left out."""
    queue_s: float = 0.0
    """From the question to its place in the cache."""
    prefill_s: float = 0.0
    """From there to the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""
    logprobs: tuple[SpelledLogprobs, ...] = ()
    """Of the tokens behind ``delta``, where they were asked for. A token whose text is still withheld (part of a
    character, perhaps of a stop string) may come before its text."""
    left_out: int = 0
    """Messages of the conversation that were left out so that it fits, where the question allowed that."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """The asker no longer wants the answer."""

    kind: ClassVar[str] = "cancel"
    request: str
    asker: NodeId


@dataclass(frozen=True, slots=True)
class Stats:
    """What the head saw lately, for every member's ``/ring``; goes once round and stops where it began."""

    kind: ClassVar[str] = "stats"
    origin: NodeId
    stage_s: tuple[float, ...]
    """Median of the last stage times, by ring position beginning at the head."""
    circuit_s: float
    running: int = 0
    """Answers that hold a slot."""
    waiting: int = 0
    """Questions in the queue."""
    tokens: int = 0
    """Tokens drawn since the session began."""


@dataclass(frozen=True, slots=True)
class Edge:
    """How the link from ``origin`` to the next member travels, as that sees it now; goes once round like
    :class:`Stats`. Sent only to members that know it (:data:`kafila.ring.agreement.EDGES`)."""

    kind: ClassVar[str] = "edge"
    origin: NodeId
    path: PathKind
    rtt_s: float | None = None
    """Smoothed round trip; None: not known yet."""


Control = Ask | Text | Cancel | Stats | Edge
_FAMILY = records.kinds(Ask, Text, Cancel, Stats, Edge)


def encode_activation(frame: Activation) -> bytes:
    """The frame's bytes."""
    parts = [
        _HEADER.pack(
            _SCORED_ACTIVATION if frame.score else _ACTIVATION,
            _DTYPE_CODES[frame.dtype],
            len(frame.segments),
            len(frame.hop_us),
            frame.epoch,
            frame.batch,
            frame.hidden,
        )
    ]
    parts += [_SEGMENT.pack(s.slot, s.start, s.length, _FLAG_SAMPLE * s.sample) for s in frame.segments]
    parts.append(struct.pack(f"!{len(frame.hop_us)}I", *frame.hop_us))
    parts.append(frame.payload)
    return b"".join(parts)


def decode_activation(data: bytes) -> Activation:
    """The frame in ``data``. Raises ProtocolError for anything :func:`encode_activation` would not write."""
    if len(data) < _HEADER.size or data[0] not in {_ACTIVATION, _SCORED_ACTIVATION}:
        raise ProtocolError("an activation frame is cut short or is none")
    _, dtype_code, segment_count, hop_count, epoch, batch, hidden = _HEADER.unpack_from(data)
    dtype = _DTYPE_NAMES.get(dtype_code)
    if dtype is None:
        raise ProtocolError(f"an activation frame names the unknown number type {dtype_code}")
    if not 0 < segment_count <= MAX_SEGMENTS or hidden == 0:
        raise ProtocolError("an activation frame names no rows or too many requests")
    hops_at = _HEADER.size + segment_count * _SEGMENT.size
    payload_at = hops_at + 4 * hop_count
    if len(data) < payload_at:
        raise ProtocolError("an activation frame is cut short")
    segments = tuple(
        Segment(slot, start, length, bool(flags & _FLAG_SAMPLE))
        for slot, start, length, flags in _SEGMENT.iter_unpack(data[_HEADER.size : hops_at])
    )
    rows = sum(segment.length for segment in segments)
    if not all(segment.length for segment in segments) or rows > MAX_ROWS:
        raise ProtocolError("an activation frame has an empty request or too many rows")
    if len(data) - payload_at != rows * hidden * ITEM_BYTES[dtype]:
        raise ProtocolError("an activation frame is not as long as its header says")
    hop_us = struct.unpack_from(f"!{hop_count}I", data, hops_at)
    return Activation(epoch, batch, dtype, hidden, segments, data[payload_at:], hop_us, data[0] == _SCORED_ACTIVATION)


def is_scores(data: bytes) -> bool:
    """Whether a message of the bulk stream is meant as :class:`Scores`."""
    return data[:1] == bytes((_SCORES,))


def encode_scores(scores: Scores) -> bytes:
    """The frame's bytes."""
    header = _SCORES_HEADER.pack(_SCORES, scores.epoch, len(scores.best), scores.batch)
    return b"".join([header, *(_BEST.pack(best.logit, best.token) for best in scores.best)])


def decode_scores(data: bytes) -> Scores:
    """The frame in ``data``. Raises ProtocolError for anything :func:`encode_scores` would not write."""
    if len(data) < _SCORES_HEADER.size or not is_scores(data):
        raise ProtocolError("scores are cut short or are none")
    _, epoch, count, batch = _SCORES_HEADER.unpack_from(data)
    if not 0 < count <= MAX_SEGMENTS or len(data) != _SCORES_HEADER.size + count * _BEST.size:
        raise ProtocolError("scores are for no request or too many, or not as long as their header says")
    best = tuple(map(Best._make, _BEST.iter_unpack(data[_SCORES_HEADER.size :])))
    if not all(math.isfinite(one.logit) for one in best):
        raise ProtocolError("a score is no number")
    return Scores(epoch, batch, best)


def encode_control(message: Control) -> bytes:
    """The message's bytes."""
    return bytes((_CONTROL,)) + records.encode(message)


def decode_control(data: bytes) -> Control:
    """The message in ``data``. Raises ProtocolError for anything that is not exactly one of :data:`Control`."""
    if data[:1] != bytes((_CONTROL,)):
        raise ProtocolError("a control message begins with the wrong byte")
    message: Control = records.decode(data[1:], _FAMILY, "a control message")
    return message
