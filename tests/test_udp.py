from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from kafila import udp
from kafila.types import Address, Transmit
from kafila.udp import TrioNetwork, UdpSocket, _runs

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


class Meddled:
    """An operating system's socket, some of whose calls fail as we like."""

    def __init__(self, real: socket.socket, **calls: Callable[..., Any]) -> None:
        self._real, self._calls = real, calls

    def __getattr__(self, name: str) -> Any:
        return self._calls.get(name) or getattr(self._real, name)


def meddle(bound: UdpSocket, **calls: Callable[..., Any]) -> None:
    bound._socket = Meddled(bound._socket, **calls)  # type: ignore[assignment]  # close enough


def failing(number: int, times: int = 1_000_000) -> Callable[..., Any]:
    """A call that fails ``times`` times, and then says that there is nothing."""
    left = times

    def call(*_: Any) -> Any:
        nonlocal left
        left -= 1
        raise OSError(number, "meddled") if left >= 0 else BlockingIOError

    return call


Pair = tuple[UdpSocket, UdpSocket, Address]


async def make_pair() -> Pair:
    """Two sockets, and the second one's address over IPv4."""
    network = TrioNetwork()
    one, other = await network.bind(), await network.bind()
    return one, other, Address("127.0.0.1", other.address.port)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    one, other, to = await make_pair()
    yield one, other, to
    one.close()
    other.close()


async def gather(bound: UdpSocket, count: int) -> list[bytes]:
    received: list[bytes] = []
    while len(received) < count:
        received += [data for data, _ in await bound.receive_batch(64)]
    return received


# Addresses


async def test_an_ipv4_peer_is_seen_and_written_to_by_its_plain_address(pair: Pair) -> None:
    one, other, to = pair
    await one.send(b"there", to)
    data, source = await other.receive()
    assert (data, source) == (b"there", Address("127.0.0.1", one.address.port))
    await other.send(b"back", source)
    assert await one.receive() == (b"back", to)


@needs_ipv6
async def test_one_socket_speaks_both_families(pair: Pair) -> None:
    one, other, _ = pair
    await one.send(b"six", Address("::1", other.address.port))
    assert await other.receive() == (b"six", Address("::1", one.address.port))
    assert one.address.host == "::"


