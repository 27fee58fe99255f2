"""STUN Binding messages: the part of RFC 8489 and RFC 5780 that finds out what a NAT does.

:func:`decode` never raises: what is not a well-formed Binding message is ``None``. :func:`encode` can fill a request up
to a size, because a server of ours answers nobody with more bytes than it was asked with.

    0                   1                   2                   3
    |0 0|  message type (14 bits)  |         length of attributes         |
    |                    magic cookie 0x2112A442                          |
    |                    transaction id (96 bits)                         |
    |  attribute type   |  length  |  value, padded to a multiple of four |  ...
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from ipaddress import ip_address

from kafila.types import Address
from kafila.wire import STUN_MAGIC_COOKIE

HEADER_BYTES = 20
REQUEST_BYTES = 120
"""What a request of ours is filled to: the largest reply, three IPv6 addresses, a NONCE and a FINGERPRINT."""
TRANSACTION_ID_BYTES = 12
_FINGERPRINT_BYTES = 8
_FINGERPRINT_XOR = 0x5354554E  # "STUN", RFC 8489 section 14.7
_SOFTWARE_MAX_CHARACTERS = 127  # "fewer than 128", RFC 8489 section 14.14
_COMPREHENSION_OPTIONAL = 0x8000  # RFC 8489 section 14


class MessageClass(Enum):
    """The class of a Binding message; the value is the whole 14-bit type (RFC 8489 section 5)."""

    REQUEST = 0x0001
    INDICATION = 0x0011
    SUCCESS = 0x0101
    ERROR = 0x0111


class Attribute(IntEnum):
    """The attributes we read and write (RFC 8489 section 18.3, RFC 5780 section 9.1)."""

    MAPPED_ADDRESS = 0x0001
    CHANGE_REQUEST = 0x0003
    ERROR_CODE = 0x0009
    UNKNOWN_ATTRIBUTES = 0x000A
    NONCE = 0x0015
    XOR_MAPPED_ADDRESS = 0x0020
    PADDING = 0x0026
    SOFTWARE = 0x8022
    FINGERPRINT = 0x8028
    RESPONSE_ORIGIN = 0x802B
    OTHER_ADDRESS = 0x802C


@dataclass(frozen=True, slots=True)
class Change:
    """CHANGE-REQUEST: from where the reply shall come, against where the request went (RFC 5780 section 7.2)."""

    address: bool
    port: bool


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """ERROR-CODE: 300 to 699, and the phrase for people (RFC 8489 section 14.8)."""

    code: int
    reason: str


BAD_REQUEST = ErrorCode(400, "Bad Request")
UNKNOWN_ATTRIBUTE = ErrorCode(420, "Unknown Attribute")
STALE_NONCE = ErrorCode(438, "Stale Nonce")


@dataclass(frozen=True, slots=True)
class StunMessage:
    """One Binding message. An attribute that is absent is ``None``, empty or zero."""

    kind: MessageClass
    transaction_id: bytes
    """Twelve bytes."""
    mapped_address: Address | None = None
    xor_mapped_address: Address | None = None
    response_origin: Address | None = None
    other_address: Address | None = None
    change: Change | None = None
    error: ErrorCode | None = None
    unknown_attributes: tuple[int, ...] = ()
    """What the other side said it did not understand."""
    nonce: bytes = b""
    software: str = ""
    padding_bytes: int = 0
    not_understood: tuple[int, ...] = ()
    """Types of comprehension-required attributes this side does not know. Filled by :func:`decode` alone."""

    @property
    def reflexive(self) -> Address | None:
        """The sender's address as the server saw it. The XORed form goes first: some NATs rewrite the plain one."""
        return self.xor_mapped_address or self.mapped_address


def binding_request(transaction_id: bytes, *, change: Change | None = None, nonce: bytes = b"") -> bytes:
    """A request that leaves room for the largest reply of our own server."""
    request = StunMessage(MessageClass.REQUEST, transaction_id, change=change, nonce=nonce)
    return encode(request, at_least_bytes=REQUEST_BYTES)


