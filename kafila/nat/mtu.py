"""How large a datagram gets through one path in one direction (after RFC 8899, DPLPMTUD).

    CONFIRM   the base size must be acked before the path may carry bulk at all
    SEARCH    every larger size at once; the largest acked one counts; the rest are tried again, then given up
    SETTLED   nothing to send, until it is time to look for more
    VERIFY    the confirmed size again, while data flows: a path that has narrowed lets pings through and eats data

Sizes are bytes of UDP payload.
"""

from __future__ import annotations

from enum import Enum

from kafila.nat.candidates import Scope
from kafila.wire import RELAY_OVERHEAD_BYTES

BASE_BYTES = 1200
"""What QUIC asks of any path (RFC 9000 section 14)."""
RELAY_BASE_BYTES = BASE_BYTES + RELAY_OVERHEAD_BYTES
"""The same inside a relay envelope."""
WIDE_SIZES_BYTES = (1232, 1280, 1372, 1452, 1472)
"""Payloads of: the IPv6 minimum MTU of 1280; 1280 over tunnels that count otherwise; a 1420-byte VPN; Ethernet over
IPv6; Ethernet over IPv4."""
LAN_SIZES_BYTES = (*WIDE_SIZES_BYTES, 8952)
"""And jumbo frames of 9000 bytes, over IPv6 (which fit IPv4 too)."""
LOOPBACK_SIZES_BYTES = (*LAN_SIZES_BYTES, 16336)
"""And the 16384-byte loopback MTU of macOS, over IPv6; Linux has 65536, but a QUIC long header counts to 16383."""

_RETRY_AT_LEAST_S = 0.1
_TRIES = {"CONFIRM": 8, "SEARCH": 3, "VERIFY": 4}
"""Confirming may fall into a burst of loss and costs a path if it fails; a wrong VERIFY costs a minute of small
datagrams, so at 5% loss each way it should err once in ten thousand."""
RAISE_AFTER_S = 600.0  # RFC 8899 section 5.1.1, PMTU_RAISE_TIMER
RAISE_AFTER_BLACK_HOLE_S = 60.0

_SIZES = {Scope.LOOPBACK: LOOPBACK_SIZES_BYTES, Scope.LAN: LAN_SIZES_BYTES, Scope.WIDE: WIDE_SIZES_BYTES}


class Phase(Enum):
    """Where the search stands; the module docstring says what each means."""

    CONFIRM = "CONFIRM"
    SEARCH = "SEARCH"
    SETTLED = "SETTLED"
    VERIFY = "VERIFY"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.CONFIRM: frozenset({Phase.SEARCH, Phase.SETTLED}),
    Phase.SEARCH: frozenset({Phase.SETTLED, Phase.CONFIRM}),
    Phase.SETTLED: frozenset({Phase.SEARCH, Phase.VERIFY, Phase.CONFIRM}),
    Phase.VERIFY: frozenset({Phase.SETTLED, Phase.CONFIRM}),
}


class MtuSearch:
    """The search on one path.

    ``generation`` changes whenever what was learned is thrown away: an ack for a probe of an earlier one says nothing.
    """

    def __init__(self, scope: Scope, base_bytes: int = BASE_BYTES) -> None:
        self._base = base_bytes
        self._sizes = _SIZES[scope]
        self._phase = Phase.CONFIRM
        self._pending: tuple[int, ...] = ()
        self._tries = 0
        self._next_at: float | None = None
        self._raise_at: float | None = None
        self.confirmed_bytes = 0
        self.generation = 0
        self.failed = False
        """Not even the base size gets through."""
        self.black_holes = 0
        """How often a confirmed size stopped getting through."""

    def restart(self, now: float) -> None:
        """Forget everything and confirm the base size."""
        self.confirmed_bytes = 0
        self.failed = False
        self.generation += 1
        self._enter(Phase.CONFIRM, (self._base,), now)

    def presume(self, now: float) -> None:
        """Take the base size for granted (the relay's path, which must do) and look for more."""
        self.confirmed_bytes = self._base
        self._search(now)

    def fall_back(self, now: float) -> None:
        """A confirmed size no longer gets through: back to the base, and no climbing for a while."""
        self.black_holes += 1
        self.restart(now)
        self._raise_at = now + RAISE_AFTER_BLACK_HOLE_S

    def verify(self, now: float) -> None:
        """Send the confirmed size once more, unless a search is on anyway."""
        if self._phase is Phase.SETTLED and self.confirmed_bytes:
            self._enter(Phase.VERIFY, (self.confirmed_bytes,), now)

    def acked(self, size_bytes: int, generation: int, now: float) -> None:
        """A probe of ``size_bytes`` sent in ``generation`` got through."""
        if generation != self.generation or size_bytes < self._base:
            return
        self.confirmed_bytes = max(self.confirmed_bytes, size_bytes)
        if self._phase is Phase.CONFIRM:
            if self._raise_at is None or now >= self._raise_at:
                self._search(now)
            else:
                self._settle(now)
        elif self._phase is Phase.VERIFY and size_bytes >= self._pending[0]:
            self._settle(now)
        elif self._phase is Phase.SEARCH:
            self._pending = tuple(size for size in self._pending if size > self.confirmed_bytes)
            if not self._pending:
                self._settle(now)

    def due_at(self) -> float | None:
        """When :meth:`take` next has something to do."""
        return self._next_at

    def take(self, now: float, pto_s: float, *, answering: bool = True) -> tuple[int, ...]:
        """The sizes to send now; each call that returns some is one try. ``answering``: small pings are acked."""
        if self._next_at is None or now < self._next_at:
            return ()
        if self._phase is Phase.SETTLED:
            self._raise_at = None
            self._search(now)
        elif self._tries >= _TRIES[self._phase.value]:
            self._give_up(now, answering=answering)
        if self._next_at is None or self._phase is Phase.SETTLED:
            return ()
        self._tries += 1
        self._next_at = now + max(pto_s, _RETRY_AT_LEAST_S)
        return self._pending

    def _give_up(self, now: float, *, answering: bool) -> None:
        if self._phase is Phase.CONFIRM:
            self.failed = True
            self._next_at = None
        elif self._phase is Phase.SEARCH or not answering:
            self._settle(now)  # a path that answers nothing at all is not narrow but silent: that is judged elsewhere
        else:
            self.fall_back(now)  # confirmed_bytes is 0 from here on until the base is acked again

    def _search(self, now: float) -> None:
        # Largest first: when its ack comes first, the size changes once.
        larger = tuple(size for size in reversed(self._sizes) if size > self.confirmed_bytes)
        if larger:
            self._enter(Phase.SEARCH, larger, now)
        else:
            self._settle(now)

    def _settle(self, now: float) -> None:
        if self._raise_at is None:
            self._raise_at = now + RAISE_AFTER_S
        self._enter(Phase.SETTLED, (), self._raise_at)

    def _enter(self, phase: Phase, pending: tuple[int, ...], next_at: float) -> None:
        if phase is not self._phase and phase not in TRANSITIONS[self._phase]:
            raise AssertionError(f"MTU search cannot go from {self._phase} to {phase}")
        self._phase, self._pending, self._tries, self._next_at = phase, pending, 0, next_at
