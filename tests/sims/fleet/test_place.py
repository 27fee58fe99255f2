"""Where a fleet's members stand on the virtual network."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafila.types import PathKind
from sims.fleet.place import Ground, Net, with_relayed_edge
from sims.fleets import PAPER, Fleet, load_fleet
from sims.geography import fibre_rtt_s
from sims.topology import VirtualNetwork

OWN = """
hop_ms = 1

[[member]]
name = "a"
memory_gb = 1
lan = "home"

[[member]]
name = "b"
memory_gb = 1
lan = "home"

[[member]]
name = "c"
memory_gb = 1
rtt_ms = 70

[[member]]
name = "d"
memory_gb = 1

[[edge]]
between = ["c", "d"]
kind = "direct"
rtt_ms = 22
"""


def between(ground: Ground, one: int, other: int) -> float:
    """Round trip over the Internet, the hops at the ends apart."""
    machines = ground.machines
    ways = ((machines[one], machines[other]), (machines[other], machines[one]))
    return sum(ground.net.path(*way).quality.latency_s for way in ways)


def ground_of(fleet: Fleet, network: Net, edge_s: float = 0.0) -> Ground:
    return Ground(VirtualNetwork(rtt_s=0.0), fleet, network, edge_s)


def test_a_lan_is_shared_and_distances_are_measured_or_as_far_as_the_rendezvous(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN, encoding="utf-8")
    ground = ground_of(load_fleet(str(path)), Net.PATHS)
    a, b, _, _ = ground.machines
    assert a.attachments[0].lan is b.attachments[0].lan
    assert between(ground, 2, 3) == pytest.approx(0.020)  # 22 ms with a hop at each end, both ways
    assert between(ground, 0, 2) == pytest.approx(0.070)
    assert between(ground, 0, 3) == pytest.approx(0.040)


def test_the_papers_members_are_as_far_apart_as_fibre_and_see_the_rendezvous_as_it_says() -> None:
    fleet = load_fleet("intercontinental", PAPER)
    ground = ground_of(fleet, Net.GEOGRAPHY)
    assert with_relayed_edge(fleet) == {0, 1, 2, 3, 4}
    arad, prague = fleet.sites[0], fleet.sites[1]
    assert arad is not None
    assert prague is not None
    fresh = load_fleet("intercontinental")
    paths = ground_of(fresh, Net.PATHS)
    assert fresh.edges[0, 1].kind is PathKind.DIRECT
    assert between(paths, 0, 1) == pytest.approx(fibre_rtt_s(arad, prague))
    rtts = [2 * ground.net.path(ground.server, machine).quality.latency_s for machine in ground.machines]
    assert min(rtts) >= 0.079
    assert max(rtts) <= 0.115


def test_under_the_overhead_network_every_edge_takes_its_part() -> None:
    ground = ground_of(load_fleet("us-central"), Net.OVERHEAD, 0.008)
    lans = {machine.attachments[0].lan for machine in ground.machines}
    assert len(lans) == 1
    for machine in ground.machines:
        attachment = machine.attachments[0]
        assert attachment.up.quality.latency_s + attachment.down.quality.latency_s == pytest.approx(0.008)