def encode(message: StunMessage, *, at_least_bytes: int = 0) -> bytes:
    """``message`` as a datagram, with FINGERPRINT, filled with SOFTWARE to ``at_least_bytes`` as far as it goes.

    SOFTWARE is the filler because every server must accept it, whereas PADDING asks an RFC 5780 server for padding in
    return and is refused by others as an unknown attribute. Raises ValueError for a host that is no IP literal.
    """
    attributes = _encode_attributes(message)
    missing = at_least_bytes - HEADER_BYTES - len(attributes) - _FINGERPRINT_BYTES
    if missing > 0 and not message.software:
        filler = min(max(missing - 4, 0), _SOFTWARE_MAX_CHARACTERS)
        attributes += _attribute(Attribute.SOFTWARE, b"kafila".ljust(filler)[:filler])
    header = (
        message.kind.value.to_bytes(2, "big")
        + (len(attributes) + _FINGERPRINT_BYTES).to_bytes(2, "big")
        + STUN_MAGIC_COOKIE
        + message.transaction_id
    )
    return header + attributes + _attribute(Attribute.FINGERPRINT, _fingerprint(header + attributes))


def decode(data: bytes) -> StunMessage | None:
    """The Binding message in ``data``; ``None`` for anything else, a wrong FINGERPRINT included."""
    if len(data) < HEADER_BYTES or data[4:8] != STUN_MAGIC_COOKIE:
        return None
    if int.from_bytes(data[2:4], "big") != len(data) - HEADER_BYTES or len(data) % 4:
        return None
    try:
        kind = MessageClass(int.from_bytes(data[0:2], "big"))
        values, not_understood = _split(data)
        fields = {_FIELDS[kind_]: _PARSERS[kind_](value, data[4:20]) for kind_, value in values.items()}
    except ValueError:
        return None
    return StunMessage(kind, data[8:20], not_understood=not_understood, **fields)  # type: ignore[arg-type]  # _FIELDS names each parser's field


def _split(data: bytes) -> tuple[dict[Attribute, bytes], tuple[int, ...]]:
    """The known attributes, the first of each kind (RFC 8489 section 14), and the required ones we do not know."""
    values: dict[Attribute, bytes] = {}
    not_understood: list[int] = []
    at = HEADER_BYTES
    while at < len(data):
        number = int.from_bytes(data[at : at + 2], "big")
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        value = data[at + 4 : at + 4 + length]
        if len(value) != length:
            raise ValueError("attribute runs past the end")
        if number == Attribute.FINGERPRINT:
            if data[at + 4 :] != _fingerprint(data[:at]):
                raise ValueError("FINGERPRINT is wrong or not last")
            break
        if number in _FIELDS:
            values.setdefault(Attribute(number), value)
        elif number < _COMPREHENSION_OPTIONAL:
            not_understood.append(number)
        at += 4 + length + (-length) % 4
    return values, tuple(not_understood)


def _encode_attributes(message: StunMessage) -> bytes:
    mask = STUN_MAGIC_COOKIE + message.transaction_id
    parts: list[tuple[Attribute, bytes]] = []
    if message.mapped_address is not None:
        parts.append((Attribute.MAPPED_ADDRESS, _pack_address(message.mapped_address)))
    if message.xor_mapped_address is not None:
        parts.append((Attribute.XOR_MAPPED_ADDRESS, _xor(_pack_address(message.xor_mapped_address), mask)))
    if message.response_origin is not None:
        parts.append((Attribute.RESPONSE_ORIGIN, _pack_address(message.response_origin)))
    if message.other_address is not None:
        parts.append((Attribute.OTHER_ADDRESS, _pack_address(message.other_address)))
    if message.change is not None:
        parts.append((Attribute.CHANGE_REQUEST, _pack_change(message.change)))
    if message.error is not None:
        parts.append((Attribute.ERROR_CODE, _pack_error(message.error)))
    if message.unknown_attributes:
        numbers = b"".join(number.to_bytes(2, "big") for number in message.unknown_attributes)
        parts.append((Attribute.UNKNOWN_ATTRIBUTES, numbers))
    if message.nonce:
        parts.append((Attribute.NONCE, message.nonce))
    if message.software:
        parts.append((Attribute.SOFTWARE, message.software[:_SOFTWARE_MAX_CHARACTERS].encode()))
    if message.padding_bytes:
        parts.append((Attribute.PADDING, bytes(message.padding_bytes)))
    return b"".join(_attribute(kind, value) for kind, value in parts)


