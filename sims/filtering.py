"""Which inbound packets pass: RFC 4787 section 5 for NATs, and the same memory for stateful firewalls."""

from __future__ import annotations

from enum import Enum

from kafila.types import Address


class Filtering(Enum):
    """Whom an inside endpoint must have sent to before a packet from outside passes (RFC 4787 section 5)."""

    EIF = "endpoint-independent"
    """Anybody: the mapping's existence is enough."""
    ADF = "address-dependent"
    """Any port of an address it has sent to."""
    APDF = "address-and-port-dependent"
    """Exactly the addresses and ports it has sent to."""


MAX_REMEMBERED = 16_384
"""Remotes one memory keeps; past it the oldest is forgotten, as a full connection table would."""


class Permissions:
    """The remotes that may send in, each until it has been silent for ``timeout_s``."""

    __slots__ = ("_expiry", "_filtering", "_timeout_s")

    def __init__(self, filtering: Filtering, timeout_s: float) -> None:
        self._filtering = filtering
        self._timeout_s = timeout_s
        self._expiry: dict[str | Address, float] = {}

    def grant(self, remote: Address, now: float) -> None:
        """The inside endpoint has sent to ``remote``."""
        if self._filtering is Filtering.EIF:
            return
        key = self._key(remote)
        self._expiry.pop(key, None)  # re-inserted last: the dict stays ordered by age
        if len(self._expiry) >= MAX_REMEMBERED:
            del self._expiry[next(iter(self._expiry))]
        self._expiry[key] = now + self._timeout_s

    def allow(self, remote: Address, now: float) -> bool:
        """Whether a packet from ``remote`` passes at ``now``."""
        return self._filtering is Filtering.EIF or now < self._expiry.get(self._key(remote), now)

    def is_empty(self, now: float) -> bool:
        """Whether nobody's permission is still running."""
        return all(expiry <= now for expiry in self._expiry.values())

    def _key(self, remote: Address) -> str | Address:
        return remote.host if self._filtering is Filtering.ADF else remote


class StatefulFirewall:
    """Translates nothing; lets in what answers something sent out."""

    def __init__(self, filtering: Filtering = Filtering.APDF, timeout_s: float = 120.0) -> None:
        """``timeout_s``: Linux forgets a two-way UDP flow after 120 s (nf_conntrack_udp_timeout_stream)."""
        self._filtering = filtering
        self._timeout_s = timeout_s
        self._inside: dict[Address, Permissions] = {}
        self._sweep_at = 1024

    def sent(self, inside: Address, remote: Address, now: float) -> None:
        """Note an outbound packet."""
        permissions = self._inside.get(inside)
        if permissions is None:
            self._sweep(now)
            permissions = self._inside[inside] = Permissions(self._filtering, self._timeout_s)
        permissions.grant(remote, now)

    def admits(self, inside: Address, remote: Address, now: float) -> bool:
        """Whether an inbound packet passes. It also renews: a connection tracker counts both directions."""
        if self._filtering is Filtering.EIF:
            return True
        permissions = self._inside.get(inside)
        if permissions is None or not permissions.allow(remote, now):
            return False
        permissions.grant(remote, now)
        return True

    def flush(self) -> None:
        """Forget everybody (a reboot)."""
        self._inside.clear()

    def _sweep(self, now: float) -> None:
        if len(self._inside) >= self._sweep_at:
            self._inside = {i: p for i, p in self._inside.items() if not p.is_empty(now)}
            self._sweep_at = max(1024, 2 * len(self._inside))
