"""What a link says of itself to its owner."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Stream(IntEnum):
    """Two long-lived streams each way, so that small messages never wait behind tensors."""

    CONTROL = 0
    BULK = 1


@dataclass(frozen=True, slots=True)
class Established:
    """The handshake is done and the peer holds the key of the certificate with this fingerprint (32 bytes)."""

    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Message:
    """One whole message of the peer's."""

    stream: Stream
    data: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection is over; no event follows. ``reason`` is one line, fit for a terminal."""

    reason: str
    by_peer: bool


Event = Established | Message | Closed
