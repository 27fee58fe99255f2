"""Who is in which session: what the rendezvous remembers, and what each request makes it say (pure).

Connections are known here by a number that the service gives them, and members by the id that their certificate proves.

    a connection  asks              and becomes
    stranger      Create            host: the session is new, or was opened by the same identity before
    stranger      Join              member: the session lives, has a free seat, and has not put this identity out
    stranger      Restore           member; a session that is not known is taken up again as described
    any member    Send              passed on to the member named, or to all others
    host          Evict             the member named is a stranger again, for ever
    any member    goes              a stranger; the others hear how
    replaced      (same identity registers over a newer connection) stranger, and nobody else hears of it

A session lives as long as it has a member. Every other request is answered by Refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kafila.errors import ProtocolError
from kafila.ring.control import (
    Create,
    Departure,
    Evict,
    Join,
    Joined,
    MemberJoined,
    MemberLeft,
    Reason,
    Refused,
    Restore,
    Send,
    Signal,
    ToMember,
)
from kafila.types import Address, NodeId

MAX_EVICTED = 256
"""Identities that a session remembers having put out. A host that evicts more is under attack; the newest count."""


class Delivery(NamedTuple):
    """Say ``message`` on a connection."""

    connection: int
    message: ToMember


class Caller(NamedTuple):
    """Who asks: a connection and what is proven about it."""

    connection: int
    node: NodeId
    fingerprint: bytes
    observed: Address


class Membership(NamedTuple):
    """A member's place in its session."""

    locator: str
    node: NodeId


@dataclass(slots=True)
class _Session:
    host: NodeId
    seats: int
    greeting: bytes
    members: dict[NodeId, Caller] = field(default_factory=dict)
    evicted: dict[NodeId, None] = field(default_factory=dict)

    @property
    def has_room(self) -> bool:
        """Whether somebody who is not the host may sit down: the host's own seat is kept for it."""
        others = len(self.members) - (self.host in self.members)
        return others < self.seats - 1


class Registry:
    """All sessions of one rendezvous."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._memberships: dict[int, Membership] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def membership(self, connection: int) -> Membership | None:
        """Where the member on ``connection`` belongs; ``None`` for a stranger."""
        return self._memberships.get(connection)

    def register(self, caller: Caller, request: Create | Join | Restore) -> list[Delivery]:
        """Let a stranger in, or refuse. Raises ProtocolError where ``caller`` is a member already."""
        if caller.connection in self._memberships:
            raise ProtocolError("one connection registers once")
        session = self._sessions.get(request.locator)
        if session is not None:
            reason = _refusal(caller, request, session)
            if reason is not None:
                return [Delivery(caller.connection, Refused(reason))]
            if isinstance(request, Create):
                session.seats, session.greeting = request.seats, request.greeting
        elif isinstance(request, Join):
            return [Delivery(caller.connection, Refused(Reason.UNKNOWN_SESSION))]
        else:
            host = caller.node if isinstance(request, Create) else request.host
            session = self._sessions[request.locator] = _Session(host, request.seats, request.greeting)
        return self._seat(caller, request.locator, session)

    def send(self, connection: int, request: Send) -> list[Delivery]:
        """Pass a sealed message on. Raises ProtocolError for a stranger."""
        membership, session = self._place(connection)
        signal = Signal(membership.node, request.sealed)
        if request.to is None:
            return [Delivery(other.connection, signal) for other in _others(session, membership.node)]
        addressee = session.members.get(request.to)
        return [Delivery(addressee.connection, signal)] if addressee else []

    def evict(self, connection: int, request: Evict) -> list[Delivery]:
        """Put a member out. Raises ProtocolError for anybody but the session's host."""
        membership, session = self._place(connection)
        if membership.node != session.host or request.member == session.host:
            raise ProtocolError("only the host evicts, and never itself")
        session.evicted[request.member] = None
        if len(session.evicted) > MAX_EVICTED:
            del session.evicted[next(iter(session.evicted))]
        evicted = session.members.get(request.member)
        if evicted is None:
            return []
        refusal = Delivery(evicted.connection, Refused(Reason.EVICTED))
        return [refusal, *self.gone(evicted.connection, Departure.EVICTED)]

    def gone(self, connection: int, how: Departure) -> list[Delivery]:
        """The member on ``connection`` is none any more; a stranger's going changes nothing."""
        membership = self._memberships.pop(connection, None)
        if membership is None:
            return []
        session = self._sessions[membership.locator]
        del session.members[membership.node]
        if not session.members:
            del self._sessions[membership.locator]
        left = MemberLeft(membership.node, how)
        return [Delivery(other.connection, left) for other in session.members.values()]

    def _seat(self, caller: Caller, locator: str, session: _Session) -> list[Delivery]:
        said: list[Delivery] = []
        replaced = session.members.get(caller.node)
        if replaced is not None:
            del self._memberships[replaced.connection]
            said.append(Delivery(replaced.connection, Refused(Reason.REPLACED)))
        session.members[caller.node] = caller
        self._memberships[caller.connection] = Membership(locator, caller.node)
        others = list(_others(session, caller.node))
        roster = tuple(other.node for other in others)
        joined = Joined(session.host, session.seats, session.greeting, roster, caller.observed)
        said.append(Delivery(caller.connection, joined))
        if replaced is None:
            said.extend(Delivery(other.connection, MemberJoined(caller.node)) for other in others)
        return said

    def _place(self, connection: int) -> tuple[Membership, _Session]:
        membership = self._memberships.get(connection)
        if membership is None:
            raise ProtocolError("only a member of a session may ask that")
        return membership, self._sessions[membership.locator]


def _refusal(caller: Caller, request: Create | Join | Restore, session: _Session) -> Reason | None:
    """Why ``caller`` may not enter ``session``, if so."""
    if isinstance(request, Create) and session.host != caller.node:
        return Reason.LOCATOR_TAKEN
    if caller.node in session.evicted:
        return Reason.EVICTED
    here = session.members.get(caller.node)
    if here is not None:
        # Two certificates with one id: the later of them was ground for it.
        return None if here.fingerprint == caller.fingerprint else Reason.EVICTED
    return None if caller.node == session.host or session.has_room else Reason.FULL


def _others(session: _Session, node: NodeId) -> list[Caller]:
    return [member for member in session.members.values() if member.node != node]
