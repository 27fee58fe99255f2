"""A fleet on the virtual network: which of three networks its members meet over.

``overhead``   every edge takes an equal part of the time that the paper's own table leaves to the network
``geography``  sites as far apart as fibre makes them, behind NATs through which exactly the paper's edges relay
``paths``      the same sites behind NATs of the members' classes: what our path engine makes of them

Distances are great circles at two thirds of the speed of light and half as long again (`sims.geography`): cables follow
coasts, roads and exchanges. The rendezvous is where the file's round trips say, between 79 and 115 ms from everybody in
the paper (Section V-B).
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from itertools import combinations

from kafila.types import NatClass, PathKind
from sims.filtering import Filtering
from sims.fleets import PAPER_FLEETS, Fleet
from sims.geography import fibre_rtt_s
from sims.link import ETHERNET_MTU_BYTES, PERFECT, Quality
from sims.nat import Mapping
from sims.net import Machine
from sims.ports import RandomPorts
from sims.topology import Habits, Place, VirtualNetwork

PAPER_RENDEZVOUS_RTT_S = 0.097
"""The middle of what the paper's members measured, for those of whom the paper says nothing else."""
USUAL_RENDEZVOUS_RTT_S = 0.040
"""A server on the same continent, for a fleet that says nothing."""
JUMBO_BYTES = 9000
"""Under the overhead network, where an edge's time is given, a token's rows are one packet: quick to simulate."""
UPLINK_QUEUE_BYTES = 256 * 1024
"""What a home router holds for its uplink: a tenth of a second at 20 Mbit/s."""


class Net(Enum):
    """Which network; the module docstring says what each is."""

    OVERHEAD = "overhead"
    GEOGRAPHY = "geography"
    PATHS = "paths"


_HABITS: dict[NatClass, Habits] = {
    NatClass.PERMISSIVE: {"mapping": Mapping.EIM, "filtering": Filtering.EIF},
    NatClass.ORDINARY: {"mapping": Mapping.EIM, "filtering": Filtering.ADF},
    NatClass.RESTRICTIVE: {"mapping": Mapping.APDM, "filtering": Filtering.APDF, "ports": RandomPorts()},
}
"""Of each class the NAT that behaves as the paper's Table III shows."""


def with_relayed_edge(fleet: Fleet) -> set[int]:
    """Members of whom the file says that an edge relays; behind NATs that nothing crosses, every edge between two of
    them does."""
    return {place for pair, edge in fleet.edges.items() if edge.kind is PathKind.RELAYED for place in pair}


class Ground:
    """Machines in a fleet's order, and the rendezvous."""

    def __init__(self, net: VirtualNetwork, fleet: Fleet, network: Net, edge_s: float) -> None:
        """``edge_s``: what each edge takes one way under the overhead network."""
        self.net = net
        self.server = net.machine("rendezvous", v6=False)
        self.second = net.machine("rendezvous' second address", v6=False)
        self._fleet = fleet
        if network is Net.OVERHEAD:
            room = net.nat("router", **_HABITS[NatClass.ORDINARY])
            self.machines = [self._beside(room, place, edge_s, JUMBO_BYTES) for place in range(len(fleet.members))]
        else:
            strict = with_relayed_edge(fleet) if network is Net.GEOGRAPHY else set()
            self.machines = self._at_home(strict)
            self._spread()
        for place, machine in enumerate(self.machines):
            net.rtt(self.server, machine, self._rendezvous_rtt_s(place))
            net.rtt(self.second, machine, self._rendezvous_rtt_s(place))

    def _rendezvous_rtt_s(self, place: int) -> float:
        stated = self._fleet.members[place].rtt_s
        if stated is not None:
            return stated
        return PAPER_RENDEZVOUS_RTT_S if self._fleet.name in PAPER_FLEETS else USUAL_RENDEZVOUS_RTT_S

    def _beside(self, room: Place, place: int, hop_s: float, mtu_bytes: int = ETHERNET_MTU_BYTES) -> Machine:
        """The machine of the member at ``place``. An edge costs ``hop_s`` where it ends: one event a packet."""
        up, down = Quality(mtu_bytes=mtu_bytes), Quality(latency_s=hop_s, mtu_bytes=mtu_bytes)
        return room.machine(f"machine {place}", v6=False, up=up, down=down)

    def _at_home(self, strict: Collection[int]) -> list[Machine]:
        """Each member behind its router; those of one lan behind one."""
        routers: dict[str, Place] = {}
        machines = []
        for place, (member, home) in enumerate(zip(self._fleet.members, self._fleet.homes, strict=True)):
            key = f"lan {home.lan}" if home.lan is not None else f"home {place}"
            if key not in routers:
                nat = NatClass.RESTRICTIVE if place in strict else member.nat
                rates = (home.up_bytes_per_s, home.down_bytes_per_s)
                up, down = (_wire(rate) for rate in rates)
                routers[key] = self.net.nat(f"router of {key}", up=up, down=down, **_HABITS[nat])
            machines.append(self._beside(routers[key], place, self._fleet.hop_s))
        return machines

    def _spread(self) -> None:
        """Distances between homes."""
        for one, other in combinations(range(len(self.machines)), 2):
            if self._same_lan(one, other):
                continue
            rtt_s = self._distance_s(one, other)
            self.net.rtt(self.machines[one], self.machines[other], rtt_s)

    def _same_lan(self, one: int, other: int) -> bool:
        lans = self._fleet.homes[one].lan, self._fleet.homes[other].lan
        return lans[0] is not None and lans[0] == lans[1]

    def _distance_s(self, one: int, other: int) -> float:
        """A direct path's round trip: measured, by fibre, or the longer way to the rendezvous."""
        fleet = self._fleet
        edge = fleet.edges.get((one, other))
        here, there = fleet.sites[one], fleet.sites[other]
        if edge is not None and edge.kind is PathKind.DIRECT and edge.rtt_s is not None:
            return max(edge.rtt_s - 2 * fleet.hop_s, 0.0)
        if here is not None and there is not None:
            return fibre_rtt_s(here, there)
        # Between the difference of the ways to the rendezvous and their sum.
        return max(self._rendezvous_rtt_s(one), self._rendezvous_rtt_s(other))


def _wire(rate: float | None) -> Quality:
    return PERFECT if rate is None else Quality(rate_bytes_per_s=rate, queue_bytes=UPLINK_QUEUE_BYTES)
