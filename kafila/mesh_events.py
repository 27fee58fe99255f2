"""What a mesh tells its owner of its links."""

from __future__ import annotations

from dataclasses import dataclass

from kafila.nat import events as path_events
from kafila.ring.rendezvous_client import Event as ControlEvent
from kafila.types import NodeId, PathKind, Transmit


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The peer is authenticated; messages queued before are on their way. Its own first ones may have come before this
    (``ring/early.py``)."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """One whole message of the peer's."""

    peer: NodeId
    bulk: bool
    data: bytes


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link is over and forgotten. ``reason`` is the peer's own where it closed."""

    peer: NodeId
    reason: str
    by_peer: bool


@dataclass(frozen=True, slots=True)
class PathNews:
    """Something happened to the way to a peer; ``str(news)`` is a line for people."""

    peer: NodeId
    news: path_events.Event


Event = LinkUp | LinkMessage | LinkDown | PathNews | ControlEvent


@dataclass(frozen=True, slots=True)
class LinkState:
    """A link as people are shown it."""

    kind: PathKind
    rtt_s: float | None


@dataclass(frozen=True, slots=True)
class Extra:
    """A datagram that leaves from one of a peer's extra sockets, numbered from 1."""

    peer: NodeId
    number: int
    transmit: Transmit
