"""NAT-PMP messages (RFC 6886), client side: what older and Apple-made gateways speak on UDP port 5351.

request   | 0 | opcode |  ...                                    opcode 0: external address, 1: map UDP
response  | 0 | opcode + 128 | result (16) | epoch (32) | ...
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address

VERSION = 0
_RESPONSE = 0x80
_HEAD = struct.Struct("!BBHI")
_MAP_REQUEST = struct.Struct("!BBxxHHI")  # RFC 6886 section 3.3
_MAP_RESPONSE = struct.Struct("!HHI")


class Opcode(IntEnum):
    """What is asked (RFC 6886 sections 3.2 and 3.3)."""

    EXTERNAL_ADDRESS = 0
    MAP_UDP = 1


@dataclass(frozen=True, slots=True)
class ExternalAddress:
    """The answer to :func:`external_address_request`. ``host`` counts only where ``result`` is 0."""

    result: int
    epoch_s: int
    host: str


@dataclass(frozen=True, slots=True)
class Mapped:
    """The answer to :func:`map_request`. The ports and the lifetime (seconds) count only where ``result`` is 0."""

    result: int
    epoch_s: int
    internal_port: int
    external_port: int
    lifetime_s: int


def external_address_request() -> bytes:
    """Ask for the gateway's external address."""
    return bytes((VERSION, Opcode.EXTERNAL_ADDRESS))


def map_request(internal_port: int, suggested_port: int, lifetime_s: int) -> bytes:
    """Ask for a UDP port; lifetime 0 (and then port 0) gives it back (RFC 6886 section 3.4)."""
    return _MAP_REQUEST.pack(VERSION, Opcode.MAP_UDP, internal_port, suggested_port, lifetime_s)


def decode_response(data: bytes) -> ExternalAddress | Mapped | None:
    """A response of ours; ``None`` for anything else. An error may come without the fields behind its head."""
    if len(data) < _HEAD.size:
        return None
    version, opcode, result, epoch_s = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if version != VERSION:
        return None
    if opcode == _RESPONSE | Opcode.EXTERNAL_ADDRESS and (len(body) == 4 or result):
        return ExternalAddress(result, epoch_s, str(IPv4Address(body[:4].ljust(4, b"\0"))))
    if opcode == _RESPONSE | Opcode.MAP_UDP and (len(body) == _MAP_RESPONSE.size or result):
        return Mapped(
            result, epoch_s, *_MAP_RESPONSE.unpack(body[: _MAP_RESPONSE.size].ljust(_MAP_RESPONSE.size, b"\0"))
        )
    return None
