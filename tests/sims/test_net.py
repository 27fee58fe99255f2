"""Virtual sockets and machines: the promises of ``kafila.net``, and what a machine can suffer."""

from __future__ import annotations

import errno
from ipaddress import ip_address

import pytest
import trio

from kafila.net import DatagramSocket, Network
from kafila.types import Address, Transmit
from sims.filtering import StatefulFirewall
from sims.link import Quality
from sims.net import Machine
from sims.packet import MAX_UDP_PAYLOAD_BYTES, Drop
from sims.topology import VirtualNetwork
from tests.sims.tools import at, reaches


async def test_a_machine_is_a_network_and_its_sockets_are_sockets(autojump_clock: trio.testing.MockClock) -> None:
    async def echo(network: Network) -> None:
        socket: DatagramSocket = await network.bind(7)
        while True:
            data, source = await socket.receive()
            await socket.send(data.upper(), source)

    net = VirtualNetwork(rtt_s=0.1)
    server, client = net.machine("server"), net.nat().machine("client")
    async with net.running(), trio.open_nursery() as nursery:
        nursery.start_soon(echo, server)
        socket = await client.bind()
        await socket.send(b"hello", Address(server.hosts()[0], 7))
        assert await socket.receive() == (b"HELLO", Address(server.hosts()[0], 7))
        assert trio.current_time() == pytest.approx(0.1)
        nursery.cancel_scope.cancel()
    assert (client.sent, client.received, server.sent, server.received) == (1, 1, 1, 1)


async def test_ports(autojump_clock: trio.testing.MockClock) -> None:
    machine = VirtualNetwork().machine("m")
    first, second = await machine.bind(), await machine.bind()
    assert first.address.port != second.address.port
    with pytest.raises(OSError, match="in use") as raised:
        await machine.bind(first.address.port)
    assert raised.value.errno == errno.EADDRINUSE
    first.close()
    first.close()
    assert (await machine.bind(first.address.port)).address == first.address


