"""The path through the relay, which always exists: its round trip and datagram size, kept warm until it is needed."""

from __future__ import annotations

from kafila.nat.candidates import Scope
from kafila.nat.messages import MIN_MESSAGE_BYTES
from kafila.nat.mtu import RELAY_BASE_BYTES, MtuSearch
from kafila.nat.schedule import RoundTrip
from kafila.wire import RELAY_OVERHEAD_BYTES

_FIRST_PINGS_S = (0.0, 0.3, 1.0, 2.0, 4.0)
"""Until the first ack: the peer may learn of us a moment after we learn of it. Through the relay nothing has to be
punched, so there is no use in more."""


class RelayedPath:
    """Sizes here are of the datagram inside the envelope, as QUIC counts them."""

    def __init__(self, now: float) -> None:
        self.round_trip = RoundTrip()
        self.mtu = MtuSearch(Scope.WIDE, RELAY_BASE_BYTES)
        self.sent_at: float | None = None
        self.acked_at: float | None = None
        self._began_at = now
        self._first = 0
        self._next_at = now

    @property
    def max_datagram_bytes(self) -> int:
        """What fits into an envelope; never less than QUIC's 1200, for the relay is all there is."""
        return max(self.mtu.confirmed_bytes, RELAY_BASE_BYTES) - RELAY_OVERHEAD_BYTES

    def wake(self, now: float) -> None:
        """Ping at once: a round of punching begins, and the peer should begin one too."""
        self._next_at = now

    def acked(self, size_bytes: int, generation: int, sample_s: float, now: float, keepalive_s: float) -> None:
        """A ping of ``size_bytes``, sent ``sample_s`` ago, was acked."""
        if self.acked_at is None:
            self.mtu.presume(now)
        self.round_trip.measured(sample_s)
        self.mtu.acked(size_bytes + RELAY_OVERHEAD_BYTES, generation, now)
        self.acked_at = now
        self._next_at = now + keepalive_s

    def due_at(self) -> float:
        """When :meth:`take` next has something to send."""
        searching = self.mtu.due_at()
        return self._next_at if searching is None else min(self._next_at, searching)

    def take(self, now: float, keepalive_s: float) -> list[int]:
        """The sizes of the pings to send now, in bytes inside the envelope."""
        sizes = [size - RELAY_OVERHEAD_BYTES for size in self.mtu.take(now, self.round_trip.pto_s)]
        if now >= self._next_at:
            sizes.append(MIN_MESSAGE_BYTES)
            self._next_at = now + keepalive_s
            if self.acked_at is None and self._first + 1 < len(_FIRST_PINGS_S):
                self._first += 1
                self._next_at = max(self._began_at + _FIRST_PINGS_S[self._first], now + 0.1)
        return sizes
