"""Trio: runs the probing machines over a machine's network. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from secrets import token_bytes

import trio

from kafila.nat.classify import classify, combine
from kafila.nat.probe import SOCKETS, ProbePlan
from kafila.nat.report import NatReport
from kafila.net import DatagramSocket, Network
from kafila.types import Address

_RECEIVE_BATCH = 16  # no socket has more answers than that under way
_INBOX = 64  # answers waiting for the plan; what does not fit is lost, as in a network, and asked for again

_Arrival = tuple[int, bytes, Address]


async def classify_network(
    network: Network, servers: Sequence[Address], *, random_bytes: Callable[[int], bytes] = token_bytes
) -> NatReport:
    """The NAT report of the machine behind ``network``, from STUN ``servers`` (IP literals, the rendezvous first).

    Takes a round trip or a few, about a second where nothing answers, three at the very most. Every outcome is a
    report: a machine that has no sockets to spare gets one that knows nothing.
    """
    interfaces = [address.host for address in network.interface_addresses()]
    try:
        async with _fresh_sockets(network) as sockets:
            ports = [socket.address.port for socket in sockets]
            plans = {
                version: ProbePlan(asked, ports, interfaces, trio.current_time(), random_bytes)
                for version in (4, 6)
                if (asked := _reachable_servers(servers, interfaces, version))
            }
            await _run(plans, sockets)
    except OSError:
        return NatReport()
    reports = {version: classify(plan.observations()) for version, plan in plans.items()}
    return combine(reports.get(4), reports.get(6))


def _reachable_servers(servers: Sequence[Address], interfaces: Sequence[str], version: int) -> list[Address]:
    """Those of one IP version, if the machine has an address of that version to ask them from."""
    here = [host for host in map(ip_address, interfaces) if host.version == version and not host.is_link_local]
    asked = [server for server in servers if ip_address(server.host).version == version]
    return asked if here else []


@asynccontextmanager
async def _fresh_sockets(network: Network) -> AsyncIterator[list[DatagramSocket]]:
    sockets: list[DatagramSocket] = []
    try:
        for _ in range(SOCKETS):
            sockets.append(await network.bind())  # noqa: PERF401 - those bound before one fails must be closed
        yield sockets
    finally:
        for socket in sockets:
            socket.close()


async def _run(plans: dict[int, ProbePlan], sockets: list[DatagramSocket]) -> None:
    arrivals, inbox = trio.open_memory_channel[_Arrival](_INBOX)
    async with trio.open_nursery() as nursery:
        for number, socket in enumerate(sockets):
            nursery.start_soon(_receive, number, socket, arrivals)
        while any(not plan.finished for plan in plans.values()):
            now = trio.current_time()
            for plan in plans.values():
                for number, data, to in plan.datagrams_to_send(now):
                    await sockets[number].send(data, to)
            await _wait(plans, inbox)
        nursery.cancel_scope.cancel()


async def _wait(plans: dict[int, ProbePlan], inbox: trio.MemoryReceiveChannel[_Arrival]) -> None:
    """Give the plans the next arrival, or the passing of time."""
    timers = [timer for plan in plans.values() if (timer := plan.next_timer()) is not None]
    with trio.move_on_at(min(timers, default=math.inf)):
        number, data, source = await inbox.receive()
        plan = plans.get(ip_address(source.host).version)
        if plan is not None:
            plan.receive(number, data, source, trio.current_time())
        return
    for plan in plans.values():
        plan.handle_timer(trio.current_time())


async def _receive(number: int, socket: DatagramSocket, arrivals: trio.MemorySendChannel[_Arrival]) -> None:
    while True:
        for data, source in await socket.receive_batch(_RECEIVE_BATCH):
            try:
                arrivals.send_nowait((number, data, source))
            except trio.WouldBlock:
                break
