"""Every member knows how every edge of the ring travels: deployed nodes in the virtual network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from kafila import members
from kafila.api.engine import EdgeFacts, RingFacts
from kafila.ring.agreement import KNOWN
from kafila.ring.invite import HostPort, parse_code
from kafila.ring.ringedges import AGAIN_S, NEWS_RATIO
from sims.filtering import Filtering
from sims.nat import Mapping
from sims.net import Machine
from sims.ports import RandomPorts
from sims.topology import Place, VirtualNetwork
from tests.meeting import meeting
from tests.party import Guest, Party, answer_of, form_ring


class World:
    """A host in the open and two friends behind NATs that keep them apart: the edge between these is relayed."""

    def __init__(self, net: VirtualNetwork, party: Party, where: HostPort) -> None:
        self.net = net
        self.party = party
        self.where = where
        homes: list[Place] = [net, self._hard("home of a"), self._hard("home of b")]
        self.guests = [
            party.member(name, home.machine(name)) for name, home in zip(("host", "a", "b"), homes, strict=True)
        ]

    def _hard(self, name: str) -> Place:
        """Two of these cannot be punched through."""
        return self.net.nat(name, mapping=Mapping.APDM, filtering=Filtering.APDF, ports=RandomPorts())

    async def form(self) -> None:
        await form_ring(self.party, self.guests, self.where)

    def edges(self, seen_by: Guest) -> dict[frozenset[str], EdgeFacts]:
        """By the names of the two ends."""
        ring = ring_of(seen_by)
        names = [member.name for member in ring.members]
        return {frozenset({names[at], names[(at + 1) % 3]}): edge for at, edge in enumerate(ring.edges)}


def ring_of(guest: Guest) -> RingFacts:
    assert guest.node is not None
    ring = guest.node.ring()
    assert ring is not None
    return ring


APART = frozenset({"a", "b"})


async def test_all_know_the_relayed_edge_and_that_it_became_direct(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        await w.form()
        await trio.sleep(5)
        for guest in w.guests:
            known = w.edges(guest)
            assert all(edge.measured for edge in known.values()), guest.name
            assert {ends for ends, edge in known.items() if edge.kind == "relayed"} == {APART}, guest.name
        first = [w.edges(guest)[APART].rtt_s for guest in w.guests]
        assert all(rtt_s is not None and rtt_s > 0 for rtt_s in first)

        a = w.guests[1].network
        assert isinstance(a, Machine)
        w.net.move(a, w.net.nat("cafe", filtering=Filtering.EIF))
        await trio.sleep(30)
        for guest in w.guests:
            assert w.edges(guest)[APART].kind == "direct", guest.name
            assert guest.node is not None
            assert "relayed" not in guest.node.describe_ring()
        seen = [w.edges(guest)[APART].rtt_s for guest in w.guests]
        assert all(rtt_s is not None for rtt_s in seen)
        told, *own = (rtt_s or 0.0 for rtt_s in seen)  # the host is no end of it
        assert min(own) / (1 + 2 * NEWS_RATIO) < told < max(own) * (1 + 2 * NEWS_RATIO)
        assert len(await answer_of(w.guests[0], "a b")) > 0


async def test_a_guest_knows_all_edges_too(autojump_clock: MockClock) -> None:
    async with meeting(World) as w:
        await w.form()
        await trio.sleep(5)
        visitor = w.party.member("visitor", w.net.nat("home of visitor").machine("visitor"))
        (code,) = w.guests[0].screen.codes
        w.party.join(visitor, parse_code(code), visiting=True)
        with trio.fail_after(30):
            await visitor.serving.wait()
        await trio.sleep(AGAIN_S + 2)
        assert ring_of(visitor).me == -1
        assert all(edge.measured for edge in w.edges(visitor).values())
        assert w.edges(visitor)[APART].kind == "relayed"


async def test_what_an_older_member_would_have_to_tell_is_unknown_and_nothing_breaks(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = iter([KNOWN, (), KNOWN])  # a, or b, is of an older version
    introduce = members.member_info
    async with meeting(World) as w:
        with monkeypatch.context() as patch:
            patch.setattr("kafila.node.member_info", lambda *of: replace(introduce(*of), knows=next(known)))
            await w.form()
        await trio.sleep(15)
        pictures = [sum(edge.measured for edge in w.edges(guest).values()) for guest in w.guests]
        assert sorted(pictures) == [2, 2, 3]
        for guest in w.guests:
            assert guest.error is None
            assert len(await answer_of(guest, "a b")) > 0
        unknown = [guest for guest, known_edges in zip(w.guests, pictures, strict=True) if known_edges == 2]
        for guest in unknown:
            assert guest.node is not None
            assert guest.node.describe_ring().count("unknown (planned: ") == 1
