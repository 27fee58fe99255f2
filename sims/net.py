"""Virtual machines and their sockets: ``kafila.net``'s protocols over the virtual network."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from ipaddress import ip_address
from typing import NamedTuple, TypeVarTuple

import trio

from kafila.types import Address, Transmit
from sims.fabric import Fabric
from sims.filtering import StatefulFirewall
from sims.freeze import Freezer, current_machine
from sims.lan import Attachment, Lan
from sims.link import PERFECT, Link, Quality
from sims.packet import MAX_UDP_PAYLOAD_BYTES, Drop, Packet, canonical, is_v6
from sims.trace import What

_Args = TypeVarTuple("_Args")

RECEIVE_BUFFER_BYTES = 212_992
"""Linux's default (net.core.rmem_default); what does not fit is dropped, as there."""

_BOOKKEEPING_BYTES = 256
"""The kernel charges a buffer for each packet's descriptor too, so that empty packets cannot fill memory."""

_EPHEMERAL_PORTS = range(49_152, 65_536)
"""RFC 6335 section 6."""

_ANY_V4 = "0.0.0.0"  # noqa: S104 - a wildcard of the virtual network
_LOOPBACK_HOSTS = {4: "127.0.0.1", 6: "::1"}
_LOOPBACK = Quality(mtu_bytes=65_536)
_ROUTE_CACHE_ENTRIES = 4096


class VirtualSocket:
    """A UDP socket of a virtual machine (a ``kafila.net.DatagramSocket``), bound to all its addresses."""

    def __init__(self, machine: Machine, port: int, buffer_bytes: int) -> None:
        self.machine = machine
        self.dropped = 0
        """Datagrams that found the receive buffer full."""
        self._port = port
        self._room = buffer_bytes
        self._inbox: deque[Packet] = deque()
        self._waiting = trio.lowlevel.ParkingLot()
        self._closed = False

    @property
    def address(self) -> Address:
        """The wildcard address of the machine's families, and the port."""
        return Address("::" if any(is_v6(host) for host in self.machine.hosts()) else _ANY_V4, self._port)

    async def send(self, data: bytes, to: Address) -> None:
        """Send one datagram. Raises ``trio.ClosedResourceError`` on a closed socket."""
        await trio.lowlevel.checkpoint()
        self.send_batch([Transmit(data, to)])

    def send_batch(self, datagrams: Sequence[Transmit]) -> None:
        """Send without waiting. Raises ``trio.ClosedResourceError`` on a closed socket."""
        if self._closed:
            raise trio.ClosedResourceError
        for data, to in datagrams:
            self.machine.send(self._port, data, to)

    async def receive(self) -> tuple[bytes, Address]:
        """The next datagram and its source. Raises ``trio.ClosedResourceError`` once closed."""
        return (await self.receive_batch(1))[0]

    async def receive_batch(self, limit: int) -> list[tuple[bytes, Address]]:
        """Wait for one datagram, then take up to ``limit``. Raises ``trio.ClosedResourceError`` once closed."""
        if self._inbox or self._closed:
            await trio.lowlevel.checkpoint()  # else parking is one
        while not self._inbox:
            if self._closed:
                raise trio.ClosedResourceError
            await self._waiting.park()
        taken = [self._inbox.popleft() for _ in range(min(limit, len(self._inbox)))]
        self._room += sum(_cost(packet) for packet in taken)
        return [(packet.data, packet.source) for packet in taken]

    def close(self) -> None:
        """Give the port back; a task waiting in ``receive`` gets ``trio.ClosedResourceError``."""
        if not self._closed:
            self._closed = True
            self._inbox.clear()
            self._waiting.unpark_all()
            self.machine.release(self._port)

    def put(self, packet: Packet) -> bool:
        """Take a packet from the network; False where the buffer has no room."""
        if _cost(packet) > self._room:
            self.dropped += 1
            return False
        self._room -= _cost(packet)
        self._inbox.append(packet)
        self._waiting.unpark()
        return True


def _cost(packet: Packet) -> int:
    return len(packet.data) + _BOOKKEEPING_BYTES


