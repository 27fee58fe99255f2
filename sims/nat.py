"""A NAT's translation table in the words of RFC 4787: how it maps, whom it lets in, and for how long.

Two small enums (:class:`Mapping` and :class:`sims.filtering.Filtering`) span the variety; the rest of
:class:`NatBehaviour` are the habits that traversal trips over. The table is pure: it takes addresses and the time
and returns an address, or the :class:`Drop` that says why not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from random import Random

from kafila.types import Address
from sims.filtering import Filtering, Permissions
from sims.packet import Drop
from sims.ports import DYNAMIC_PORTS, PortAllocator, PortPolicy, Preserving


class Mapping(Enum):
    """When two packets of one internal endpoint share an external port (RFC 4787 section 4.1)."""

    EIM = "endpoint-independent"
    """Always."""
    ADM = "address-dependent"
    """When they go to the same address."""
    APDM = "address-and-port-dependent"
    """When they go to the same address and port (a "symmetric" NAT)."""


class FilterScope(Enum):
    """What the filter remembers the sending of.

    RFC 4787 section 5 speaks of what the *internal endpoint* has sent; RFC 5780 section 4.4 probes exactly that.
    Many NATs, Linux among them, remember it of each *mapping*. The two differ only where mapping depends on the
    destination, for then an endpoint has several mappings.
    """

    MAPPING = "mapping"
    ENDPOINT = "endpoint"


class Refresh(Enum):
    """What keeps a mapping alive (RFC 4787 REQ-6)."""

    OUTBOUND = "outbound"
    BOTH = "both"


class Hairpin(Enum):
    """What happens to a packet from inside to the NAT's own external address (RFC 4787 section 6)."""

    OFF = "off"
    EXTERNAL_SOURCE = "external source"
    """The form of REQ-9a: it arrives as from outside."""
    INTERNAL_SOURCE = "internal source"
    """It arrives with the sender's private address, so the answer is from somewhere unexpected."""


class Pooling(Enum):
    """Which external address a mapping gets, where the NAT has several (RFC 4787 section 4.1)."""

    PAIRED = "paired"
    """Always the same for one internal address (REQ-2)."""
    ARBITRARY = "arbitrary"


@dataclass(frozen=True, slots=True)
class NatBehaviour:
    """The habits of one NAT. The default is an ordinary home router: a port-restricted cone that keeps ports."""

    mapping: Mapping = Mapping.EIM
    filtering: Filtering = Filtering.APDF
    scope: FilterScope = FilterScope.MAPPING
    ports: PortPolicy = field(default_factory=Preserving)
    timeout_s: float = 120.0
    """RFC 4787 REQ-5: no less than two minutes. Many are less all the same."""
    refresh: Refresh = Refresh.BOTH
    hairpin: Hairpin = Hairpin.OFF
    pooling: Pooling = Pooling.PAIRED
    block_ports: int | None = None
    """Carrier NATs give each subscriber one block of so many ports and no more (RFC 6888 REQ-4, RFC 7422)."""


@dataclass(slots=True)
class _Entry:
    internal: Address
    externals: list[Address]
    """The last is the one packets go out by; earlier ones, left behind by a move, only let packets in."""
    key: _Key
    expires_at: float
    permissions: Permissions
    explicit: bool = False
    """Asked for by PCP, NAT-PMP or a person; lives for its lifetime whatever passes."""

    @property
    def external(self) -> Address:
        return self.externals[-1]


_Key = tuple[Address, str | Address | None]
"""An internal endpoint and what of the remote the mapping depends on."""

_ANYBODY = Permissions(Filtering.EIF, 0.0)


