"""Messages on a byte stream: a four-byte big-endian length, then that many bytes (pure)."""

from __future__ import annotations

import struct

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
        self._awaited = _LENGTH.size  # bytes without which nothing more can be said

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that ``data`` completes, in order. Raises ProtocolError at a length over the limit, as soon as
        the length is read, so an oversized message is never gathered."""
        buffer = self._buffer
        buffer += data
        messages: list[bytes] = []
        while len(buffer) >= self._awaited:
            (length,) = _LENGTH.unpack_from(buffer)
            if length > self._limit:
                raise ProtocolError(f"the peer announced a message of {length} bytes, over {self._limit}")
            self._awaited = stop = _LENGTH.size + length
            if len(buffer) >= stop:
                with memoryview(buffer) as view:
                    messages.append(bytes(view[_LENGTH.size : stop]))
                del buffer[:stop]
                self._awaited = _LENGTH.size
        return messages
