"""How this machine can be reached, found out beside everything else and anew in every network epoch (Trio).

    start          survey: STUN probes from fresh sockets, a second or so; the relayed link waits for none of it
    known address  behind a NAT: ask the gateway for the port, and keep it open
    changed        interfaces, gateway, or the host by which the rendezvous sees us: a new epoch, all of it again

Whoever drives it hears :attr:`Hearing.on_news` when there is something to tell the others, and
:attr:`Hearing.on_epoch` when no path can be trusted any more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from secrets import token_bytes

import trio

from kafila.members import Sight, own_candidates
from kafila.nat.candidates import Candidate
from kafila.nat.driver import OpenStream, classify_network, keep_port_open, system_gateways
from kafila.nat.interfaces import EpochWatch, Surroundings
from kafila.nat.portmap import PortMapEvent, PortMapped
from kafila.nat.report import Allocator, Mapping, NatReport, PortMappingProtocol, describe
from kafila.nat.stun import TRANSACTION_ID_BYTES, binding_request, decode
from kafila.net import DatagramSocket, Network
from kafila.types import Address

LOOK_S = 1.0
"""How often the interfaces are looked at: a roaming laptop should not wait, and a look costs a millisecond."""
_ASK_AT_S = (0.0, 0.2, 0.4)
_ASK_FOR_S = 1.0
"""One more mapping, after the survey: three requests, and no longer than the survey itself waits for an answer."""


@dataclass(frozen=True, slots=True)
class Routers:
    """How to find and talk to this machine's gateways."""

    gateways: Callable[[], Awaitable[Sequence[str]]]
    """IPv4 default gateways, the preferred first."""
    open_stream: OpenStream | None = None
    """For UPnP, which needs TCP; ``None``: leave it out."""


async def _no_gateways() -> Sequence[str]:
    await trio.lowlevel.checkpoint()
    return ()


NO_ROUTERS = Routers(_no_gateways)
SYSTEM_ROUTERS = Routers(system_gateways, trio.open_tcp_stream)


@dataclass(frozen=True, slots=True)
class Hearing:
    """Who is told; ``tell`` takes a line for people."""

    on_news: Callable[[], None]
    on_epoch: Callable[[], None]
    tell: Callable[[str], None]


