"""PCP messages (RFC 6887), client side, MAP only: how a gateway of today is asked to open a port, on UDP port 5351.

| 2 | R opcode | reserved / result | lifetime (32) | client address (128) / epoch (32), reserved (96) |
| nonce (96) | protocol | reserved (24) | internal port | external port | external address (128) |
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv6Address, ip_address

from kafila.types import Address

VERSION = 2
NONCE_BYTES = 12
_MAP = 1
_RESPONSE = 0x80
_UDP = 17
_REQUEST_HEAD = struct.Struct("!BBxxI16s")  # RFC 6887 section 7.1
_RESPONSE_HEAD = struct.Struct("!BBxBII12x")  # RFC 6887 section 7.2
_MAP_BODY = struct.Struct("!12sB3xHH16s")  # RFC 6887 section 11.1
_MAX_BYTES = 1100  # RFC 6887 section 7


class Result(IntEnum):
    """The result codes a client reacts to (RFC 6887 section 7.4)."""

    SUCCESS = 0
    UNSUPPORTED_VERSION = 1
    NOT_AUTHORIZED = 2
    ADDRESS_MISMATCH = 12


@dataclass(frozen=True, slots=True)
class MapResponse:
    """The answer to :func:`map_request`; ``result`` is one of :class:`Result` or another error's number.

    Of an error that is shorter than a MAP response only ``result``, ``lifetime_s`` and ``epoch_s`` are known.
    """

    result: int
    lifetime_s: int
    epoch_s: int
    nonce: bytes = b""
    internal_port: int = 0
    external: Address | None = None


def map_request(
    client_host: str, nonce: bytes, internal_port: int, suggested: Address | None, lifetime_s: int
) -> bytes:
    """Ask for a UDP port; lifetime 0 gives it back (RFC 6887 section 15).

    ``client_host`` is the source address of the request as the gateway sees it, ``nonce`` twelve bytes that stay with
    the mapping. Raises ValueError for a host that is no IP literal.
    """
    suggested = suggested or Address("0.0.0.0", 0)  # noqa: S104  - the protocol's word for "any"
    head = _REQUEST_HEAD.pack(VERSION, _MAP, lifetime_s, _as_v6(client_host))
    return head + _MAP_BODY.pack(nonce, _UDP, internal_port, suggested.port, _as_v6(suggested.host))


def decode_response(data: bytes) -> MapResponse | None:
    """A MAP response, or an error in answer to one; ``None`` for anything else."""
    if not _RESPONSE_HEAD.size <= len(data) <= _MAX_BYTES:
        return None
    version, opcode, result, lifetime_s, epoch_s = _RESPONSE_HEAD.unpack_from(data)
    if version != VERSION or opcode != _RESPONSE | _MAP:
        return None
    if len(data) < _RESPONSE_HEAD.size + _MAP_BODY.size:
        return MapResponse(result, lifetime_s, epoch_s) if result else None
    nonce, protocol, internal_port, port, host = _MAP_BODY.unpack_from(data, _RESPONSE_HEAD.size)
    if protocol != _UDP:
        return None
    return MapResponse(result, lifetime_s, epoch_s, nonce, internal_port, Address(_from_v6(host), port))


def _as_v6(host: str) -> bytes:
    """An address as PCP writes it: IPv4 as IPv4-mapped IPv6 (RFC 6887 section 5)."""
    ip = ip_address(host)
    return ip.packed if isinstance(ip, IPv6Address) else bytes(10) + b"\xff\xff" + ip.packed


def _from_v6(packed: bytes) -> str:
    ip = IPv6Address(packed)
    return str(ip.ipv4_mapped or ip)
