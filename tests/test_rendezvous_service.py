"""The service on sockets: the simulator's and the real loopback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio

from kafila.commands import run_rendezvous
from kafila.endpoint import Endpoint
from kafila.errors import UsageError
from kafila.nat.driver import classify_network
from kafila.nat.report import Filtering, Mapping
from kafila.nat.stun import STALE_NONCE, Change, MessageClass, StunMessage, binding_request, decode
from kafila.net import DatagramSocket, Network
from kafila.rendezvous_service import Alternate, rendezvous, serve
from kafila.ring.control import MemberJoined, Signal
from kafila.ring.identity import make_identity
from kafila.ring.rendezvous_client import Event, Joined, Lost, Relayed, RendezvousClient
from kafila.types import Address, Transmit
from kafila.udp import TrioNetwork, UdpSocket
from tests.patience import PATIENCE_S

LOOPBACK = "127.0.0.1"


class Screen:
    """A console that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def status(self, line: str) -> None:
        self.lines.append(line)

    error = invite = progress = status


class Member:
    """A client on a real socket."""

    def __init__(self, socket: DatagramSocket, server: Address) -> None:
        self.machine = RendezvousClient(make_identity(), server, Random(0))
        self.endpoint = Endpoint(socket, self.machine, self._drain)
        self.socket = socket
        self.events: list[Event] = []
        self._news = trio.Event()

    def _drain(self) -> None:
        while (event := self.machine.next_event()) is not None:
            self.events.append(event)
            self._news.set()
            self._news = trio.Event()

    async def hears(self, kind: type[Event], but: Callable[[Event], bool] = lambda event: True) -> Event:
        """Wait for an event of a kind."""
        with trio.fail_after(PATIENCE_S):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and but(event):
                        self.events.remove(event)
                        return event
                await self._news.wait()


@asynccontextmanager
async def member(network: Network, server: Address) -> AsyncIterator[Member]:
    socket = await network.bind()
    made = Member(socket, server)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.endpoint.run)
            yield made
            nursery.cancel_scope.cancel()
    finally:
        socket.close()


async def test_members_meet_signal_and_relay_over_real_sockets() -> None:
    network = TrioNetwork()
    async with rendezvous(network) as running:
        server = Address(LOOPBACK, running.address.port)
        async with member(network, server) as host, member(network, server) as guest:
            host.machine.create("AB3DE", 2, b"greeting", trio.current_time())
            host.endpoint.poke()
            await host.hears(Joined)
            guest.machine.join("AB3DE", trio.current_time())
            guest.endpoint.poke()
            joined = await guest.hears(Joined)
            assert isinstance(joined, Joined)
            assert joined.observed == Address(LOOPBACK, guest.socket.address.port)
            arrived = await host.hears(MemberJoined)
            assert isinstance(arrived, MemberJoined)
            guest.machine.signal(joined.host, b"sealed")
            guest.endpoint.poke()
            assert await host.hears(Signal) == Signal(arrived.member, b"sealed")
            guest.socket.send_batch([guest.machine.relay(joined.host, b"\x40 datagram", trio.current_time())])
            assert await host.hears(Relayed) == Relayed(arrived.member, b"\x40 datagram")


async def test_one_line_says_where_and_members_are_told_of_the_end() -> None:
    network, screen = TrioNetwork(), Screen()
    async with trio.open_nursery() as outer:
        async with trio.open_nursery() as service:
            service.start_soon(serve, network, 0, screen)
            with trio.fail_after(PATIENCE_S):
                while not screen.lines:
                    await trio.lowlevel.checkpoint()
            (line,) = screen.lines
            port = int(line.split("UDP port ")[1].split()[0])
            guest = Member(await network.bind(), Address(LOOPBACK, port))
            outer.start_soon(guest.endpoint.run)
            guest.machine.create("AB3DE", 2, b"", trio.current_time())
            guest.endpoint.poke()
            await guest.hears(Joined)
            service.cancel_scope.cancel()
        assert await guest.hears(Lost) == Lost("the rendezvous is closing")
        outer.cancel_scope.cancel()
    guest.socket.close()
    assert "STUN on" in line