class Reachability:
    """What is known of how to reach ``port`` of this machine. ``port_mapping``: whether gateways may be asked."""

    def __init__(self, network: Network, port: int, routers: Routers, hearing: Hearing, *, port_mapping: bool) -> None:
        self.surveyed = trio.Event()
        """Set once the first survey is over, whatever it found."""
        self.sight = Sight()
        self._network = network
        self._port = port
        self._routers = routers
        self._hearing = hearing
        self._port_mapping = port_mapping
        self._protocol: PortMappingProtocol | None = None
        self._said = ""
        self._located = trio.Event()
        self._nudge = trio.Event()

    @property
    def candidates(self) -> list[Candidate]:
        """Where to look for this machine, as far as is known."""
        return own_candidates(self._network.interface_addresses(), self._port, self.sight)

    def observed(self, address: Address) -> None:
        """The rendezvous sees our socket here."""
        if address != self.sight.observed:
            self.sight = replace(self.sight, observed=address)
            self._located.set()
            self._nudge.set()
            self._hearing.on_news()

    async def run(self, servers: Callable[[], Awaitable[Sequence[Address]]]) -> None:
        """Until cancelled. ``servers`` are asked by STUN, the rendezvous first; looked up anew in every epoch."""
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._survey, servers)
                nursery.start_soon(self._keep_port)
                await self._next_epoch()
                nursery.cancel_scope.cancel()
            self._protocol = None
            self.sight = replace(self.sight, newest=None, mapped=None)
            self._hearing.on_epoch()
            self._hearing.on_news()

    async def recount(self, servers: Callable[[], Awaitable[Sequence[Address]]]) -> None:
        """A new peer is about to look for us: where does a sequential NAT stand now? For any other there is nothing to
        do."""
        if self.sight.report is not None and _is_sequential(self.sight.report):
            self.sight = replace(self.sight, newest=await newest_mapping(self._network, await servers()))
            self._hearing.on_news()

    # -- one epoch ----------------------------------------------------------------------------------------------------

    async def _survey(self, servers: Callable[[], Awaitable[Sequence[Address]]]) -> None:
        asked = await servers()
        report = await classify_network(self._network, asked)
        newest = await newest_mapping(self._network, asked) if _is_sequential(report) else None
        report = replace(report, port_mapping=self._protocol)
        self.sight = replace(self.sight, report=report, newest=newest)
        if self._located.is_set() or not report.udp_blocked:  # else the rendezvous itself is the news
            self._say(_in_words(report))
        self.surveyed.set()
        self._hearing.on_news()

    def _say(self, words: str) -> None:
        """Once: most epochs change the addresses and nothing else."""
        if words != self._said:
            self._hearing.tell(f"{'the network has changed' if self._said else 'network'}: {words}")
            self._said = words

    async def _keep_port(self) -> None:
        """Where a NAT lies between us and the rendezvous: elsewhere nobody needs a port opened."""
        await self._located.wait()
        if not self._port_mapping or not self._is_translated:
            return
        gateways = await self._routers.gateways()
        if not gateways:
            return
        try:
            await keep_port_open(
                self._network, gateways[0], self._port, self._port_said, open_stream=self._routers.open_stream
            )
        except* OSError:
            pass  # no socket to spare: then without

    @property
    def _is_translated(self) -> bool:
        return self._seen_host not in {interface.host for interface in self._network.interface_addresses()}

    def _port_said(self, event: PortMapEvent) -> None:
        """A claim to another host than the rendezvous sees is a lie, or true of a NAT that is not the last one."""
        mapped = None
        self._protocol = None
        if isinstance(event, PortMapped) and event.external.host == self._seen_host:
            mapped, self._protocol = event.external, event.protocol
        elif isinstance(event, PortMapped):
            self._hearing.tell(
                f"the gateway says it opened a port at {event.external.host}, which is not where we are seen: not used"
            )
        report = self.sight.report and replace(self.sight.report, port_mapping=self._protocol)
        if mapped != self.sight.mapped:
            self.sight = replace(self.sight, mapped=mapped, report=report)
            self._hearing.on_news()

    async def _next_epoch(self) -> None:
        await self._located.wait()
        host = self._seen_host
        interfaces = self._network.interface_addresses()
        gateways = await self._routers.gateways()
        watch = EpochWatch(Surroundings.of(interfaces, gateways))
        while True:
            with trio.move_on_after(LOOK_S):
                await self._nudge.wait()
            nudged, self._nudge = self._nudge.is_set(), trio.Event()
            if self._seen_host != host:
                return  # the rendezvous has proven it, so there is nothing to wait for
            if (now_there := self._network.interface_addresses()) != interfaces or nudged:
                interfaces, gateways = now_there, await self._routers.gateways()
            if watch.look(Surroundings.of(interfaces, gateways), trio.current_time()):
                return

    @property
    def _seen_host(self) -> str | None:
        return None if self.sight.observed is None else self.sight.observed.host


def nearest_server(servers: Sequence[Address], current: Address, interfaces: Sequence[Address]) -> Address:
    """Which of a rendezvous' addresses to use: the current one, unless this machine has lost that family."""
    own = [ip for interface in interfaces if not (ip := ip_address(interface.host)).is_link_local]
    families = {ip.version for ip in own if not ip.is_loopback}
    if not families or ip_address(current.host).version in families:
        return current
    return next((server for server in servers if ip_address(server.host).version in families), current)


async def newest_mapping(network: Network, servers: Sequence[Address]) -> Address | None:
    """Where a socket made just now is seen: the mapping that a sequential NAT counts on from. ``None``: not known."""
    transactions = [token_bytes(TRANSACTION_ID_BYTES) for _ in _ASK_AT_S]
    with suppress(OSError):
        socket = await network.bind()
        try:
            for server in servers[:1]:
                with trio.move_on_after(_ASK_FOR_S):
                    return await _ask(socket, server, transactions)
        finally:
            socket.close()
    return None


async def _ask(socket: DatagramSocket, server: Address, transactions: Sequence[bytes]) -> Address:
    async def send() -> None:
        began = trio.current_time()
        for after_s, transaction in zip(_ASK_AT_S, transactions, strict=True):
            await trio.sleep_until(began + after_s)
            await socket.send(binding_request(transaction), server)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while True:
            data, _ = await socket.receive()
            reply = decode(data)
            if reply is not None and reply.transaction_id in transactions and reply.reflexive is not None:
                nursery.cancel_scope.cancel()
                return reply.reflexive


def _is_sequential(report: NatReport) -> bool:
    return report.allocator is Allocator.SEQUENTIAL and Mapping.EIM not in report.mapping


def _in_words(report: NatReport) -> str:
    seen = report.reflexive_v4
    if report.on_public_address and seen is not None and not ip_address(seen.host).is_global:
        return "no NAT between this machine and the rendezvous"
    return describe(report)
