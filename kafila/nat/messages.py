"""Path messages: sealed pings and acks, and nothing else.

    byte 0        0x81: path message, version 1 (kafila/wire.py: 0x80..0xBF are ours, 0x80 is the relay envelope)
    bytes 1..8    sender's NodeId, in clear: it says whose path machine this is for
    bytes 9..20   nonce
    then          sealed with ChaCha20-Poly1305: the plaintext below, and a 16-byte tag; the clear bytes 0..8 are
                  associated data

    plaintext     type u8 | sequence u64 | flags u8 | of u64 | family u8, address 16, port u16 | padding (zeros)

All integers are big-endian. A ping's sequence number is its transaction id; an ack names it in ``of``. The address is,
in a ping, where it was sent (so that a member learns which of its addresses works); in an ack, where the ping was seen
to come from. Family 0 stands for the relay. Sequence numbers rise through a sender's life, which lets the receiver
refuse replays (RFC 4303 section 3.4.3, the sliding window).

The key belongs to one session and one *ordered* pair of members: a message means nothing to anybody else, nor when
reflected to its sender. A ping is never shorter than an ack, so no answer is larger than its request.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kafila.nat.candidates import parse_host
from kafila.types import NODE_ID_BYTES, Address, NodeId

PATH_MESSAGE = 0x81
_CLEAR_BYTES = 1 + NODE_ID_BYTES
_NONCE_BYTES = 12
_TAG_BYTES = 16
_PLAIN = struct.Struct("!BQBQB16sH")
MIN_MESSAGE_BYTES = _CLEAR_BYTES + _NONCE_BYTES + _PLAIN.size + _TAG_BYTES
"""Every ack, and the smallest ping."""
MAX_MESSAGE_BYTES = 65507
"""The largest UDP payload over IPv4."""

_PING = 1
_ACK = 2
_RELAYED = 0
_V4 = 4
_V6 = 6
_MAX_SEQUENCE = 2**64 - 1


class _Flags(IntFlag):
    ACTIVE = 1
    PUNCHING = 2


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there, on this path, at this size?"""

    sequence: int
    to: Address | None
    """Where it was sent; None: through the relay."""
    active: bool = False
    """The sender's bulk data travels this path now."""
    punching: bool = False
    """The sender begins a round of punching: begin one too."""
    size_bytes: int = MIN_MESSAGE_BYTES
    """Of the whole datagram: the padding makes it a path MTU probe."""


@dataclass(frozen=True, slots=True)
class Ack:
    """The ping ``of`` arrived, from ``observed`` (None: through the relay)."""

    sequence: int
    of: int
    observed: Address | None


Message = Ping | Ack


def sender_of(data: bytes) -> NodeId | None:
    """Whose message this claims to be, unproven; None when it is no path message of this version."""
    if len(data) < MIN_MESSAGE_BYTES or data[0] != PATH_MESSAGE:
        return None
    return NodeId(data[1:_CLEAR_BYTES])


@lru_cache(maxsize=1024)  # asked for every message, as candidates' spelling is
def _encode_address(address: Address | None) -> tuple[int, bytes, int]:
    ip = None if address is None else parse_host(address.host)
    if ip is None or address is None:
        return _RELAYED, bytes(16), 0
    return (_V4 if ip.version == 4 else _V6), ip.packed.ljust(16, b"\0"), address.port


@lru_cache(maxsize=1024)  # as above
def _decode_address(family: int, packed: bytes, port: int) -> Address | None:
    if family == _V4:
        return Address(str(IPv4Address(packed[:4])), port)
    return Address(str(IPv6Address(packed)), port)


def _encode(message: Message) -> bytes:
    if isinstance(message, Ping):
        flags = (_Flags.ACTIVE if message.active else 0) | (_Flags.PUNCHING if message.punching else 0)
        plain = _PLAIN.pack(_PING, message.sequence, flags, 0, *_encode_address(message.to))
        return plain + bytes(message.size_bytes - MIN_MESSAGE_BYTES)
    return _PLAIN.pack(_ACK, message.sequence, 0, message.of, *_encode_address(message.observed))


def _decode(plain: bytes, size_bytes: int) -> Message | None:
    kind, sequence, flags, of, family, packed, port = _PLAIN.unpack_from(plain)
    if family not in {_RELAYED, _V4, _V6}:
        return None
    address = None if family == _RELAYED else _decode_address(family, packed, port)
    if kind == _PING:
        active, punching = bool(flags & _Flags.ACTIVE), bool(flags & _Flags.PUNCHING)
        return Ping(sequence, address, active, punching, size_bytes)
    if kind == _ACK and size_bytes == MIN_MESSAGE_BYTES:
        return Ack(sequence, of, address)
    return None


def _pair_key(link_key: bytes, sender: NodeId, recipient: NodeId) -> bytes:
    info = b"kafila path message v1" + sender + recipient
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(link_key)


class Sealer:
    """Seals and opens the path messages between ``me`` and ``peer`` under the session's link key."""

    def __init__(self, link_key: bytes, me: NodeId, peer: NodeId, randbytes: Callable[[int], bytes]) -> None:
        self._out = ChaCha20Poly1305(_pair_key(link_key, me, peer))
        self._in = ChaCha20Poly1305(_pair_key(link_key, peer, me))
        self._header = bytes((PATH_MESSAGE,)) + me
        self._expected = bytes((PATH_MESSAGE,)) + peer
        self._randbytes = randbytes

    def seal(self, message: Message) -> bytes:
        """The datagram for ``message``: ``size_bytes`` of a ping, :data:`MIN_MESSAGE_BYTES` of an ack."""
        nonce = self._randbytes(_NONCE_BYTES)
        return self._header + nonce + self._out.encrypt(nonce, _encode(message), self._header)

    def open(self, data: bytes) -> Message | None:
        """The peer's message, or None for anything that is not one, whole and unaltered."""
        if not MIN_MESSAGE_BYTES <= len(data) <= MAX_MESSAGE_BYTES or data[:_CLEAR_BYTES] != self._expected:
            return None
        nonce = data[_CLEAR_BYTES : _CLEAR_BYTES + _NONCE_BYTES]
        try:
            plain = self._in.decrypt(nonce, data[_CLEAR_BYTES + _NONCE_BYTES :], self._expected)
        except InvalidTag:
            return None
        return _decode(plain, len(data))


class ReplayWindow:
    """Accepts each sequence number once, and none that is further behind the newest than the window is wide."""

    WIDTH = 1024
    """About five seconds of the most that a peer may send (100 probes and as many acks a second): wider than any
    reordering worth waiting for."""

    def __init__(self) -> None:
        self._newest = -1
        self._seen = 0  # bit n: newest - n has been accepted

    def accept(self, sequence: int) -> bool:
        """Whether ``sequence`` is new; it is not the next time."""
        ahead = sequence - self._newest
        if ahead > 0:
            self._seen = ((self._seen << min(ahead, self.WIDTH)) | 1) & ((1 << self.WIDTH) - 1)
            self._newest = sequence
            return True
        if -ahead >= self.WIDTH or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


def first_sequence(now: float) -> int:
    """Where to start counting: behind no earlier machine of the same process, so that one made anew for the same pair
    is not taken for a replay. A million a second is far more than a peer sends."""
    return min(int(max(now, 0.0) * 1_000_000), _MAX_SEQUENCE // 2)