async def test_without_ipv6_a_socket_speaks_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = udp._bound

    def bound(family: socket.AddressFamily, port: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no IPv6 here")
        return real(family, port)

    monkeypatch.setattr(udp, "_bound", bound)
    one, other, to = await make_pair()
    assert one.address.host == "0.0.0.0"  # noqa: S104  - the wildcard it was bound to
    await one.send(b"four", to)
    assert (await other.receive())[0] == b"four"
    one.send_batch([Transmit(b"six", Address("::1", to.port))])
    assert one.counters.unreachable == 1
    one.close()
    other.close()


async def test_a_taken_port_is_refused() -> None:
    network = TrioNetwork()
    taken = await network.bind()
    with pytest.raises(OSError, match="in use"):
        await network.bind(taken.address.port)
    taken.close()


# Batches


async def test_a_batch_arrives_whole_and_in_order_whatever_its_sizes(pair: Pair) -> None:
    one, other, to = pair
    sizes = [1452, 1452, 1452, 700, 1452, 1452, 9, 1200, 1200, 1, 0, 5]
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    one.send_batch([Transmit(data, to) for data in sent])
    assert await gather(other, len(sent)) == sent
    assert one.counters.sent == other.counters.received == len(sent)


async def test_more_than_one_system_call_can_carry_arrives(pair: Pair) -> None:
    one, other, to = pair
    sent = [number.to_bytes(2, "big") * 700 for number in range(150)]
    for first in range(0, len(sent), 50):  # the receiver keeps pace
        one.send_batch([Transmit(data, to) for data in sent[first : first + 50]])
        assert await gather(other, 50) == sent[first : first + 50]


async def test_receive_takes_from_a_run_one_by_one(pair: Pair) -> None:
    one, other, to = pair
    sent = [bytes([number]) * 100 for number in range(5)]
    one.send_batch([Transmit(data, to) for data in sent])
    assert [(await other.receive())[0] for _ in range(2)] == sent[:2]
    assert await gather(other, 3) == sent[2:]


@given(st.lists(st.tuples(st.integers(0, 1500), st.sampled_from([1, 2])), max_size=200), st.sampled_from([1, 64]))
def test_runs_keep_the_order_and_obey_the_kernel(datagrams: list[tuple[int, int]], most: int) -> None:
    transmits = [Transmit(bytes(size), Address("192.0.2.1", port)) for size, port in datagrams]
    runs = list(_runs(transmits, most))
    assert [Transmit(data, to) for run, to in runs for data in run] == transmits
    for run, _ in runs:
        assert len(run) <= most
        assert len({len(data) for data in run[:-1]}) <= 1
        assert len(run[-1]) <= len(run[0])
        assert sum(map(len, run)) <= 65_507


# Trouble


@pytest.mark.parametrize(
    "to", [Address("192.0.2.1", 0), Address("not an address", 9), Address("256.1.1.1", 9)], ids=["port", "name", "v4"]
)
async def test_what_cannot_be_reached_is_loss(to: Address, pair: Pair) -> None:
    one, _, _ = pair
    one.send_batch([Transmit(b"x", to), Transmit(b"x", to)])
    await one.send(b"x", to)
    assert one.counters.unreachable == 3


async def test_a_datagram_that_is_too_large_is_loss_and_segmenting_goes_on(pair: Pair) -> None:
    one, other, to = pair
    before = one._segments
    one.send_batch([Transmit(bytes(66_000), to), Transmit(b"small", to)])
    assert (await other.receive())[0] == b"small"
    assert one.counters.unreachable == 1
    assert one._segments is before


async def test_a_refused_run_is_sent_singly_from_then_on(pair: Pair) -> None:
    one, other, to = pair
    one._segments = True
    meddle(one, sendmsg=failing(errno.EIO))
    sent = [Transmit(bytes([number]) * 50, to) for number in range(4)]
    one.send_batch(sent)
    assert await gather(other, 4) == [data for data, _ in sent]
    assert not one._segments
    one.send_batch(sent)
    assert await gather(other, 4) == [data for data, _ in sent]


async def test_a_run_to_nowhere_does_not_end_segmenting(pair: Pair) -> None:
    one, _, to = pair
    one._segments = True
    meddle(one, sendmsg=failing(errno.ENETUNREACH), sendto=failing(errno.ENETUNREACH))
    one.send_batch([Transmit(b"x", to)] * 3)
    assert one._segments
    assert one.counters.unreachable == 3


async def test_without_room_a_batch_is_dropped_and_counted(pair: Pair) -> None:
    one, _, to = pair
    meddle(one, sendto=failing(errno.EAGAIN), sendmsg=failing(errno.EAGAIN))
    one.send_batch([Transmit(b"x", to), Transmit(b"longer", to), Transmit(b"longer", to)])
    assert one.counters.no_room == 3
    assert one.counters.sent == 0


async def test_without_room_send_waits(pair: Pair) -> None:
    one, other, to = pair
    real, refusals = one._socket.sendto, 2

    def sendto(*arguments: Any) -> int:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise BlockingIOError
        return real(*arguments)

    meddle(one, sendto=sendto)
    await one.send(b"patience", to)
    assert (await other.receive())[0] == b"patience"
    assert one.counters.no_room == 0


async def test_the_networks_complaints_are_swallowed_on_receipt(pair: Pair) -> None:
    one, other, to = pair
    real, complaints = other._socket.recvmsg_into, 2

    def recvmsg_into(*arguments: Any) -> Any:
        nonlocal complaints
        complaints -= 1
        if complaints >= 0:
            raise ConnectionRefusedError
        return real(*arguments)

    meddle(other, recvmsg_into=recvmsg_into)
    await one.send(b"at last", to)
    assert (await other.receive())[0] == b"at last"
    assert other.counters.receive_errors == 2


async def test_closing_wakes_who_waits_and_may_be_done_twice(pair: Pair) -> None:
    one, _, to = pair
    woken = False

    async def wait() -> None:
        nonlocal woken
        with pytest.raises(trio.ClosedResourceError):
            await one.receive_batch(8)
        woken = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        one.close()
        one.close()
    assert woken
    with pytest.raises(trio.ClosedResourceError):
        one.send_batch([Transmit(b"x", to)])
    with pytest.raises(trio.ClosedResourceError):
        await one.receive()


# Interfaces


def test_a_machines_own_addresses_come_without_zones_and_loopback_last() -> None:
    addresses = TrioNetwork().interface_addresses()
    hosts = [address.host for address in addresses]
    assert "127.0.0.1" in hosts
    loopback = [host.startswith("127.") or host == "::1" for host in hosts]
    assert loopback == sorted(loopback)
    assert not any("%" in host or host.lower().startswith("fe80") for host in hosts)
    assert all(address.port == 0 for address in addresses)


def test_the_way_out_comes_first_and_what_is_down_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(host: str) -> Any:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return SimpleNamespace(family=family, address=host)

    interfaces = {
        "lo": [entry("127.0.0.1"), entry("::1")],
        "bridge": [entry("172.17.0.1")],
        "off": [entry("10.9.9.9")],
        "self": [entry("169.254.3.4")],
        "wifi": [entry("fe80::1%wifi"), entry("2001:db8:5::7"), entry("192.168.1.20")],
    }
    up = {name: SimpleNamespace(isup=name != "off") for name in interfaces}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)
    monkeypatch.setattr("psutil.net_if_stats", lambda: up)
    outward = {socket.AF_INET: "192.168.1.20", socket.AF_INET6: "2001:db8:5::7"}
    monkeypatch.setattr(udp, "_outward_host", lambda family: outward[family])
    assert [address.host for address in TrioNetwork().interface_addresses()] == [
        "192.168.1.20",
        "2001:db8:5::7",
        "172.17.0.1",
        "169.254.3.4",
        "127.0.0.1",
        "::1",
    ]
