"""Fleets: who has which machine where, as files that people can write.

A fleet is a TOML file (or JSON of the same shape)::

    name = "friends"
    host = "tower"                  # who opens the session; the first member if left out
    hop_ms = 2                      # what an edge adds to the distance, one way; 0 if left out

    [[member]]
    name = "tower"
    memory_gb = 24                  # 10^9 bytes that the model may use
    bandwidth_gbps = [800, 900]     # measured range, or one number; the middle is planned with
    overhead_us = 50                # per token; 50 if left out
    tflops = 80                     # only used when somebody's bandwidth is left out
    rtt_ms = 30                     # round trip to the rendezvous
    nat = "ordinary"                # permissive, ordinary or restrictive; ordinary if left out
    site = "Utrecht"
    lan = "home"                    # members with the same one share a router and reach one another inside
    uplink_mbps = 40                # what its router sends to the world, 10^6 bits per second; no limit if left out
    downlink_mbps = 250             # and receives; of a lan the first member's counts

    [site.Utrecht]
    latitude = 52.09
    longitude = 5.12

    [[edge]]                        # what is known of a pair
    between = ["tower", "laptop"]
    kind = "relayed"                # direct or relayed
    rtt_ms = 61                     # measured; left out: by the kind, from the sites or from both rtt_ms
    network = "hotel"               # only under --network hotel; always if left out

A pair without an edge connects directly when both members have a site, and is predicted from the NAT classes otherwise.
Speeds are left out where a machine could not be measured. The paper's three fleets ship with the simulator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kafila.errors import UsageError
from kafila.plan import KnownEdge, Member
from kafila.types import NatClass, PathKind
from sims.geography import Site, fibre_rtt_s
from sims.reading import DATA, Section, load_table

PAPER_FLEETS = ("lan", "us-central", "intercontinental")
PREDICTED = "predicted"
"""The network of which nothing is known but the NAT classes and the round trips to the rendezvous."""
PAPER = "paper"
"""The network of the paper's own run, where that differs from what a fleet's file assumes."""

_DEFAULT_OVERHEAD_US = 50.0
_MOST_GB = 1e9
"""An exabyte in one machine is a slip in the units."""
_FLEET_KEYS = {"name", "host", "hop_ms", "member", "site", "edge"}
_MEMBER_KEYS = {
    *("name", "memory_gb", "bandwidth_gbps", "overhead_us", "tflops", "rtt_ms", "nat", "site"),
    *("lan", "uplink_mbps", "downlink_mbps"),
}
_EDGE_KEYS = {"between", "kind", "rtt_ms", "network"}


@dataclass(frozen=True, slots=True)
class Home:
    """Where a member is plugged in; rates in bytes per second, ``None`` for no limit."""

    lan: str | None
    """Members with the same one share a router; ``None``: a router of its own."""
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """Members with what is known of the edges between them, ready to be planned for."""

    name: str
    members: tuple[Member, ...]
    host: int
    """Index of the member that opens the session."""
    sites: tuple[Site | None, ...]
    """Where each member is."""
    bandwidths: tuple[tuple[float, float] | None, ...]
    """The measured range of each member's memory bandwidth, bytes per second."""
    edges: Mapping[tuple[int, int], KnownEdge]
    networks: tuple[str, ...]
    """Other networks that the file knows this fleet under."""
    homes: tuple[Home, ...]
    """Where each member is plugged in."""
    hop_s: float
    """What an edge adds to the distance, one way."""


def load_fleet(name: str, network: str | None = None) -> Fleet:
    """One of the paper's fleets by name, or the fleet in a file, under one of its networks.

    Raises UsageError where there is no such fleet, or the file has a mistake, or no such network.
    """
    path = DATA / f"{name.lower()}.toml" if name.lower() in PAPER_FLEETS else Path(name)
    if not os.path.exists(path):  # Path.exists raises where the name itself is impossible
        raise UsageError(f"{name}: neither a file nor one of the paper's fleets, {', '.join(PAPER_FLEETS)}")
    where = str(path) if path.parent != DATA else path.stem
    return read_fleet(Section(load_table(path), where, _FLEET_KEYS), network)


def read_fleet(file: Section, network: str | None = None) -> Fleet:
    """The fleet that a file describes. Raises UsageError."""
    places = {name: _site(name, table, file.where) for name, table in file.named_tables("site").items()}
    rows = [
        Section(table, f"{file.where}, member {number}", _MEMBER_KEYS)
        for number, table in enumerate(file.tables("member"), 1)
    ]
    if not rows:
        raise UsageError(f"{file.where}: a fleet needs at least one [[member]]")
    members = tuple(_member(row) for row in rows)
    names = [member.name for member in members]
    if len(set(names)) < len(names):
        raise UsageError(f"{file.where}: two members have the same name")
    sites = tuple(_place(row, places) for row in rows)
    hop_s = file.number("hop_ms") / 1e3 if "hop_ms" in file else 0.0
    stated, networks = _stated(file, names, network)
    known = {} if network == PREDICTED else _edges(members, sites, hop_s, stated)
    return Fleet(
        name=file.text("name") if "name" in file else file.where,
        members=members,
        host=_index(file.text("host"), names, file.where) if "host" in file else 0,
        sites=sites,
        bandwidths=tuple(_bandwidth(row) for row in rows),
        edges=known,
        networks=networks,
        homes=tuple(_home(row) for row in rows),
        hop_s=hop_s,
    )


