"""When a member asks whether its rendezvous is there, and when silence means that it is not (pure)."""

from __future__ import annotations

from typing import Protocol

PING_S = 15.0
PING_SPREAD_S = 3.0
"""DESIGN section 5: NAT mappings live 30 s at the worst that is common (RFC 4787 REQ-5 asks for 120)."""
RELAYING_PING_S = 1.0
"""While the relay carries a link its loss must be known soon: relayed links resume within 2 s of a restart."""
RELAYING_FOR_S = 30.0
"""How long the relay counts as in use after a datagram. Links send keepalives more often than this."""
PATIENCE_S = 0.75
_PATIENCE_RTTS = 3
"""How long after a ping nothing may be heard before the rendezvous counts as lost: two retransmissions at 100 ms."""


class Uniform(Protocol):
    """What is needed of a ``random.Random``."""

    def uniform(self, a: float, b: float, /) -> float:
        """A number between ``a`` and ``b``."""
        ...


class Pulse:
    """Beats from :meth:`rest` on; at :attr:`due`, ping (:meth:`asked`) or, if already :attr:`waiting`, give up."""

    def __init__(self, random: Uniform) -> None:
        self.due = 0.0
        self.waiting = False
        """Whether a ping is out and nothing has been heard since."""
        self._random = random
        self._relayed_at: float | None = None

    def relaying(self, now: float) -> bool:
        """Whether the relay carries a link."""
        return self._relayed_at is not None and now - self._relayed_at < RELAYING_FOR_S

    def rest(self, now: float) -> None:
        """All is well: no ping for an interval."""
        spread = self._random.uniform(-PING_SPREAD_S, PING_SPREAD_S)
        self.due = now + (RELAYING_PING_S if self.relaying(now) else PING_S + spread)
        self.waiting = False

    def asked(self, now: float, rtt_s: float) -> None:
        """A ping was sent."""
        self.due = now + max(PATIENCE_S, _PATIENCE_RTTS * rtt_s)
        self.waiting = True

    def heard(self, now: float) -> None:
        """Something authentic came."""
        if self.waiting:
            self.rest(now)

    def relayed(self, now: float) -> None:
        """A link's datagram went or came through the relay."""
        if not self.relaying(now) and not self.waiting:
            self.due = min(self.due, now + RELAYING_PING_S)
        self._relayed_at = now