def _attribute(kind: Attribute, value: bytes) -> bytes:
    return kind.to_bytes(2, "big") + len(value).to_bytes(2, "big") + value + bytes(-len(value) % 4)


def _fingerprint(before: bytes) -> bytes:
    """The value of FINGERPRINT behind ``before``, whose length field already counts it (RFC 8489 section 14.7)."""
    length = len(before) - HEADER_BYTES + _FINGERPRINT_BYTES
    counted = before[:2] + (length & 0xFFFF).to_bytes(2, "big") + before[4:]
    return (zlib.crc32(counted) ^ _FINGERPRINT_XOR).to_bytes(4, "big")


def _pack_address(address: Address) -> bytes:
    host = ip_address(address.host)
    return bytes((0, 1 if host.version == 4 else 2)) + address.port.to_bytes(2, "big") + host.packed


def _parse_address(value: bytes, _mask: bytes) -> Address:
    size = {1: 4, 2: 16}.get(value[1] if len(value) > 4 else 0)
    if size is None or len(value) != 4 + size:
        raise ValueError("not an address attribute")
    return Address(str(ip_address(value[4:])), int.from_bytes(value[2:4], "big"))


def _xor(packed: bytes, mask: bytes) -> bytes:
    """XOR the port with the first two and the host with the first four or sixteen bytes of cookie + transaction id."""
    covered = mask[:2] + mask
    return packed[:2] + bytes(a ^ b for a, b in zip(packed[2:], covered, strict=False))


def _parse_xor_address(value: bytes, mask: bytes) -> Address:
    return _parse_address(_xor(value, mask), mask)


def _pack_change(change: Change) -> bytes:
    return (change.address << 2 | change.port << 1).to_bytes(4, "big")


def _parse_change(value: bytes, _mask: bytes) -> Change:
    if len(value) != 4:
        raise ValueError("CHANGE-REQUEST has four bytes")
    return Change(address=bool(value[3] & 4), port=bool(value[3] & 2))


def _pack_error(error: ErrorCode) -> bytes:
    return bytes((0, 0, error.code // 100, error.code % 100)) + error.reason.encode()


def _parse_error(value: bytes, _mask: bytes) -> ErrorCode:
    if len(value) < 4 or not 3 <= value[2] & 7 <= 6 or value[3] > 99:
        raise ValueError("not an ERROR-CODE")
    return ErrorCode((value[2] & 7) * 100 + value[3], value[4:].decode(errors="replace"))


def _parse_numbers(value: bytes, _mask: bytes) -> tuple[int, ...]:
    if len(value) % 2:
        raise ValueError("UNKNOWN-ATTRIBUTES is a list of 16-bit numbers")
    return tuple(int.from_bytes(value[at : at + 2], "big") for at in range(0, len(value), 2))


def _parse_text(value: bytes, _mask: bytes) -> str:
    return value.decode(errors="replace")


def _parse_bytes(value: bytes, _mask: bytes) -> bytes:
    return value


def _parse_length(value: bytes, _mask: bytes) -> int:
    return len(value)


_PARSERS: dict[Attribute, Callable[[bytes, bytes], object]] = {
    Attribute.MAPPED_ADDRESS: _parse_address,
    Attribute.XOR_MAPPED_ADDRESS: _parse_xor_address,
    Attribute.RESPONSE_ORIGIN: _parse_address,
    Attribute.OTHER_ADDRESS: _parse_address,
    Attribute.CHANGE_REQUEST: _parse_change,
    Attribute.ERROR_CODE: _parse_error,
    Attribute.UNKNOWN_ATTRIBUTES: _parse_numbers,
    Attribute.NONCE: _parse_bytes,
    Attribute.SOFTWARE: _parse_text,
    Attribute.PADDING: _parse_length,
}
_FIELDS = {
    Attribute.MAPPED_ADDRESS: "mapped_address",
    Attribute.XOR_MAPPED_ADDRESS: "xor_mapped_address",
    Attribute.RESPONSE_ORIGIN: "response_origin",
    Attribute.OTHER_ADDRESS: "other_address",
    Attribute.CHANGE_REQUEST: "change",
    Attribute.ERROR_CODE: "error",
    Attribute.UNKNOWN_ATTRIBUTES: "unknown_attributes",
    Attribute.NONCE: "nonce",
    Attribute.SOFTWARE: "software",
    Attribute.PADDING: "padding_bytes",
}
