"""Which pairs of NATs two peers can cross, by trying: every class pair, both filter scopes.

Nothing here knows how the NATs work inside. Two peers learn their reflexive addresses from one server, are told each
other's, and then keep sending to every address they know of: the one told, and each source something arrived from.
What arrived, with the source it was seen to come from and the address it was sent to, is all the evidence.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import trio

from kafila.types import Address
from sims.filtering import Filtering
from sims.nat import FilterScope, Mapping
from sims.net import VirtualSocket
from sims.topology import VirtualNetwork
from tests.sims.tools import mapped

TRUTH = json.loads((Path(__file__).parents[1] / "nat" / "data" / "pair_matrix.json").read_text())
CLASSES = {f"{m.name}/{f.name}": (m, f) for m, f in product(Mapping, Filtering)}

ROUNDS = 8
"""The longest way to a verdict is four packets there and back; twice that is enough."""
KNOWN_ADDRESSES = 4
"""Two address-and-port-dependent NATs make a new mapping for each answer, without end."""

Pairs = set[tuple[Address, Address]]
"""(A's external address, B's external address) that a packet has travelled between."""


class Peer:
    def __init__(self, socket: VirtualSocket) -> None:
        self.socket = socket
        self.targets: list[Address] = []
        self.arrived: set[tuple[Address, Address]] = set()
        """(source as seen, destination as sent to)"""

    async def send_to_all(self) -> None:
        for to in self.targets:
            await self.socket.send(f"{to.host} {to.port}".encode(), to)

    async def listen(self) -> None:
        while True:
            data, source = await self.socket.receive()
            host, port = data.decode().split()
            self.arrived.add((source, Address(host, int(port))))
            if source not in self.targets and len(self.targets) < KNOWN_ADDRESSES:
                self.targets.append(source)


async def punch(
    one: tuple[Mapping, Filtering], other: tuple[Mapping, Filtering], scope: FilterScope, seed: int
) -> tuple[Pairs, Pairs]:
    """The address pairs that packets from A to B, and from B to A, got through on."""
    net = VirtualNetwork(seed)
    server = await net.machine("server").bind(3478)
    peers = []
    for name, (mapping, filtering) in (("a", one), ("b", other)):
        nat = net.nat(mapping=mapping, filtering=filtering, scope=scope)
        peers.append(Peer(await nat.machine(name).bind()))
    a, b = peers
    async with net.running(), trio.open_nursery() as nursery:
        a.targets, b.targets = [await mapped(b.socket, server)], [await mapped(a.socket, server)]
        nursery.start_soon(a.listen)
        nursery.start_soon(b.listen)
        for _ in range(ROUNDS):
            await a.send_to_all()
            await b.send_to_all()
            await trio.sleep(0.2)
        nursery.cancel_scope.cancel()
    return {(source, to) for source, to in b.arrived}, {(to, source) for source, to in a.arrived}


def verdict(there: Pairs, back: Pairs) -> str:
    if there & back:
        return "direct"
    if there and back:
        return "asymmetric"
    return "forward" if there else "backward" if back else "none"


@pytest.mark.parametrize("scope", FilterScope)
@pytest.mark.parametrize("row", CLASSES)
async def test_a_row_of_the_matrix(autojump_clock: trio.testing.MockClock, scope: FilterScope, row: str) -> None:
    found = {
        column: verdict(*await punch(CLASSES[row], CLASSES[column], scope, seed)) for seed, column in enumerate(CLASSES)
    }
    assert found == TRUTH[scope.value][row]
