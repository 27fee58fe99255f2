"""The first byte decides what a datagram is (after RFC 9443), and the relay envelope.

    00xxxxxx  STUN, when the magic cookie stands at bytes 4..8 (RFC 8489 section 5)
    x1xxxxxx  QUIC (RFC 9000 section 17: the fixed bit)
    0x80..0xBF  Kafila's own: 0x80 relay envelope, 0x82 a link's early words, the rest path messages

A relay envelope is what a member sends to the rendezvous and the rendezvous to a member: one kind byte, the other
member's id (the addressee on the way in, the sender on the way out), then the ciphertext datagram, untouched. It is the
same length both ways, so the relay never amplifies.
"""

from __future__ import annotations

from enum import Enum

from kafila.types import NODE_ID_BYTES, NodeId

RELAY_KIND = 0x80
EARLY_KIND = 0x82
RELAY_OVERHEAD_BYTES = 1 + NODE_ID_BYTES
STUN_MAGIC_COOKIE = b"\x21\x12\xa4\x42"
_STUN_HEADER_BYTES = 20


class Kind(Enum):
    """What a datagram is."""

    STUN = "stun"
    QUIC = "quic"
    PATH = "path"
    EARLY = "early"
    RELAY = "relay"
    UNKNOWN = "unknown"


def classify(data: bytes) -> Kind:
    """What a datagram is by its first byte; empty or unassigned ones are ``UNKNOWN`` (counted and dropped)."""
    if not data:
        return Kind.UNKNOWN
    first = data[0]
    if first & 0x40:
        return Kind.QUIC
    if first == RELAY_KIND:
        return Kind.RELAY if len(data) > RELAY_OVERHEAD_BYTES else Kind.UNKNOWN
    if first == EARLY_KIND:
        return Kind.EARLY
    if first & 0x80:
        return Kind.PATH
    if len(data) >= _STUN_HEADER_BYTES and data[4:8] == STUN_MAGIC_COOKIE:
        return Kind.STUN
    return Kind.UNKNOWN


def wrap_relay(other: NodeId, datagram: bytes) -> bytes:
    """``datagram`` in an envelope: ``other`` is the addressee towards the relay, the sender from it."""
    return bytes((RELAY_KIND,)) + other + datagram


def unwrap_relay(data: bytes) -> tuple[NodeId, bytes]:
    """The other member and the datagram inside. Call it only for what :func:`classify` calls ``RELAY``."""
    return NodeId(data[1:RELAY_OVERHEAD_BYTES]), data[RELAY_OVERHEAD_BYTES:]