async def test_the_port_is_free_again_and_a_taken_one_is_explained() -> None:
    network = TrioNetwork()
    async with rendezvous(network) as running:
        port = running.address.port
        with pytest.raises(UsageError, match=f"UDP port {port} cannot be had"):
            await serve(network, port, Screen())
    async with rendezvous(network, port) as again:
        assert again.address.port == port


class Crowded(TrioNetwork):
    """A machine whose ports are all taken but those nobody chooses."""

    async def bind(self, port: int = 0) -> UdpSocket:
        if port:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return await super().bind(port)


async def test_the_second_port_is_any_where_the_next_is_taken() -> None:
    async with rendezvous(Crowded()) as running:
        assert len(set(running.stun_ports)) == 2


async def test_garbage_does_no_harm() -> None:
    network, random = TrioNetwork(), Random(0)
    async with rendezvous(network) as running:
        server = Address(LOOPBACK, running.address.port)
        stranger = await network.bind()
        for _ in range(200):
            garbage = [Transmit(random.randbytes(random.randrange(1, 1400)), server) for _ in range(5)]
            stranger.send_batch([*garbage, Transmit(garbage[0].data, Address(LOOPBACK, running.stun_ports[1]))])
            await trio.lowlevel.checkpoint()
        stranger.close()
        assert running.server.connections == 0
        async with member(network, server) as host:
            host.machine.create("AB3DE", 2, b"", trio.current_time())
            host.endpoint.poke()
            await host.hears(Joined)


async def test_stun_answers_on_both_ports_and_from_the_other_one_only_with_a_cookie() -> None:
    async with rendezvous(TrioNetwork()) as running:
        asking = await TrioNetwork().bind()

        async def ask(to: int, change: Change | None = None, nonce: bytes = b"") -> tuple[StunMessage, int]:
            """The reply of the service's socket number ``to``, and the number of the one it came from."""
            request = binding_request(os.urandom(12), change=change, nonce=nonce)
            await asking.send(request, Address(LOOPBACK, running.stun_ports[to]))
            with trio.fail_after(PATIENCE_S):
                data, source = await asking.receive()
            reply = decode(data)
            assert reply is not None
            assert len(data) <= len(request)
            return reply, running.stun_ports.index(source.port)

        other_port = Change(address=False, port=True)
        for asked in (0, 1):
            plain, answered = await ask(asked)
            assert answered == asked
            assert plain.reflexive == Address(LOOPBACK, asking.address.port)
            assert plain.other_address == Address("0.0.0.0", running.stun_ports[1 - asked])  # noqa: S104  - no address
            refused, answered = await ask(asked, other_port)
            assert (refused.error, answered) == (STALE_NONCE, asked)
            changed, answered = await ask(asked, other_port, plain.nonce)
            assert (changed.kind, answered) == (MessageClass.SUCCESS, 1 - asked)
        asking.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have 127.0.0.1 alone")
async def test_a_second_address_completes_the_survey() -> None:
    second = "127.0.0.2"
    alternate = Alternate(TrioNetwork(second), LOOPBACK, second)
    async with rendezvous(TrioNetwork(LOOPBACK), 0, alternate) as running:
        report = await classify_network(TrioNetwork(), [Address(LOOPBACK, running.address.port)])
    assert (report.mapping, report.filtering) == (Mapping.EIM, Filtering.EIF)


async def test_a_second_address_that_is_not_ours_is_explained() -> None:
    stranger = "203.0.113.9"
    with pytest.raises(UsageError, match="does not have that address"):
        await serve(TrioNetwork(LOOPBACK), 0, Screen(), Alternate(TrioNetwork(stranger), LOOPBACK, stranger))


@pytest.mark.parametrize(
    ("bind", "second"),
    [("[::]:7443", "127.0.0.2"), ("127.0.0.1:7443", "127.0.0.1"), ("127.0.0.1:7443", "::1"), ("localhost:1", "x")],
)
def test_two_addresses_must_be_two_of_one_family(bind: str, second: str) -> None:
    with pytest.raises(UsageError, match="--alt-address"):
        run_rendezvous(bind, second)
