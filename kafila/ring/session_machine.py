"""What the host's and a member's session machines share (pure): the two queues, the ring once there is one, the end."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from kafila.ring.agreement import (
    MemberInfo,
    Reachable,
    SessionMessage,
)
from kafila.ring.steps import (
    Ended,
    Event,
    Moved,
    Outgoing,
)
from kafila.types import NodeId

MAX_MEMBERS = 64
"""More than a trusted group has machines; a bound on what strangers with the locator could make the host remember."""


class State(Enum):
    """Where a session stands, for either role."""

    KNOCKING = auto()
    GATHERING = auto()
    MEASURING = auto()
    WAITING = auto()
    BUILDING = auto()
    SERVING = auto()
    OVER = auto()


class Machine:
    """What both roles share: the two queues, the ring once there is one, and the end."""

    def __init__(self, state: State, me: MemberInfo) -> None:
        self.state = state
        self._me = me
        self._ring: tuple[MemberInfo, ...] = ()
        self._guests: dict[NodeId, MemberInfo] = {}
        """At the head those it is linked with, at the host all."""
        self._outgoing: deque[Outgoing] = deque()
        self._events: deque[Event] = deque()

    def next_message(self) -> Outgoing | None:
        """A message to seal and send, or None."""
        return self._outgoing.popleft() if self._outgoing else None

    def next_event(self) -> Event | None:
        """Something to act on, or None."""
        return self._events.popleft() if self._events else None

    def _send(self, to: NodeId, message: SessionMessage) -> None:
        self._outgoing.append(Outgoing(to, message))

    def _over(self, ended: Ended) -> None:
        if self.state is not State.OVER:
            self.state = State.OVER
            self._events.append(ended)

    @property
    def _neighbours(self) -> dict[NodeId, MemberInfo]:
        """Whom this one is linked with, in their own words of where they are: the members before and after it in the
        ring, at the head its guests, too, at a guest the head."""
        ids = [info.node_id for info in self._ring]
        if self._me.node_id not in ids:
            return dict(zip(ids[:1], self._ring[:1], strict=True))
        place = ids.index(self._me.node_id)
        beside = (self._ring[place - 1], self._ring[(place + 1) % len(ids)])
        linked = {info.node_id: info for info in beside if info.node_id != self._me.node_id}
        return linked | (self._guests if place == 0 else {})

    def reachable(self, reachable: Reachable) -> None:
        """This member is reached so from now on; told to whom it concerns, if it is news."""
        moved = self._me.moved(reachable)
        if self.state is not State.OVER and moved != self._me:
            self._me = moved
            for node in self._whom_it_concerns():
                self._send(node, reachable)

    def _whom_it_concerns(self) -> list[NodeId]:
        return list(self._neighbours)

    def _moved(self, sender: NodeId, reachable: Reachable) -> None:
        """A member says where it is: news to act on if it is a ring neighbour."""
        self._ring = tuple(info.moved(reachable) if info.node_id == sender else info for info in self._ring)
        if sender in self._guests:
            self._guests[sender] = self._guests[sender].moved(reachable)
        if (neighbour := self._neighbours.get(sender)) is not None:
            self._events.append(Moved(neighbour))
