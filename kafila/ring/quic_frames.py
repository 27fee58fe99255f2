"""The two frames that ordinary packets are made of, in the one shape that is written here (pure codec).

ACK (RFC 9000 section 19.3) of one range, and STREAM (section 19.8) with offset and length, without FIN. Their integers
are as long as they can be (section 16 allows that), so that one call packs or unpacks a frame. Eight bytes have the top
bits 11, four 10, two 01, one 00.

    ACK:     0x02 | largest number (8 bytes) | delay (4) | 0 further ranges (1) | first range (8)
    STREAM:  0x0e | stream id, under 64 (1) | offset (8) | length (2) | data
"""

from __future__ import annotations

import struct

from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # its home; re-exported without saying so
from aioquic.quic.packet import pull_ack_frame
from aioquic.quic.rangeset import RangeSet

ACK = 0x02
_ACK_FRAME = struct.Struct(">BQIBQ")
ACK_BYTES = _ACK_FRAME.size
_STREAM = 0x08 | 0x04 | 0x02
_STREAM_HEADER = struct.Struct(">BBQH")
STREAM_HEADER_BYTES = _STREAM_HEADER.size

_EIGHT_BYTES = 0b11 << 62
_FOUR_BYTES = 0b10 << 30
_TWO_BYTES = 0b01 << 14
_MOST_IN_EIGHT = (1 << 62) - 1
_MOST_IN_FOUR = (1 << 30) - 1
_MOST_IN_TWO = (1 << 14) - 1


def ack_frame(numbers: range, delay: int) -> bytes:
    """Acknowledges ``numbers``; ``delay`` is scaled by the exponent of its sender, and cut where it cannot be told."""
    largest = numbers.stop - 1
    delay = min(max(delay, 0), _MOST_IN_FOUR)
    return _ACK_FRAME.pack(ACK, _EIGHT_BYTES | largest, _FOUR_BYTES | delay, 0, _EIGHT_BYTES | largest - numbers.start)


def read_ack(payload: bytes) -> tuple[RangeSet, int, int]:
    """Of a payload that begins with an ACK, of whatever shape: the numbers, the delay as it is scaled, and where the
    frame ends. Raises ValueError where it is damaged or cut short."""
    if len(payload) >= ACK_BYTES:
        _, largest, delay, further, first = _ACK_FRAME.unpack_from(payload)
        largest, delay, first = largest ^ _EIGHT_BYTES, delay ^ _FOUR_BYTES, first ^ _EIGHT_BYTES
        if first <= largest <= _MOST_IN_EIGHT and delay <= _MOST_IN_FOUR and not further:
            return RangeSet([range(largest - first, largest + 1)]), delay, ACK_BYTES
    buffer = Buffer(data=payload)
    buffer.seek(1)
    acknowledged, delay = pull_ack_frame(buffer)
    return acknowledged, delay, buffer.tell()


def stream_header(stream_id: int, offset: int, size: int) -> bytes:
    """What goes before ``size`` bytes of a stream."""
    return _STREAM_HEADER.pack(_STREAM, stream_id, _EIGHT_BYTES | offset, _TWO_BYTES | size)


def read_stream_header(payload: bytes, at: int) -> tuple[int, int, int] | None:
    """Stream id, offset and size of the STREAM frame that begins at ``at``; None for a frame of any other shape. Raises
    struct.error where there are not as many bytes."""
    kind, stream_id, offset, size = _STREAM_HEADER.unpack_from(payload, at)
    offset, size = offset ^ _EIGHT_BYTES, size ^ _TWO_BYTES
    if kind != _STREAM or offset > _MOST_IN_EIGHT or size > _MOST_IN_TWO:
        return None
    return stream_id, offset, size
