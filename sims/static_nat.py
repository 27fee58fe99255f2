"""One-to-one translation, as clouds give virtual machines: one external address each, ports untouched."""

from __future__ import annotations

from kafila.types import Address
from sims.filtering import Filtering, StatefulFirewall
from sims.packet import Drop


class OneToOneTable:
    """Pairs of internal and external addresses, with a filter (a cloud's security group) in front."""

    def __init__(self, filtering: Filtering = Filtering.EIF) -> None:
        self._firewall = StatefulFirewall(filtering)
        self._external: dict[str, str] = {}
        self._internal: dict[str, str] = {}

    def bind(self, internal: str, external: str) -> None:
        """Pair two addresses, undoing what either was in before."""
        self._internal.pop(self._external.pop(internal, ""), None)
        self._external[internal], self._internal[external] = external, internal

    def pairs(self) -> list[tuple[str, str]]:
        """Every (internal, external) pair."""
        return list(self._external.items())

    def outbound(self, source: Address, to: Address, now: float) -> Address | Drop:
        """The external source of a packet from ``source`` to ``to``."""
        external = self._external.get(source.host)
        if external is None:
            return Drop.NO_MAPPING
        self._firewall.sent(source, to, now)
        return Address(external, source.port)

    def inbound(self, source: Address, to: Address, now: float) -> Address | Drop:
        """The internal destination of a packet that reached ``to``."""
        internal = self._internal.get(to.host)
        if internal is None:
            return Drop.NO_MAPPING
        inside = Address(internal, to.port)
        return inside if self._firewall.admits(inside, source, now) else Drop.FILTERED

    def flush(self) -> None:
        """Forget who sent to whom; the pairs stay."""
        self._firewall.flush()
