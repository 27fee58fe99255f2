"""Can these two reach each other? Arithmetic over two reports, not a packet sent (paper Section IV-A).

The paper's rule knows three classes and mispredicts two of its nine pairs. This one plays the exchange out over
symbols: each side sends to the address that servers saw of the other, and to every source it hears from; a NAT maps and
filters as its report says; whatever gets through is what can be had. :func:`ways` lists by which means to try.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import product
from typing import NamedTuple

from kafila.nat.report import Allocator, Filtering, FilterScope, Mapping, NatReport
from kafila.types import Address, NatClass


class Reach(Enum):
    """What two members can have without a relay, from the first to the second."""

    DIRECT = "direct"
    """Both ways between one pair of addresses."""
    ASYMMETRIC = "asymmetric"
    """Both ways, each over its own pair of addresses."""
    FORWARD = "forward"
    """Only from the first to the second."""
    BACKWARD = "backward"
    """Only from the second to the first."""
    NONE = "none"
    UNKNOWN = "unknown"
    """The reports leave open what decides it."""


class Way(Enum):
    """A means of getting through, in the order of :func:`ways`."""

    LAN = "lan"
    """Host addresses: both sit behind one public address, so perhaps on one network."""
    HAIRPIN = "hairpin"
    """The public address, from inside the same NAT."""
    IPV6 = "ipv6"
    PORT_MAPPING = "port mapping"
    """A port the gateway says it has opened; to be proven by a probe like any other."""
    PREDICTED_PORT = "predicted port"
    """The next port of a sequential allocator, before the reflexive one."""
    REFLEXIVE = "reflexive"
    """Punching between the addresses the servers saw."""
    BIRTHDAY = "birthday"
    """Many sockets on one side against a random allocator on the other."""


def predict(a: NatReport, b: NatReport) -> Reach:
    """What ``a`` and ``b`` can have. Exact where both reports are complete and the NATs keep to them.

    Ports that an allocator lets one guess and ports that a gateway says are open are hopes, not predictions: they are
    in :func:`ways`, not here. Two members behind one public address are ``UNKNOWN`` unless the NAT is known to hairpin,
    because their reports do not say whether they share a network.
    """
    if a.udp_blocked or b.udp_blocked:
        return Reach.NONE
    if a.reflexive_v6 and b.reflexive_v6:
        return Reach.DIRECT  # no translation on either side, and every firewall lets a punch answer (all EIM cells)
    if _no_common_family(a, b):
        return Reach.NONE
    outcomes = {punch(*nats) for nats in product(_possible(a), _possible(b))}
    outcome = outcomes.pop() if len(outcomes) == 1 else Reach.UNKNOWN
    if _behind_one_address(a, b) and not (outcome is Reach.DIRECT and a.hairpin and b.hairpin):
        return Reach.UNKNOWN
    return outcome


def ways(a: NatReport, b: NatReport) -> tuple[Way, ...]:
    """The means worth trying between ``a`` and ``b``, best first; empty where only a relay is left."""
    if a.udp_blocked or b.udp_blocked:
        return ()
    found: list[Way] = []
    together = _behind_one_address(a, b)
    if together:
        found.append(Way.LAN)
    if together and a.hairpin is not False and b.hairpin is not False:
        found.append(Way.HAIRPIN)
    if a.reflexive_v6 and b.reflexive_v6:
        found.append(Way.IPV6)
    if not together and not _no_common_family(a, b):
        found.extend(_ways_over_nats(a, b))
    return tuple(found)


def predicted_addresses(report: NatReport, newest: Address, count: int = 4) -> tuple[Address, ...]:
    """Where the next mappings of a sequential NAT will appear, likeliest first; empty for any other NAT.

    ``newest`` is the address of the mapping made last. More than one, because other traffic takes ports in between.
    """
    if report.allocator is not Allocator.SEQUENTIAL or Mapping.EIM in report.mapping:
        return ()
    ports = (newest.port + report.port_step * ahead for ahead in range(1, count + 1))
    return tuple(Address(newest.host, port) for port in ports if 1024 <= port <= 0xFFFF)


def paper_rule(a: NatClass, b: NatClass) -> bool:
    """Whether the paper's rule forecasts a direct edge, as its Table III prints it.

    A restrictive member needs a permissive one; all other pairs are direct. (The sentence in Section V-B would refuse
    two ordinary members as well, which its own table and its counting argument do not.)
    """
    return NatClass.RESTRICTIVE not in (a, b) or NatClass.PERMISSIVE in (a, b)


# --- the exchange, played out over symbols ----------------------------------------------------------------------------


class Nat(NamedTuple):
    """One NAT whose behaviour is certain: each field a single member of its Flag."""

    mapping: Mapping
    filtering: Filtering
    scope: FilterScope


class _Endpoint(NamedTuple):
    """An external address: on whose NAT, and for which traffic that NAT keeps it (what its port depends on)."""

    side: int
    kept_for: object


_A, _B, _SERVER = 0, 1, 2
_ROUNDS = 4
"""How often both sides send to all they know. Two port-dependent NATs make new mappings for ever, each answer from yet
another port, so the play must be cut; after the fourth round no outcome changes any more (a test plays eight)."""


@dataclass(slots=True)
class _Side:
    """One member in the exchange: its NAT and what has passed through it."""

    number: int
    nat: Nat
    known: set[_Endpoint] = field(default_factory=set)
    """Where to send: what the server told, and every source heard from."""
    sent: set[tuple[_Endpoint, _Endpoint]] = field(default_factory=set)
    """(own external address, remote one) of every datagram that went out."""

    def send(self, to: _Endpoint) -> _Endpoint:
        """Send once; returns the external address it leaves from."""
        kept_for: object = None
        if self.nat.mapping is Mapping.ADM:
            kept_for = to.side
        elif self.nat.mapping is Mapping.APDM:
            kept_for = to
        source = _Endpoint(self.number, kept_for)
        self.sent.add((source, to))
        return source

    def accepts(self, at: _Endpoint, source: _Endpoint) -> bool:
        """Whether a datagram from ``source`` to our external address ``at`` comes in."""
        if self.nat.filtering is Filtering.EIF:
            return any(mapped == at for mapped, _ in self.sent)
        per_endpoint = self.nat.scope is FilterScope.ENDPOINT
        contacted = {remote for mapped, remote in self.sent if per_endpoint or mapped == at}
        if self.nat.filtering is Filtering.ADF:
            return any(remote.side == source.side for remote in contacted)
        return source in contacted


@cache
def punch(a: Nat, b: Nat, rounds: int = _ROUNDS) -> Reach:
    """What simultaneous punching achieves between two NATs at different public addresses."""
    sides = (_Side(_A, a), _Side(_B, b))
    for me, other in (sides, sides[::-1]):
        other.known.add(me.send(_Endpoint(_SERVER, None)))
    delivered: set[tuple[_Endpoint, _Endpoint]] = set()
    for _ in range(rounds):
        for side in sides:
            for remote in side.known:
                side.send(remote)
        for me, other in (sides, sides[::-1]):
            arrived = {(source, to) for source, to in me.sent if to.side == other.number and other.accepts(to, source)}
            other.known |= {source for source, _ in arrived}
            delivered |= arrived
    return _outcome(delivered)


def _outcome(delivered: set[tuple[_Endpoint, _Endpoint]]) -> Reach:
    if any((to, source) in delivered for source, to in delivered):
        return Reach.DIRECT
    forward = any(source.side == _A for source, _ in delivered)
    backward = any(source.side == _B for source, _ in delivered)
    if forward and backward:
        return Reach.ASYMMETRIC
    return Reach.FORWARD if forward else Reach.BACKWARD if backward else Reach.NONE


# --- what the reports say beyond mapping and filtering ----------------------------------------------------------------


def _possible(report: NatReport) -> Iterator[Nat]:
    for mapping, filtering, scope in product(report.mapping, report.filtering, report.scope):
        yield Nat(mapping, filtering, scope)


def _behind_one_address(a: NatReport, b: NatReport) -> bool:
    if a.reflexive_v4 is None or b.reflexive_v4 is None:
        return False
    return a.reflexive_v4.host == b.reflexive_v4.host


def _no_common_family(a: NatReport, b: NatReport) -> bool:
    """Whether both reports name addresses, but none of a family that the other has too."""
    families_a = {family for family, address in ((4, a.reflexive_v4), (6, a.reflexive_v6)) if address}
    families_b = {family for family, address in ((4, b.reflexive_v4), (6, b.reflexive_v6)) if address}
    return bool(families_a and families_b) and not families_a & families_b


def _ways_over_nats(a: NatReport, b: NatReport) -> Iterator[Way]:
    if a.port_mapping or b.port_mapping:
        yield Way.PORT_MAPPING
    moving = [report for report in (a, b) if Mapping.EIM not in report.mapping]
    if moving and all(report.allocator is Allocator.SEQUENTIAL for report in moving):
        yield Way.PREDICTED_PORT
    if predict(a, b) is not Reach.NONE:
        yield Way.REFLEXIVE
    if len(moving) == 1 and moving[0].allocator is Allocator.RANDOM and predict(a, b) is not Reach.DIRECT:
        yield Way.BIRTHDAY