class NatTable:
    """Mappings of one NAT between its internal endpoints and its external addresses."""

    def __init__(self, behaviour: NatBehaviour, hosts: list[str], random: Random) -> None:
        """``hosts``: the external addresses, at least one."""
        self.behaviour = behaviour
        self._hosts = hosts
        self._random = random
        self._by_key: dict[_Key, _Entry] = {}
        self._explicit: dict[Address, _Entry] = {}
        self._by_external: dict[Address, _Entry] = {}
        self._endpoint_permissions: dict[Address, Permissions] = {}
        self._allocators: dict[tuple[str, str | None], PortAllocator] = {}
        self._blocks: dict[str, tuple[str, range]] = {}
        self._sweep_at = 1024

    # -- packets ---------------------------------------------------------------------------------------------------

    def outbound(self, source: Address, to: Address, now: float) -> Address | Drop:
        """The external source of a packet from ``source`` to ``to``, made if need be."""
        entry = self._live(self._explicit.get(source), now) or self._live(self._by_key.get(self._key(source, to)), now)
        if entry is None:
            made = self._make(source, to, now)
            if isinstance(made, Drop):
                return made
            entry = made
        if not entry.explicit:
            entry.expires_at = now + self.behaviour.timeout_s
        entry.permissions.grant(to, now)
        return entry.external

    def inbound(self, source: Address, to: Address, now: float) -> Address | Drop:
        """The internal destination of a packet that reached external address ``to``."""
        entry = self._live(self._by_external.get(to), now)
        if entry is None:
            return Drop.NO_MAPPING
        if not entry.permissions.allow(source, now):
            return Drop.FILTERED
        if self.behaviour.refresh is Refresh.BOTH and not entry.explicit:
            entry.expires_at = now + self.behaviour.timeout_s
            entry.permissions.grant(source, now)
        return entry.internal

    # -- what a person, a protocol or a scenario asks --------------------------------------------------------------

    def open_port(self, internal: Address, wanted: int, lifetime_s: float, now: float) -> Address | Drop:
        """Map ``internal`` for ``lifetime_s`` to an external port, ``wanted`` if it can be had, open to anybody
        (RFC 6887 section 11: a MAP without a filter is endpoint-independent). Asked again, it renews."""
        entry = self._live(self._explicit.get(internal), now) or self._adopt(internal, now)
        if entry is None:
            external = self._allocate(internal, wanted, now)
            if isinstance(external, Drop):
                return external
            entry = _Entry(internal, [external], (internal, None), now, _ANYBODY, explicit=True)
            self._explicit[internal] = self._by_external[external] = entry
        entry.expires_at = now + lifetime_s
        return entry.external

    def _adopt(self, internal: Address, now: float) -> _Entry | None:
        """An endpoint-independent mapping that exists already becomes the explicit one (RFC 6887 section 11.3)."""
        if self.behaviour.mapping is not Mapping.EIM:
            return None
        entry = self._live(self._by_key.get((internal, None)), now)
        if entry is not None:
            del self._by_key[entry.key]
            entry.explicit, entry.permissions = True, _ANYBODY
            self._explicit[internal] = entry
        return entry

    def close_port(self, internal: Address) -> None:
        """Forget what :meth:`open_port` made; nothing happens where it made nothing."""
        entry = self._explicit.get(internal)
        if entry is not None:
            self._remove(entry)

    def explicit_ports(self, host: str, now: float) -> list[Address]:
        """The internal endpoints of ``host`` that have an explicit mapping."""
        return [i for i, entry in self._explicit.items() if i.host == host and entry.expires_at > now]

    def move_mappings(self, now: float, *, keep_old: bool) -> None:
        """Give every implicit mapping a new external port, as some carriers do under a live flow.

        With ``keep_old`` the old port still lets packets *in*, so that each side sees only half of the path die.
        """
        self._sweep(now)
        for entry in self._by_key.values():
            external = self._allocate(entry.internal, 0, now)
            if isinstance(external, Drop):
                continue
            if not keep_old:
                self._forget_ports(entry)
            entry.externals.append(external)
            self._by_external[external] = entry

    def flush(self, hosts: list[str] | None = None) -> None:
        """Forget everything, as a reboot does; ``hosts`` are the external addresses from now on."""
        self._hosts = self._hosts if hosts is None else hosts
        self._by_key.clear()
        self._explicit.clear()
        self._by_external.clear()
        self._endpoint_permissions.clear()
        self._allocators.clear()
        self._blocks.clear()

    def mapping_count(self, now: float) -> int:
        """How many mappings are alive."""
        self._sweep(now)
        return len(self._by_key) + len(self._explicit)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _key(self, source: Address, to: Address) -> _Key:
        match self.behaviour.mapping:
            case Mapping.EIM:
                return source, None
            case Mapping.ADM:
                return source, to.host
            case Mapping.APDM:
                return source, to

    def _make(self, source: Address, to: Address, now: float) -> _Entry | Drop:
        if len(self._by_key) >= self._sweep_at:
            self._sweep(now)
            self._sweep_at = max(1024, 2 * len(self._by_key))
        external = self._allocate(source, source.port, now)
        if isinstance(external, Drop):
            return external
        key = self._key(source, to)
        entry = _Entry(source, [external], key, now, self._permissions(source))
        self._by_key[key] = self._by_external[external] = entry
        return entry

    def _permissions(self, internal: Address) -> Permissions:
        behaviour = self.behaviour
        if behaviour.scope is FilterScope.MAPPING:
            return Permissions(behaviour.filtering, behaviour.timeout_s)
        shared = self._endpoint_permissions.get(internal)
        if shared is None:
            shared = self._endpoint_permissions[internal] = Permissions(behaviour.filtering, behaviour.timeout_s)
        return shared

    def _allocate(self, internal: Address, wanted: int, now: float) -> Address | Drop:
        if self.behaviour.block_ports is None:
            host, ports, subscriber = self._pooled_host(internal.host), DYNAMIC_PORTS, None
        else:
            block = self._block(internal.host, self.behaviour.block_ports)
            if block is None:
                return Drop.NO_PORT_LEFT
            (host, ports), subscriber = block, internal.host
        allocator = self._allocators.get((host, subscriber))
        if allocator is None:
            allocator = self.behaviour.ports.allocator(ports, self._random)
            self._allocators[host, subscriber] = allocator
        port = allocator.allocate(wanted, lambda port: self._is_free(Address(host, port), now), now)
        if port is None:
            return Drop.NO_PORT_LEFT if subscriber is None else Drop.QUOTA
        return Address(host, port)

    def _pooled_host(self, internal_host: str) -> str:
        if len(self._hosts) == 1:
            return self._hosts[0]
        if self.behaviour.pooling is Pooling.ARBITRARY:
            return self._random.choice(self._hosts)
        # Any fixed function of the internal address pairs them; the sum of its bytes spreads neighbours evenly.
        return self._hosts[sum(internal_host.encode()) % len(self._hosts)]

    def _block(self, subscriber: str, size: int) -> tuple[str, range] | None:
        """The address and ports that are this subscriber's, the next unused block at first sight; None: none left."""
        block = self._blocks.get(subscriber)
        if block is None:
            per_host = len(DYNAMIC_PORTS) // size
            index = len(self._blocks)
            if index >= per_host * len(self._hosts):
                return None
            start = (index % per_host) * size
            block = self._blocks[subscriber] = (self._hosts[index // per_host], DYNAMIC_PORTS[start : start + size])
        return block

    def _is_free(self, external: Address, now: float) -> bool:
        return self._live(self._by_external.get(external), now) is None

    def _live(self, entry: _Entry | None, now: float) -> _Entry | None:
        if entry is not None and entry.expires_at <= now:
            self._remove(entry)
            return None
        return entry

    def _remove(self, entry: _Entry) -> None:
        if entry.explicit:
            del self._explicit[entry.internal]
        else:
            del self._by_key[entry.key]
        self._forget_ports(entry)

    def _forget_ports(self, entry: _Entry) -> None:
        for external in entry.externals:
            del self._by_external[external]
        entry.externals.clear()

    def _sweep(self, now: float) -> None:
        """Drop what has expired; looking a mapping up would do it too, but a forgotten one is never looked up."""
        for entry in [*self._by_key.values(), *self._explicit.values()]:
            self._live(entry, now)
        self._endpoint_permissions = {i: p for i, p in self._endpoint_permissions.items() if not p.is_empty(now)}
