"""Birthday probing: one NAT gives a random port to every destination, the other asks for the exact address and port.

The side behind the random allocator opens many mappings, one a socket, all towards the peer's one address; the other
guesses ports. With 128 mappings among 64,512 ports, 1,024 guesses meet one of them in 1 - (1 - 128/64512)^1024 = 87% of
attempts. That takes thirteen seconds at the rate limit, and is tried once an epoch.
"""

from __future__ import annotations

from enum import Enum

from kafila.nat.candidates import LOWEST_PORT
from kafila.nat.schedule import Randomness
from kafila.types import Address

MAX_SOCKETS = 128
"""DESIGN section 5; more would exhaust the port block of a carrier's subscriber (512 are usual)."""
MAX_GUESSES = 1024
GAP_S = 0.0125
"""80 a second: the rest of the rate limit stays with the paths that are tried otherwise."""

_PORTS = 65536 - LOWEST_PORT
_STRIDE = 24691  # a prime that does not divide 64,512, so that no port is guessed twice


class BirthdayRole(Enum):
    """Which part this side takes."""

    OPEN_SOCKETS = "open-sockets"
    """Our allocator is random: ping the peer's address from each of many sockets."""
    GUESS_PORTS = "guess-ports"
    """The peer's is: ping its host at many ports."""


class Birthday:
    """One attempt. ``target`` is the peer's address as others see it; ``sockets`` how many extra ones the driver
    opened, numbered from 1 (of no meaning to the side that guesses)."""

    def __init__(self, role: BirthdayRole, target: Address, sockets: int, now: float, random: Randomness) -> None:
        self._role = role
        self._target = target
        self._start = int(random.random() * _PORTS)
        self._total = min(sockets, MAX_SOCKETS) if role is BirthdayRole.OPEN_SOCKETS else MAX_GUESSES
        self._count = 0
        self._next_at = now

    def due_at(self) -> float | None:
        """When the next probe is due; None: it is over."""
        return self._next_at if self._count < self._total else None

    def take(self, now: float) -> tuple[Address, int]:
        """Where to send the next probe, and from which socket."""
        number = self._count
        self._count += 1
        self._next_at = now + GAP_S
        if self._role is BirthdayRole.OPEN_SOCKETS:
            return self._target, number + 1
        return Address(self._target.host, LOWEST_PORT + (self._start + number * _STRIDE) % _PORTS), 0
