"""Trio: runs the machines that probe and that ask for ports over a machine's network. Decides nothing."""

from __future__ import annotations

import math
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from secrets import token_bytes

import trio

from kafila.nat.classify import classify, combine
from kafila.nat.gateways import from_netstat, from_proc_net_route
from kafila.nat.portmap import PortMapEvent, PortMapped, PortMapper, client_host_for
from kafila.nat.probe import SOCKETS, ProbePlan
from kafila.nat.report import NatReport
from kafila.nat.upnp import UpnpMapper
from kafila.nat.upnp_messages import HttpRequest, parse_response
from kafila.net import DatagramSocket, Network
from kafila.types import Address

_RECEIVE_BATCH = 16  # no socket has more answers than that under way
_INBOX = 64  # answers waiting for the plan; what does not fit is lost, as in a network, and asked for again

_EXCHANGE_S = 2.0
"""For one HTTP exchange with a gateway a cable away; slow ones have been seen to take a second."""
_CHUNK_BYTES = 16_384
_FAREWELL_S = 0.3
"""How long giving a port back may hold up the end of the process. A lease ends by itself."""

_Arrival = tuple[int, bytes, Address]
OpenStream = Callable[[str, int], Awaitable[trio.abc.Stream]]
"""Opens a TCP connection, as ``trio.open_tcp_stream`` does."""


async def classify_network(
    network: Network, servers: Sequence[Address], *, random_bytes: Callable[[int], bytes] = token_bytes
) -> NatReport:
    """The NAT report of the machine behind ``network``, from STUN ``servers`` (IP literals, the rendezvous first).

    Takes a round trip or a few, about a second where nothing answers, three at the very most. Every outcome is a
    report: a machine that has no sockets to spare gets one that knows nothing.
    """
    interfaces = [address.host for address in network.interface_addresses()]
    try:
        async with _fresh_sockets(network, SOCKETS) as sockets:
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
async def _fresh_sockets(network: Network, count: int) -> AsyncIterator[list[DatagramSocket]]:
    sockets: list[DatagramSocket] = []
    try:
        for _ in range(count):
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


# --- ports at the gateway ---------------------------------------------------------------------------------------------


async def system_gateways() -> list[str]:
    """The IPv4 default gateways of the machine this process runs on; empty where it will not say."""
    with suppress(OSError):  # Linux has this file
        return from_proc_net_route(await trio.Path("/proc/net/route").read_text())
    with suppress(OSError):  # macOS and the BSDs have this program
        asked = ["netstat", "-rn", "-f", "inet"]
        done = await trio.run_process(asked, capture_stdout=True, stderr=subprocess.DEVNULL, check=False)
        return from_netstat(done.stdout.decode(errors="replace"))
    return []


async def keep_port_open(
    network: Network,
    gateway: str,
    port: int,
    report: Callable[[PortMapEvent], None],
    *,
    open_stream: OpenStream | None = None,
    random_bytes: Callable[[int], bytes] = token_bytes,
) -> None:
    """Have ``gateway`` keep UDP ``port`` of this machine open, until cancelled; then give it back.

    ``report`` hears within half a second whether the gateway claims to, and of every change after that. UPnP is tried
    where PCP and NAT-PMP fail, if there is ``open_stream``: it needs TCP.
    """
    now = trio.current_time()
    client_host = client_host_for(gateway, network.interface_addresses())
    mapper = PortMapper(gateway, client_host, port, now, random_bytes)
    if client_host is None or open_stream is None:
        await _keep_by_datagrams(network, mapper, report)
        return
    try_upnp = trio.Event()

    def hear(event: PortMapEvent) -> None:
        if isinstance(event, PortMapped) or try_upnp.is_set():
            report(event)
        else:
            try_upnp.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_keep_by_datagrams, network, mapper, hear)
        await try_upnp.wait()
        upnp = UpnpMapper(gateway, client_host, port, trio.current_time(), random_bytes)
        await _keep_by_upnp(network, upnp, report, open_stream)


async def _keep_by_datagrams(network: Network, mapper: PortMapper, report: Callable[[PortMapEvent], None]) -> None:
    async with _fresh_sockets(network, 1) as (socket,):
        try:
            while True:
                socket.send_batch(mapper.datagrams_to_send(trio.current_time()))
                while (event := mapper.next_event()) is not None:
                    report(event)
                await _hear_or_wait(socket, mapper)
        finally:
            mapper.close(trio.current_time())
            socket.send_batch(mapper.datagrams_to_send(trio.current_time()))


async def _keep_by_upnp(
    network: Network, mapper: UpnpMapper, report: Callable[[PortMapEvent], None], open_stream: OpenStream
) -> None:
    async with _fresh_sockets(network, 1) as (socket,):
        try:
            while True:
                socket.send_batch(mapper.datagrams_to_send(trio.current_time()))
                await _make_exchanges(mapper, open_stream)
                while (event := mapper.next_event()) is not None:
                    report(event)
                await _hear_or_wait(socket, mapper)
        finally:
            mapper.close()
            with trio.move_on_after(_FAREWELL_S, shield=True):
                await _make_exchanges(mapper, open_stream)


async def _hear_or_wait(socket: DatagramSocket, mapper: PortMapper | UpnpMapper) -> None:
    """Give the machine the next datagrams, or the passing of time."""
    timer = mapper.next_timer()
    with trio.move_on_at(math.inf if timer is None else timer):
        for data, source in await socket.receive_batch(_RECEIVE_BATCH):
            mapper.receive(data, source, trio.current_time())
        return
    mapper.handle_timer(trio.current_time())


async def _make_exchanges(mapper: UpnpMapper, open_stream: OpenStream) -> None:
    while (request := mapper.request_to_make()) is not None:
        mapper.response_received(await _exchange(request, open_stream), trio.current_time())


async def _exchange(request: HttpRequest, open_stream: OpenStream) -> bytes | None:
    """All that the gateway answers; ``None`` where it cannot be reached or takes too long."""
    data = b""
    with trio.move_on_after(_EXCHANGE_S):
        try:
            async with await open_stream(request.to.host, request.to.port) as stream:
                await stream.send_all(request.data)
                while parse_response(data, is_all=False) is None and (more := await stream.receive_some(_CHUNK_BYTES)):
                    data += more
                return data
        except (OSError, trio.BrokenResourceError):
            return None
    return None
