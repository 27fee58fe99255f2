"""What the rendezvous says to a member outside QUIC: relay envelopes from nobody (pure codec).

    UNKNOWN    "I know nobody at your address": a relay envelope came from no registered member. After a restart of the
               rendezvous, or when a NAT moved the member, that is how it learns to speak up at once.
    CHALLENGE  "do you receive here?": the member's packets came from a new address. The nonce goes only there, and
               comes back inside the member's connection (``control.Confirm``).

Anybody can forge a notice, so a member does no more on one than ask the rendezvous over its connection. Neither is
longer than what provokes it: an envelope has at least 10 bytes, which UNKNOWN has; CHALLENGE has 26, and a QUIC packet
that proves anything at least 29 (flags 1, connection id 8, what header protection samples 4 + 16: RFC 9001, 5.4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from kafila.types import NODE_ID_BYTES, NodeId
from kafila.wire import unwrap_relay, wrap_relay

NOBODY = NodeId(bytes(NODE_ID_BYTES))
NONCE_BYTES = 16
_UNKNOWN = b"\0"
_CHALLENGE = b"\1"


@dataclass(frozen=True, slots=True)
class Unknown:
    """No registered member has the address that an envelope came from."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """Return ``nonce`` inside the connection."""

    nonce: bytes


def encode_notice(notice: Unknown | Challenge) -> bytes:
    """The datagram."""
    return wrap_relay(NOBODY, _UNKNOWN if isinstance(notice, Unknown) else _CHALLENGE + notice.nonce)


def decode_notice(envelope: bytes) -> Unknown | Challenge | None:
    """The notice in what ``wire.classify`` calls a relay envelope; ``None``: it is somebody's datagram, or none."""
    sender, body = unwrap_relay(envelope)
    if sender != NOBODY:
        return None
    if body == _UNKNOWN:
        return Unknown()
    if body[:1] == _CHALLENGE and len(body) == 1 + NONCE_BYTES:
        return Challenge(body[1:])
    return None
