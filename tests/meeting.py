"""The virtual network with a rendezvous in it, where deployed nodes meet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from kafila.rendezvous_service import rendezvous
from kafila.ring.invite import HostPort
from sims.topology import VirtualNetwork
from tests.party import Party

W = TypeVar("W")


@asynccontextmanager
async def meeting(world: Callable[[VirtualNetwork, Party, HostPort], W]) -> AsyncIterator[W]:
    """``world`` of a network, a party in it, and where its rendezvous is; all of it ends with the block."""
    net = VirtualNetwork(seed=1)
    server = net.machine("rendezvous")
    async with net.running(), rendezvous(server) as running, trio.open_nursery() as nursery:
        yield world(net, Party(nursery), HostPort(server.hosts()[0], running.address.port))
        nursery.cancel_scope.cancel()