def _member(row: Section) -> Member:
    bandwidth = _bandwidth(row)
    tflops, rtt_ms = row.optional_number("tflops"), row.optional_number("rtt_ms")
    overhead_us = row.number("overhead_us") if "overhead_us" in row else _DEFAULT_OVERHEAD_US
    return Member(
        name=row.text("name"),
        memory_bytes=round(row.number("memory_gb", most=_MOST_GB) * 1e9),
        bandwidth_bytes_per_s=None if bandwidth is None else sum(bandwidth) / 2,
        overhead_s=overhead_us / 1e6,
        flops=None if tflops is None else tflops * 1e12,
        rtt_s=None if rtt_ms is None else rtt_ms / 1e3,
        nat=row.choice("nat", NatClass) if "nat" in row else NatClass.ORDINARY,
    )


def _bandwidth(row: Section) -> tuple[float, float] | None:
    if "bandwidth_gbps" not in row:
        return None
    low, high = row.span("bandwidth_gbps")
    if low <= 0:
        raise UsageError(f"{row.where}: 'bandwidth_gbps' must be above 0; leave it out where it is not known")
    return low * 1e9, high * 1e9


def _home(row: Section) -> Home:
    lan = row.text("lan") if "lan" in row else None
    rates = [row.number(key, least=0.1) if key in row else None for key in ("uplink_mbps", "downlink_mbps")]
    up, down = (None if rate is None else rate * 1e6 / 8 for rate in rates)
    return Home(lan, up, down)


def _site(name: str, table: object, where: str) -> Site:
    section = Section(table, f"{where}, site {name}", {"latitude", "longitude"})
    latitude = section.number("latitude", least=-90, most=90)
    return Site(name, latitude, section.number("longitude", least=-180, most=180))


def _place(row: Section, places: Mapping[str, Site]) -> Site | None:
    if "site" not in row:
        return None
    name = row.text("site")
    if name not in places:
        raise UsageError(f"{row.where}: the file has no [site.{name}] with a latitude and a longitude")
    return places[name]


def _index(name: str, names: Sequence[str], where: str) -> int:
    if name not in names:
        raise UsageError(f"{where}: no member is called {name!r}; there are {', '.join(names)}")
    return names.index(name)


def _stated(
    file: Section, names: Sequence[str], network: str | None
) -> tuple[dict[tuple[int, int], KnownEdge], tuple[str, ...]]:
    """The edges that hold under ``network``, and the names of all networks; a network's own edges win."""
    common: dict[tuple[int, int], KnownEdge] = {}
    special: dict[str, dict[tuple[int, int], KnownEdge]] = {}
    for number, table in enumerate(file.tables("edge"), 1):
        row = Section(table, f"{file.where}, edge {number}", _EDGE_KEYS)
        first, second = (_index(name, names, row.where) for name in row.pair("between"))
        if first == second:
            raise UsageError(f"{row.where}: an edge is between two members")
        rtt_ms = row.optional_number("rtt_ms")
        edge = KnownEdge(row.choice("kind", PathKind), None if rtt_ms is None else rtt_ms / 1e3)
        of = special.setdefault(row.text("network"), {}) if "network" in row else common
        of[min(first, second), max(first, second)] = edge
    if network is not None and network != PREDICTED and network not in special:
        known = ", ".join([PREDICTED, *special])
        raise UsageError(f"{file.where}: knows no network {network!r}; there are {known}")
    return common | special.get(network or "", {}), tuple(special)


def _edges(
    members: Sequence[Member],
    sites: Sequence[Site | None],
    hop_s: float,
    stated: Mapping[tuple[int, int], KnownEdge],
) -> dict[tuple[int, int], KnownEdge]:
    """Every pair of which something is known, priced where it can be: measured, by distance, or over the rendezvous."""
    edges = {}
    for pair in ((a, b) for a in range(len(members)) for b in range(a + 1, len(members))):
        edge = stated.get(pair)
        rtt_s = _rtt_s(pair, members, sites, edge)
        if edge is not None and edge.rtt_s is not None:
            edges[pair] = edge
        elif rtt_s is not None:
            edges[pair] = KnownEdge(PathKind.DIRECT if edge is None else edge.kind, rtt_s + 2 * hop_s)
        elif edge is not None:
            edges[pair] = edge
    return edges


def _rtt_s(
    pair: tuple[int, int], members: Sequence[Member], sites: Sequence[Site | None], edge: KnownEdge | None
) -> float | None:
    """The round trip of a pair that nobody measured: over the rendezvous, or by the distance."""
    first, second = pair
    if edge is not None and edge.kind is PathKind.RELAYED:
        to_first, to_second = members[first].rtt_s, members[second].rtt_s
        return None if to_first is None or to_second is None else to_first + to_second
    here, there = sites[first], sites[second]
    return None if here is None or there is None else fibre_rtt_s(here, there)
