"""How a node comes to its rendezvous: its own inside the process, or one somewhere else (Trio)."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from random import SystemRandom

import trio

from kafila.backend import Backend
from kafila.errors import KafilaError, RendezvousUnreachable, SessionError, SessionFull, UnknownSession, UsageError
from kafila.mesh import Mesh
from kafila.net import DatagramSocket, Network
from kafila.rendezvous_service import rendezvous
from kafila.ring.agreement import ModelOffer
from kafila.ring.control import MAX_MEMBERS, Reason
from kafila.ring.identity import Identity, make_identity
from kafila.ring.invite import HostPort, SessionCode
from kafila.ring.rendezvous_client import RendezvousClient
from kafila.ring.sealing import derive_keys
from kafila.room import Room
from kafila.settings import HostSettings, NodeSettings
from kafila.types import Address


@dataclass(frozen=True, slots=True)
class Door:
    """What a node has before it speaks: who it is, the session's keys in use, and a socket."""

    identity: Identity
    code: SessionCode
    offer: ModelOffer | None
    """The host's; a member hears of it."""
    socket: DatagramSocket
    servers: tuple[Address, ...]
    """The rendezvous, by every address it has; the mesh begins with the first."""
    mesh: Mesh
    room: Room

    async def stun_servers(self, others: Sequence[HostPort]) -> list[Address]:
        """Whom to ask where this machine is seen: the rendezvous, then others, those that have an address."""
        found = list(self.servers)
        for where in others:
            with suppress(OSError):
                found += await _look_up(where)
        return found

    def knock(self, settings: NodeSettings, now: float) -> None:
        """Ask the rendezvous to open the session, or to let us in."""
        if isinstance(settings.role, HostSettings):
            # Guests need seats, too: how many members take part is the host's to say, not the rendezvous'.
            self.mesh.control.create(self.code.locator, MAX_MEMBERS, self.room.greeting(), now)
        else:
            self.mesh.control.join(self.code.locator, now)


@asynccontextmanager
async def open_door(settings: NodeSettings, network: Network, backend: Backend) -> AsyncIterator[Door]:
    """Everything up to the first datagram. The host's checkpoint is read first: without one there is no session.

    A host without a rendezvous runs one for as long as the door is open. Raises ModelError, RendezvousUnreachable, and
    UsageError when the port is taken.
    """
    role, offer = settings.role, None
    async with AsyncExitStack() as stack:
        if isinstance(role, HostSettings):
            offer = await backend.offer(role.model, role.context, role.slots)
            if role.rendezvous is None:
                running = await stack.enter_async_context(rendezvous(network))
                shared, server = _addresses_of(network, running.address.port)
                servers = [server]
            else:
                shared, servers = role.rendezvous, await resolve(role.rendezvous)
            code = SessionCode.new(os.urandom, shared)
        else:
            code, servers = role.code, await resolve(role.rendezvous)
        identity, keys, random = make_identity(), derive_keys(code), SystemRandom()
        udp = await _bind(network, settings.port)
        stack.callback(udp.close)
        mesh = Mesh(identity, keys.link, RendezvousClient(identity, servers[0], random), random)
        yield Door(identity, code, offer, udp, tuple(servers), mesh, Room(mesh, keys, identity.node_id))


async def _bind(network: Network, port: int) -> DatagramSocket:
    try:
        return await network.bind(port)
    except OSError as error:
        raise UsageError(
            f"UDP port {port} cannot be used ({error.strerror}): leave out --port, or name another"
        ) from error


def _addresses_of(network: Network, port: int) -> tuple[HostPort, Address]:
    """Where friends find a rendezvous in this process (the machine's most useful address), and where we do."""
    addresses = network.interface_addresses()
    if not addresses:
        raise RendezvousUnreachable("this machine has no network address, not even loopback: nobody could join")
    nearest = next((a.host for a in addresses if ip_address(a.host).is_loopback), addresses[0].host)
    return HostPort(addresses[0].host, port), Address(nearest, port)


async def resolve(where: HostPort) -> list[Address]:
    """The addresses of a rendezvous, at least one. Raises RendezvousUnreachable when its name means nothing here."""
    try:
        return await _look_up(where)
    except OSError as error:
        raise RendezvousUnreachable(
            f"the rendezvous {where.host} has no address ({error.strerror}): check its name and your network"
        ) from error


async def _look_up(where: HostPort) -> list[Address]:
    """What a host is called by numbers: the first address of each family. Raises OSError where it has none."""
    try:
        return [Address(str(ip_address(where.host)), where.port)]
    except ValueError:
        pass  # a name: ask for its addresses
    try:
        found = await trio.socket.getaddrinfo(where.host, where.port, type=socket.SOCK_DGRAM)
    except UnicodeError as error:  # such as a label longer than the DNS has
        raise socket.gaierror(socket.EAI_NONAME, "it cannot be a name") from error
    first = {family: Address(str(to[0]), where.port) for family, _, _, _, to in reversed(found)}
    # A rendezvous on IPv4 is reached from everywhere; one on IPv6 alone still is where IPv6 works.
    return [address for _, address in sorted(first.items(), key=lambda item: item[0] != socket.AF_INET)]


def refusal(reason: Reason, *, hosting: bool) -> KafilaError:
    """The rendezvous' no, in words."""
    match reason:
        case Reason.UNKNOWN_SESSION:
            return UnknownSession("no such session: it has ended, or lives at another rendezvous; ask for a new code")
        case Reason.FULL:
            return SessionFull("the session has all of its members: ask the host for a larger --members")
        case Reason.VERSION:
            return SessionError("the rendezvous speaks another version: install the same version of kafila on both")
        case Reason.EVICTED:
            return SessionError("the host put this member out of the session")
        case Reason.REPLACED:
            return SessionError("the same member has joined from elsewhere")
        case _:
            what = "open" if hosting else "join"
            return SessionError(f"the rendezvous is too busy to {what} a session: try again in a minute")