class Machine:
    """One computer on the virtual network (a ``kafila.net.Network``): interfaces, routes, sockets, a firewall."""

    def __init__(self, fabric: Fabric, name: str, freezer: Freezer) -> None:
        self.name = name
        self.attachments: list[Attachment] = []
        """Its interfaces, the default route's first."""
        self.firewall: StatefulFirewall | None = None
        self.udp_blocked = False
        self.is_plugged = True
        self.is_asleep = False
        self.sent = 0
        self.received = 0
        self.receive_buffer_bytes = RECEIVE_BUFFER_BYTES
        self._fabric = fabric
        self._freezer = freezer
        self._random = fabric.random(f"machine/{name}")
        self._rank = fabric.new_rank()
        self._serial = 0
        self._loopback = Link(fabric, f"{name} loopback", _LOOPBACK)
        self._sockets: dict[int, VirtualSocket] = {}
        self._routes: dict[str, _Route | None] = {}

    # -- kafila.net.Network ----------------------------------------------------------------------------------------

    async def bind(self, port: int = 0) -> VirtualSocket:
        """A socket on every address of the machine. Raises OSError (EADDRINUSE) where the port is taken."""
        await trio.lowlevel.checkpoint()
        if port == 0:
            port = self._free_port()
        elif port in self._sockets:
            raise OSError(errno.EADDRINUSE, f"UDP port {port} of {self.name} is in use")
        socket = self._sockets[port] = VirtualSocket(self, port, self.receive_buffer_bytes)
        return socket

    def interface_addresses(self) -> list[Address]:
        """Addresses of the interfaces in their order, loopback last, port 0."""
        hosts = self.hosts() if self.is_plugged else []
        versions = sorted({6 if is_v6(host) else 4 for host in hosts} or {4})
        return [Address(host, 0) for host in (*hosts, *(_LOOPBACK_HOSTS[version] for version in versions))]

    def _free_port(self) -> int:
        if len(self._sockets) >= len(_EPHEMERAL_PORTS):
            raise OSError(errno.EADDRINUSE, f"{self.name} has no free UDP port")
        while (port := self._random.choice(_EPHEMERAL_PORTS)) in self._sockets:
            pass
        return port

    # -- beyond the protocol ---------------------------------------------------------------------------------------

    def gateways(self) -> list[Address]:
        """Default gateways' addresses on the machine's networks, port 0: where port mapping is asked for."""
        routers = [(a.lan, a.lan.router) for a in self.attachments]
        return [Address(host, 0) for lan, router in routers if router is not None for host in router.inside_hosts(lan)]

    def hosts(self) -> list[str]:
        """Addresses of all interfaces, loopback apart."""
        return [host for attachment in self.attachments for host in attachment.hosts]

    async def run(self, main: Callable[[*_Args], Awaitable[object]], *args: *_Args) -> None:
        """Run a program on this machine. Only what runs so is frozen when the machine sleeps."""
        token = current_machine.set(self.name)
        try:
            await main(*args)
        finally:
            current_machine.reset(token)

    def sleep(self, duration_s: float) -> None:
        """Close the lid for ``duration_s``: nothing arrives, nothing leaves, and no task of :meth:`run` takes a step.

        On waking, the clock has gone on and every timer that expired meanwhile fires at once: a clock that counts
        suspended time (Windows, Linux's CLOCK_BOOTTIME), which is harder on a program than one that does not.
        """
        self.is_asleep = True
        self._freezer.freeze(self.name)
        self._fabric.note(self.name, f"falls asleep for {duration_s:g} s")
        self._fabric.at(self._fabric.now + duration_s, self._wake)

    def _wake(self) -> None:
        self.is_asleep = False
        self._fabric.note(self.name, "wakes")
        self._freezer.thaw(self.name)

    def unplug(self) -> None:
        """Every interface goes dead; programs go on."""
        self.is_plugged = False
        self._fabric.note(self.name, "is unplugged")

    def plug(self) -> None:
        """Undo :meth:`unplug`."""
        self.is_plugged = True
        self._fabric.note(self.name, "is plugged in")

    def attach(
        self,
        lan: Lan,
        hosts: list[str],
        *,
        default_route: bool = False,
        up: Quality = PERFECT,
        down: Quality = PERFECT,
    ) -> Attachment:
        """One more interface. ``default_route``: strangers are reached through it from now on (a full-tunnel VPN)."""
        attachment = lan.attach(self, hosts, up=up, down=down)
        self.attachments.insert(0 if default_route else len(self.attachments), attachment)
        self._routes.clear()
        return attachment

    def detach(self, attachment: Attachment) -> None:
        """One interface fewer; packets on their way to it are lost."""
        attachment.lan.detach(attachment)
        self.attachments.remove(attachment)
        self._routes.clear()

    # -- packets ---------------------------------------------------------------------------------------------------

    def send(self, port: int, data: bytes, to: Address) -> None:
        """One datagram from local ``port``, at this instant; what has no way out is dropped and counted."""
        self.sent += 1
        self._serial += 1
        depart = partial(self._depart, port, bytes(data), to)
        self._fabric.push(self._fabric.now, self._rank, self._serial, depart)

    def _depart(self, port: int, data: bytes, to: Address, now: float) -> None:
        route = self._route(to.host)
        if route is None:
            self._fabric.drop(self.name, Drop.NO_ROUTE, Packet(Address(_ANY_V4, port), to, data), now)
            return
        packet = Packet(Address(route.source, port), Address(route.to, to.port), data)
        if self._fabric.sinks:
            self._fabric.record(now, self.name, What.SENT, packet)
        refusal = self._refusal(packet)
        if refusal is not None:
            self._fabric.drop(self.name, refusal, packet, now)
        elif route.through is None:
            self._loopback.carry(packet, now, self._receive)
        elif not self.is_plugged:
            self._fabric.drop(self.name, Drop.ASLEEP, packet, now)
        else:
            if self.firewall is not None:
                self.firewall.sent(packet.source, packet.to, now)
            route.through.send(packet, now)

    def arrive(self, packet: Packet, now: float, through: Attachment) -> None:
        """A packet has come down the cable ``through``."""
        if not self.is_plugged:
            self._fabric.drop(self.name, Drop.ASLEEP, packet, now)
        elif self.firewall is not None and not self.firewall.admits(packet.to, packet.source, now):
            self._fabric.drop(self.name, Drop.FIREWALL, packet, now)
        elif packet.to.host not in through.hosts:
            self._fabric.drop(self.name, Drop.NO_ROUTE, packet, now)  # a machine does not forward
        else:
            self._receive(packet, now)

    def release(self, port: int) -> None:
        """A socket has closed."""
        del self._sockets[port]

    def _refusal(self, packet: Packet) -> Drop | None:
        if self.is_asleep:
            return Drop.ASLEEP
        if self.udp_blocked:
            return Drop.UDP_BLOCKED
        return Drop.TOO_BIG if len(packet.data) > MAX_UDP_PAYLOAD_BYTES else None

    def _receive(self, packet: Packet, now: float) -> None:
        socket = self._sockets.get(packet.to.port)
        if self.is_asleep:
            self._fabric.drop(self.name, Drop.ASLEEP, packet, now)
        elif self.udp_blocked:
            self._fabric.drop(self.name, Drop.UDP_BLOCKED, packet, now)
        elif socket is None:
            self._fabric.drop(self.name, Drop.NO_SOCKET, packet, now)
        elif not socket.put(packet):
            self._fabric.drop(self.name, Drop.BUFFER_FULL, packet, now)
        else:
            self.received += 1
            if self._fabric.sinks:
                self._fabric.record(now, self.name, What.RECEIVED, packet)

    # -- routes ----------------------------------------------------------------------------------------------------

    def _route(self, host: str) -> _Route | None:
        if host not in self._routes:
            if len(self._routes) >= _ROUTE_CACHE_ENTRIES:
                self._routes.clear()
            self._routes[host] = self._find_route(host)
        return self._routes[host]

    def _find_route(self, host: str) -> _Route | None:
        to = canonical(host)
        if to is None:
            return None
        address = ip_address(to)
        if address.is_loopback or to in self.hosts():
            return _Route(None, to, to)
        best: tuple[int, Attachment, str] | None = None
        for attachment in self.attachments:
            source = attachment.host_for(to)
            specificity = attachment.lan.specificity(address)
            if source is not None and specificity is not None and (best is None or specificity > best[0]):
                best = (specificity, attachment, source)
        return None if best is None else _Route(best[1], best[2], to)


class _Route(NamedTuple):
    through: Attachment | None
    """None: the loopback interface."""
    source: str
    to: str
    """The destination in its canonical spelling."""
