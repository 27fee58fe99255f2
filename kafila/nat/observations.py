"""What probing saw of a NAT, before anybody draws conclusions: the values between :mod:`probe` and :mod:`classify`."""

from __future__ import annotations

from dataclasses import dataclass

from kafila.types import Address


@dataclass(frozen=True, slots=True)
class Mapped:
    """Seen from ``server``, socket ``socket`` had the address ``reflexive``."""

    socket: int
    server: Address
    reflexive: Address


@dataclass(frozen=True, slots=True)
class ScopeTest:
    """A socket that had sent to both ``asked`` and ``replier`` had ``asked``'s mapping written to by ``replier``."""

    asked: Address
    replier: Address
    arrived: bool


@dataclass(frozen=True, slots=True)
class Observations:
    """All that one :class:`kafila.nat.probe.ProbePlan` saw of one address family. ``None``: not tried or no verdict."""

    local_ports: tuple[int, ...]
    """Of each socket."""
    interfaces: frozenset[str]
    """The machine's own hosts."""
    mapped: tuple[Mapped, ...] = ()
    """In the order in which the requests were first sent."""
    other_host_got_in: bool | None = None
    """Whether a reply came in from a host (and port) that the fresh socket had not sent to."""
    other_port_got_in: bool | None = None
    """Whether a reply came in from a port not sent to, of the host that was."""
    scope: ScopeTest | None = None
    hairpinned: bool | None = None
    """Whether one socket's datagram to another's reflexive address arrived."""
