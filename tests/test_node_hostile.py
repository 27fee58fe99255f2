"""Whole nodes before a rendezvous that turns on them: it can refuse service, and nothing else; and they notice."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import MockClock

from kafila.endpoint import Endpoint
from kafila.errors import KafilaError
from kafila.ring.identity import make_identity
from kafila.ring.invite import HostPort
from sims.topology import VirtualNetwork
from tests.party import Guest, Party, answer_of, first_of, solo
from tests.ring.hostile import HostileRendezvous, Mischief
from tests.test_node import firsts

QUESTION = "a b c d"
PATIENCE_S = 60.0

MISCHIEF = {
    "reads": Mischief(),
    "replays": Mischief(replay=0.7),
    "invents": Mischief(invent=0.5),
    "alters": Mischief(alter=0.3),
    "drops": Mischief(drop=0.3),
    "swaps certificates": Mischief(swap=1.0),
    "redirects": Mischief(redirect=0.3, reorder=0.3),
    "forges the greeting": Mischief(greeting=1.0),
    "everything": Mischief(drop=0.1, alter=0.1, replay=0.3, reorder=0.1, redirect=0.1, invent=0.2, swap=0.1),
}


async def form(party: Party, rendezvous_host: str, port: int, guests: list[Guest]) -> bool:
    """Whether a session came to serve. It may well not: refusing service is what a rendezvous can do."""
    try:
        code = await party.host(guests[0], 3, rendezvous=HostPort(rendezvous_host, port))
    except KafilaError:
        return False
    for guest in guests[1:]:
        party.join(guest, code)
    with trio.move_on_after(PATIENCE_S):
        for guest in guests:
            await first_of(guest.serving.wait, guest.ended.wait)
    return all(guest.serving.is_set() for guest in guests)


@pytest.mark.parametrize("what", MISCHIEF)
@pytest.mark.parametrize("seed", [1, 2])
async def test_it_gains_nothing_and_is_noticed(what: str, seed: int, autojump_clock: MockClock) -> None:
    net = VirtualNetwork(seed=seed)
    server = net.machine("rendezvous")
    hostile = HostileRendezvous(make_identity(), random.Random(seed).randbytes, random.Random(seed), MISCHIEF[what])
    async with net.running(), trio.open_nursery() as nursery:
        socket = await server.bind()
        nursery.start_soon(Endpoint(socket, hostile).run)
        party = Party(nursery)
        guests = [party.member(f"member-{n}", net.nat(f"home {n}").machine(f"machine {n}")) for n in range(3)]
        if await form(party, server.hosts()[0], socket.address.port, guests):
            for guest in guests:
                assert await answer_of(guest, QUESTION) == solo(QUESTION, firsts(guests))
        elif what in {"reads", "replays", "invents"}:
            raise AssertionError([guest.error for guest in guests])
        nursery.cancel_scope.cancel()
    everything = b"".join(hostile.seen)
    for code in guests[0].screen.codes:
        assert code.partition("@")[0].encode() not in everything
        assert code.replace("-", "").partition("@")[0][5:20].encode() not in everything
    assert b"member-1" not in everything
    assert b"stand-in" not in everything
    if hostile.tampered and what != "forges the greeting":
        told = [line for guest in guests for line in guest.screen.errors]
        assert any("distrust the rendezvous" in line for line in told)
