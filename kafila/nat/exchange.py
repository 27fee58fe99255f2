"""The traffic of pings and acks with one peer: numbered, sealed, matched, limited, never replayed."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from kafila.nat.messages import Ack, Message, Ping, ReplayWindow, Sealer, first_sequence
from kafila.nat.schedule import MAX_PROBES_PER_S, Randomness, RateLimit
from kafila.types import Address, NodeId

MAX_OUTSTANDING = 512
"""Pings remembered until acked: five seconds of the most that are sent; older ones no longer matter."""
MAX_OUTBOX = 256
"""Messages not yet fetched: about a second of the most pings and acks, so that only a driver that never fetches them
loses any."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One path message to send."""

    data: bytes
    to: Address | None
    """None: through the relay."""
    socket: int = 0
    """Which of the machine's sockets it leaves from; 0 is the one that carries everything."""


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A ping that was sent and may yet be acked."""

    to: Address | None
    sent_at: float
    idle_s: float
    """How long nothing had left on that path before it."""
    size_bytes: int
    generation: int
    """Of the path's MTU search."""
    socket: int


class Exchange:
    """Sends and receives path messages; knows nothing of paths."""

    def __init__(self, me: NodeId, peer: NodeId, link_key: bytes, now: float, random: Randomness) -> None:
        self._sealer = Sealer(link_key, me, peer, random.randbytes)
        self._sequence = first_sequence(now)
        self._window = ReplayWindow()
        self._outstanding: OrderedDict[int, Outstanding] = OrderedDict()
        self._pings = RateLimit(MAX_PROBES_PER_S)
        self._acks = RateLimit(MAX_PROBES_PER_S)
        self._outbox: deque[Probe] = deque(maxlen=MAX_OUTBOX)

    def open(self, data: bytes) -> Message | None:
        """The peer's message, unless it is not one or came before."""
        message = self._sealer.open(data)
        if message is None or not self._window.accept(message.sequence):
            return None
        return message

    def may_ping_at(self) -> float:
        """From when on another ping is within the limit."""
        return self._pings.ready_at()

    def ping(self, ping: Outstanding, *, active: bool = False, punching: bool = False) -> bool:
        """Queue one ping; whether the limit allowed it."""
        if not self._pings.take(ping.sent_at):
            return False
        self._sequence += 1
        self._outstanding[self._sequence] = ping
        if len(self._outstanding) > MAX_OUTSTANDING:
            self._outstanding.popitem(last=False)
        message = Ping(self._sequence, ping.to, active, punching, ping.size_bytes)
        self._outbox.append(Probe(self._sealer.seal(message), ping.to, ping.socket))
        return True

    def acknowledge(
        self, ping: Ping, source: Address | None, routes: list[tuple[Address | None, int]], now: float
    ) -> None:
        """Queue an ack of ``ping``, seen to come from ``source``, over each of ``routes`` (address, socket)."""
        if not self._acks.take(now):
            return
        for to, socket in routes:
            self._sequence += 1
            self._outbox.append(Probe(self._sealer.seal(Ack(self._sequence, ping.sequence, source)), to, socket))

    def match(self, ack: Ack) -> Outstanding | None:
        """The ping that ``ack`` answers, the first time only."""
        return self._outstanding.pop(ack.of, None)

    def forget(self) -> None:
        """Acks of what was sent so far no longer mean anything."""
        self._outstanding.clear()

    def take(self) -> list[Probe]:
        """What is queued, oldest first."""
        taken = list(self._outbox)
        self._outbox.clear()
        return taken
