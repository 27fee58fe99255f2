"""From what probing saw to what the NAT does: RFC 5780's conclusions, and only those that the observations bear.

Nothing here guesses. A behaviour that no observation rules out stays possible, so one server address leaves "endpoint-
or address-dependent" open, and a lost test leaves everything open.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import combinations, pairwise
from math import gcd

from kafila.nat.observations import Mapped, Observations
from kafila.nat.report import Allocator, Filtering, FilterScope, Mapping, NatReport

_MAX_STEP = 16
"""Ports further apart than this are not the next in a sequence with a little traffic in between. Even in a carrier's
block of 512 ports, three of four random steps fall so close, in one direction, once in five thousand times."""
_MIN_SAMPLES = 3


def classify(seen: Observations) -> NatReport:
    """The report of the one address family that was probed."""
    if not seen.mapped:
        return NatReport(udp_blocked=True)
    first = min(seen.mapped, key=lambda one: one.socket)
    mapping, filtering = _mapping(seen), _filtering(seen)
    scope = _scope(seen, filtering)
    allocator, step = _allocator(seen)
    report = NatReport(
        mapping=mapping,
        filtering=filtering,
        scope=scope,
        allocator=allocator,
        port_step=step,
        hairpin=_hairpin(seen, mapping, filtering, scope),
        on_public_address=first.reflexive.host in seen.interfaces,
    )
    if ":" not in first.reflexive.host:
        return replace(report, reflexive_v4=first.reflexive)
    return replace(report, reflexive_v6=first.reflexive if mapping is Mapping.EIM else None)


def combine(v4: NatReport | None, v6: NatReport | None) -> NatReport:
    """One report of both families: behaviours from IPv4, or from IPv6 where nothing answered over IPv4."""
    if v4 is None or (v4.udp_blocked and v6 is not None):
        return v6 if v6 is not None else NatReport(udp_blocked=True)
    return replace(v4, reflexive_v6=v6.reflexive_v6) if v6 is not None else v4


def _mapping(seen: Observations) -> Mapping:
    """Compare what the servers saw of socket 0, pair by pair."""
    views = [one for one in seen.mapped if one.socket == 0]
    if any(_is_own(one, seen) for one in views):
        return Mapping.EIM
    possible = Mapping.UNKNOWN
    for one, other in combinations(views, 2):
        possible &= _allowed_by(one, other)
    return possible or Mapping.APDM  # two that contradict each other: the NAT keeps to nothing, so expect the worst


def _allowed_by(one: Mapped, other: Mapped) -> Mapping:
    """The mappings under which these two servers see what they saw."""
    same = one.reflexive == other.reflexive
    if one.server.host == other.server.host:
        return Mapping.EIM | Mapping.ADM if same else Mapping.APDM
    return Mapping.EIM if same else Mapping.ADM | Mapping.APDM


def _is_own(one: Mapped, seen: Observations) -> bool:
    return one.reflexive.host in seen.interfaces and one.reflexive.port == seen.local_ports[one.socket]


def _filtering(seen: Observations) -> Filtering:
    possible = Filtering.UNKNOWN
    if seen.other_host_got_in is not None:
        possible &= Filtering.EIF if seen.other_host_got_in else Filtering.ADF | Filtering.APDF
    if seen.other_port_got_in is not None:
        possible &= Filtering.EIF | Filtering.ADF if seen.other_port_got_in else Filtering.APDF
    return possible or Filtering.EIF  # got in from afar but not from near by: the second was lost three times


def _scope(seen: Observations, filtering: Filtering) -> FilterScope:
    """Silence means a filter by mapping; an arrival, one by endpoint, unless the filter lets such replies in anyway."""
    if seen.scope is None:
        return FilterScope.UNKNOWN
    if not seen.scope.arrived:
        return FilterScope.MAPPING
    one_host = seen.scope.asked.host == seen.scope.replier.host
    lets_in_anyway = Filtering.EIF | Filtering.ADF if one_host else Filtering.EIF
    return FilterScope.UNKNOWN if filtering & lets_in_anyway else FilterScope.ENDPOINT


def _allocator(seen: Observations) -> tuple[Allocator, int]:
    """How external ports follow one another over sockets that asked one server in turn."""
    server = seen.mapped[0].server
    samples = [one for one in seen.mapped if one.server == server]
    if len(samples) < _MIN_SAMPLES:
        return Allocator.UNKNOWN, 0
    kept = sum(one.reflexive.port == seen.local_ports[one.socket] for one in samples)
    if 2 * kept > len(samples):
        return Allocator.PRESERVING, 0
    ports = [one.reflexive.port for one in samples]
    step = _step([after - before for before, after in pairwise(ports)])
    return (Allocator.SEQUENTIAL, step) if step else (Allocator.RANDOM, 0)


def _step(differences: list[int]) -> int:
    """The step of a sequence of ports, 0 if it is none. One difference may be off: a wrap, or packets that overtook."""
    for sign in (1, -1):
        near = [abs(one) for one in differences if 0 < one * sign <= _MAX_STEP]
        if len(near) >= max(2, len(differences) - 1):
            return sign * reduce(gcd, near)
    return 0


def _hairpin(seen: Observations, mapping: Mapping, filtering: Filtering, scope: FilterScope) -> bool | None:
    """An arrival proves it. Silence disproves it only where mapping and filter would have let the datagram in.

    Both sockets sent to the address a *server* saw of the other. That mapping serves the NAT's own address as well only
    if mappings are endpoint-independent; the mapping made for a server is open to others only with a filter that lets
    all in, or one that looks at no more than the host and remembers by endpoint.
    """
    if seen.hairpinned is not False:
        return seen.hairpinned
    would_arrive = (
        mapping is Mapping.EIM
        or filtering is Filtering.EIF
        or (filtering is Filtering.ADF and scope is FilterScope.ENDPOINT)
    )
    return False if would_arrive else None
