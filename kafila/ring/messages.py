"""Messages on a byte stream: a four-byte big-endian length, then that many bytes (pure)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from kafila.errors import ProtocolError

MAX_MESSAGE_BYTES = 64 * 2**20
"""The largest message: a prefill chunk of 4,096 positions at hidden size 8,192 in bfloat16 is exactly this, and a peer
can make us hold at most this much of an unfinished message on each stream."""

_LENGTH = struct.Struct(">I")


def frame_message(message: bytes) -> bytes:
    """``message`` with its length before it. Raises ProtocolError over ``MAX_MESSAGE_BYTES``."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(message)} bytes is over the limit of {MAX_MESSAGE_BYTES}: split it")
    return _LENGTH.pack(len(message)) + message


class MessageReader:
    """Cuts one stream's bytes back into messages."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._buffer = bytearray()
        self._limit = max_message_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that ``data`` completes, in order. Raises ProtocolError at a length over the limit, as soon as
        the length is read, so an oversized message is never gathered."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if length > self._limit:
                raise ProtocolError(f"the peer announced a message of {length} bytes, over {self._limit}")
            stop = _LENGTH.size + length
            if len(buffer) < stop:
                return
            with memoryview(buffer) as view:
                message = bytes(view[_LENGTH.size : stop])
            del buffer[:stop]
            yield message