async def test_a_closed_socket_says_so(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    socket = await net.machine("m").bind()

    async def wait() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await socket.receive()

    async with net.running():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(1)
            socket.close()
        with pytest.raises(trio.ClosedResourceError):
            socket.send_batch([Transmit(b"", Address("127.0.0.1", 1))])
        other = await net.machine("other").bind()
        assert await reaches(other, at(socket), other) is None
        assert net.drops[Drop.NO_SOCKET] == 1


async def test_batches(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    one, other = await net.machine("one").bind(), await net.machine("other").bind()
    async with net.running():
        one.send_batch([Transmit(bytes([n]), at(other)) for n in range(5)])
        assert [data[0] for data, _ in await other.receive_batch(3)] == [0, 1, 2]
        assert [data[0] for data, _ in await other.receive_batch(3)] == [3, 4]


async def test_a_full_receive_buffer_drops_and_counts(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    sender, machine = await net.machine("one").bind(), net.machine("other")
    machine.receive_buffer_bytes = 10_000
    receiver = await machine.bind()
    async with net.running():
        sender.send_batch([Transmit(bytes(1000), at(receiver)) for _ in range(10)])
        await trio.sleep(1)
        assert receiver.dropped == net.drops[Drop.BUFFER_FULL] == 3
        assert len(await receiver.receive_batch(100)) == 7
        sender.send_batch([Transmit(bytes(1000), at(receiver))])
        assert await receiver.receive()


async def test_what_cannot_be_sent_is_dropped(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    socket = await net.machine("m").bind()
    async with net.running():
        for data, host in ((b"", "10.9.9.9"), (b"", "no address"), (b"", "2a10::9")):
            await socket.send(data, Address(host, 1))
        await socket.send(bytes(MAX_UDP_PAYLOAD_BYTES + 1), Address("11.0.0.99", 1))
        await trio.sleep(1)
        assert net.drops == {Drop.NO_ROUTE: 3, Drop.TOO_BIG: 1}


async def test_loopback(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    machine = net.nat(ipv6=True).machine("m")
    one, other = await machine.bind(), await machine.bind()
    async with net.running():
        for host in ("127.0.0.1", "::1", *machine.hosts()):
            assert await reaches(one, Address(host, other.address.port), other) == Address(host, one.address.port)
        await one.send(bytes(60_000), Address("127.0.0.1", other.address.port))
        assert await other.receive()
    assert trio.current_time() == 0.0


async def test_addresses_are_understood_in_any_spelling(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    one, other = await net.machine("one", v6=True).bind(), await net.machine("other", v6=True).bind()
    v4, v6 = other.machine.hosts()
    async with net.running():
        for host in (f"::ffff:{v4}", ip_address(v6).exploded.upper()):
            assert await reaches(one, Address(host, other.address.port), other) is not None


def test_interface_addresses_put_the_useful_first_and_loopback_last() -> None:
    net = VirtualNetwork()
    machine = net.nat(lan="192.168.7.0/24", ipv6=True).machine("m")
    net.add_junk_interfaces(machine, 32)
    hosts = [address.host for address in machine.interface_addresses()]
    assert hosts[0] == "192.168.7.10"
    assert hosts[1] == machine.hosts()[1]
    assert hosts[-2:] == ["127.0.0.1", "::1"]
    assert len(set(hosts)) == 2 + 32 + 2
    machine.unplug()
    assert [address.host for address in machine.interface_addresses()] == ["127.0.0.1"]


async def test_a_host_firewall_lets_answers_in_only(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    guarded = await net.machine("guarded", firewall=StatefulFirewall(timeout_s=30)).bind()
    stranger = await net.machine("stranger").bind()
    async with net.running():
        assert await reaches(stranger, at(guarded), guarded) is None
        assert net.drops[Drop.FIREWALL] == 1
        assert await reaches(guarded, at(stranger), stranger)
        for _ in range(3):  # each packet that is let in renews
            assert await reaches(stranger, at(guarded), guarded)
            await trio.sleep(20)
        assert await reaches(stranger, at(guarded), guarded)
        await trio.sleep(30)
        assert await reaches(stranger, at(guarded), guarded) is None


async def test_udp_blocked_on_a_host(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    one, other = await net.machine("one").bind(), await net.machine("other").bind()
    one.machine.udp_blocked = True
    async with net.running():
        assert await reaches(one, at(other), other) is None
        assert await reaches(other, at(one), one) is None
        assert net.drops == {Drop.UDP_BLOCKED: 2}


async def test_a_split_tunnel_vpn_and_a_full_one(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    server = await net.machine("server").bind()
    home, exit_ = net.nat("home"), net.nat("vpn exit")
    a, b = home.machine("a"), net.nat().machine("b")
    friends = net.private_lan("friends", "10.8.0.0/16")
    for machine in (a, b):
        machine.attach(friends.lan, friends.new_hosts(v4=True, v6=None, host=None))
    one, other = await a.bind(), await b.bind()
    async with net.running():
        assert await reaches(one, at(other, host=1), other) == at(one, host=1)
        seen = await reaches(one, at(server), server)
        assert seen is not None
        assert seen.host in home.external_hosts
        a.attach(exit_.lan, exit_.new_hosts(v4=True, v6=None, host=None), default_route=True)
        seen = await reaches(one, at(server), server)
        assert seen is not None
        assert seen.host in exit_.external_hosts
        assert await reaches(one, at(other, host=1), other) is not None


async def test_a_machine_roams_with_its_socket_open(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    server = await net.machine("server", v6=True).bind()
    home, cafe = net.nat("home"), net.nat("cafe", ipv6=True)
    a = home.machine("a")
    socket = await a.bind(5000)
    async with net.running():
        before = await reaches(socket, at(server), server)
        assert before is not None
        await server.send(b"late", before)
        await trio.sleep(0.010)
        net.move(a, cafe, v4=False)
        assert len(a.hosts()) == 1
        assert await reaches(socket, at(server), server) is None
        assert net.drops == {Drop.NO_ROUTE: 2}  # the packet on its way found nobody; IPv4 has no way out any more
        assert await reaches(socket, at(server, host=1), server) == at(socket)
        assert await reaches(server, at(socket), socket) == at(server, host=1)


async def test_a_packet_on_the_last_cable_is_lost_when_its_owner_moves(
    autojump_clock: trio.testing.MockClock,
) -> None:
    net = VirtualNetwork(rtt_s=0.0)
    sender = await net.machine("sender").bind()
    mover = await net.machine("mover", down=Quality(latency_s=0.5)).bind()
    async with net.running():
        await sender.send(b"", at(mover))
        await trio.sleep(0.2)
        net.move(mover.machine, net.nat())
        await trio.sleep(1)
        assert net.drops == {Drop.GONE: 1}


async def ticking(machine: Machine, ticks: list[float]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tick, machine, ticks)


async def tick(machine: Machine, ticks: list[float]) -> None:
    socket = await machine.bind(9)
    while True:
        with trio.move_on_after(60):
            await socket.receive()
        ticks.append(trio.current_time())


async def test_a_sleeping_machine_takes_no_step_and_hears_nothing(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    sleeper, watcher = net.machine("sleeper"), net.machine("watcher")
    asleep: list[float] = []
    awake: list[float] = []
    async with net.running(), trio.open_nursery() as nursery:
        nursery.start_soon(sleeper.run, ticking, sleeper, asleep)
        nursery.start_soon(watcher.run, ticking, watcher, awake)
        net.at(130, sleeper.sleep, 600)
        probe = await net.machine("probe").bind()
        await trio.sleep(200)
        for machine in (sleeper, watcher):
            await probe.send(b"anybody?", Address(machine.hosts()[0], 9))
        await trio.sleep(640)
        nursery.cancel_scope.cancel()
    assert asleep == [60.0, 120.0, 730.0, 790.0]
    assert awake == pytest.approx([60, 120, 180, 200.02, *(200.02 + 60 * n for n in range(1, 11))])
    assert net.drops[Drop.ASLEEP] == 1


async def test_a_sleeping_machine_can_be_cancelled_when_it_wakes(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    sleeper, other = net.machine("sleeper"), net.machine("other sleeper")
    async with net.running():
        with trio.move_on_at(20):
            async with trio.open_nursery() as nursery:
                for machine in (sleeper, other):
                    nursery.start_soon(machine.run, ticking, machine, [])
                net.at(10, sleeper.sleep, 100)
                net.at(15, other.sleep, 200)
        assert trio.current_time() == 215.0


async def test_sleep_also_stops_the_packets_of_programs_it_cannot_freeze(
    autojump_clock: trio.testing.MockClock,
) -> None:
    net = VirtualNetwork()
    one, other = await net.machine("one").bind(), await net.machine("other").bind()
    async with net.running():
        one.machine.sleep(5)
        assert await reaches(one, at(other), other) is None
        await trio.sleep(5)
        assert await reaches(one, at(other), other)


async def test_unplugged(autojump_clock: trio.testing.MockClock) -> None:
    net = VirtualNetwork()
    one, other = await net.machine("one").bind(), await net.machine("other").bind()
    async with net.running():
        one.machine.unplug()
        assert await reaches(one, at(other), other) is None
        assert await reaches(other, at(one), one) is None
        one.machine.plug()
        assert await reaches(other, at(one), one)
