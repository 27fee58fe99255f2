"""What linked members say to each other to pass on parts of a checkpoint's files (pure codec).

On a link's bulk stream, beside activations, which begin with another byte:

    want:    0x03 | 0x01 | number u32 | start u64 | end u64 | size u64 | layout (32 bytes, zeros: none)
             | file u8 + UTF-8 | etag u16 + UTF-8 | revision u8 + UTF-8
    piece:   0x03 | 0x02 | number u32 | start u64 | size u64 | SHA-256 of the data | etag u16 + UTF-8 | data
    refuse:  0x03 | 0x03 | number u32 | why u8

``number`` is the asker's own and comes back. A file is named, never a path: what a name may mean is for the holder to
say (``shard/held.py``), who knows the names of one checkpoint's files and looks for no other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256

from kafila.errors import ProtocolError
from kafila.types import FilePart, FilePiece, Withheld

PARTS_KIND = 0x03
"""The first byte of all of them."""
MAX_PIECE_BYTES = 512 * 2**10
"""A link is never longer than this from being free for an answer's rows: 40 ms at 100 Mbit/s."""
MAX_NAME_BYTES = 255
MAX_ETAG_BYTES = 1024
LAYOUT_BYTES = 32
_WANT, _PIECE, _REFUSE = 1, 2, 3
_HEAD = struct.Struct("!BBI")
_WANTED = struct.Struct(f"!QQQ{LAYOUT_BYTES}s")
_GIVEN = struct.Struct("!QQ32s")
_NO_LAYOUT = bytes(LAYOUT_BYTES)
_REASONS = {reason.value: reason for reason in Withheld}


@dataclass(frozen=True, slots=True)
class Want:
    """Give me this."""

    number: int
    part: FilePart


@dataclass(frozen=True, slots=True)
class Piece:
    """Here it is, or its beginning. ``digest`` is the holder's SHA-256 of the data as it read them."""

    number: int
    piece: FilePiece
    digest: bytes

    @property
    def whole(self) -> bool:
        """Whether the data are what the holder read."""
        return sha256(self.piece.data).digest() == self.digest


@dataclass(frozen=True, slots=True)
class Refuse:
    """Not from me."""

    number: int
    why: Withheld


Parts = Want | Piece | Refuse


def is_parts(data: bytes) -> bool:
    """Whether a message of a link's is one of these."""
    return data[:1] == bytes((PARTS_KIND,))


def encode_parts(message: Parts) -> bytes:
    """The message's bytes."""
    match message:
        case Want(number, part):
            return b"".join(
                (
                    _HEAD.pack(PARTS_KIND, _WANT, number),
                    _WANTED.pack(part.start, part.end, part.size, part.layout or _NO_LAYOUT),
                    _text(part.file, 1, MAX_NAME_BYTES),
                    _text(part.etag, 2, MAX_ETAG_BYTES),
                    _text(part.revision, 1, MAX_NAME_BYTES),
                )
            )
        case Piece(number, piece, digest):
            head = _HEAD.pack(PARTS_KIND, _PIECE, number) + _GIVEN.pack(piece.start, piece.size, digest)
            return head + _text(piece.etag, 2, MAX_ETAG_BYTES) + piece.data
        case Refuse(number, why):
            return _HEAD.pack(PARTS_KIND, _REFUSE, number) + bytes((why.value,))


def decode_parts(data: bytes) -> Parts:
    """The message in ``data``. Raises ProtocolError for anything :func:`encode_parts` would not write."""
    try:
        mark, kind, number = _HEAD.unpack_from(data)
        if mark == PARTS_KIND and kind == _WANT:
            return _read_want(number, data, _HEAD.size)
        if mark == PARTS_KIND and kind == _PIECE:
            return _read_piece(number, data, _HEAD.size)
        if mark == PARTS_KIND and kind == _REFUSE:
            return _read_refuse(number, data, _HEAD.size)
    except (struct.error, LookupError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a message about files cannot be read ({type(error).__name__})") from error
    raise ProtocolError("a message about files begins with the wrong bytes")


def _read_want(number: int, data: bytes, at: int) -> Want:
    start, end, size, layout = _WANTED.unpack_from(data, at)
    file, at = _read_text(data, at + _WANTED.size, 1, MAX_NAME_BYTES)
    etag, at = _read_text(data, at, 2, MAX_ETAG_BYTES)
    revision, at = _read_text(data, at, 1, MAX_NAME_BYTES)
    if at != len(data) or not start < end or not file:
        raise ProtocolError("a wish for a part of a file names no part, or holds more than that")
    return Want(number, FilePart(file, start, end, size, etag, revision, b"" if layout == _NO_LAYOUT else layout))


def _read_piece(number: int, data: bytes, at: int) -> Piece:
    start, size, digest = _GIVEN.unpack_from(data, at)
    etag, at = _read_text(data, at + _GIVEN.size, 2, MAX_ETAG_BYTES)
    count = len(data) - at
    if count > MAX_PIECE_BYTES or start + count > size:
        raise ProtocolError("a part of a file is longer than allowed, or than its file")
    return Piece(number, FilePiece(start, size, etag, data[at:]), digest)


def _read_refuse(number: int, data: bytes, at: int) -> Refuse:
    if len(data) != at + 1:
        raise ProtocolError("a refusal is not as long as it should be")
    return Refuse(number, _REASONS[data[at]])


def _text(text: str, length_bytes: int, most: int) -> bytes:
    data = text.encode("utf-8", "replace")
    if len(data) > most:
        raise ProtocolError(f"{text[:40]!r}... is longer than the {most} bytes that a message about files has for it")
    return len(data).to_bytes(length_bytes) + data


def _read_text(data: bytes, at: int, length_bytes: int, most: int) -> tuple[str, int]:
    begin = at + length_bytes
    if len(data) < begin:
        raise ProtocolError("a message about files is cut short")
    stop = begin + int.from_bytes(data[at:begin])
    if stop > len(data) or stop - begin > most:
        raise ProtocolError("a message about files is cut short, or a name in it is too long")
    return data[begin:stop].decode(), stop
