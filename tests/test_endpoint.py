from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from kafila.endpoint import MIN_TIMER_S, Endpoint
from kafila.ring.identity import make_identity
from kafila.ring.quic import Message, QuicConnection, Stream
from kafila.types import Address, Transmit
from kafila.udp import TrioNetwork

PEER = Address("192.0.2.1", 7)
QUIC = b"\x40"  # a first byte that somebody answers to


class PaperSocket:
    """A socket whose wire is a list."""

    address = Address("192.0.2.2", 9)

    def __init__(self) -> None:
        self.sent: list[Transmit] = []
        self.arrived: deque[tuple[bytes, Address]] = deque()
        self.closed = False
        self._news = trio.Event()

    def arrive(self, *datagrams: bytes) -> None:
        self.arrived.extend((data, PEER) for data in datagrams)
        self._news.set()

    async def send(self, data: bytes, to: Address) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append(Transmit(data, to))

    async def receive(self) -> tuple[bytes, Address]:
        return (await self.receive_batch(1))[0]

    async def receive_batch(self, limit: int) -> list[tuple[bytes, Address]]:
        while not self.arrived and not self.closed:
            await self._news.wait()
            self._news = trio.Event()
        await trio.lowlevel.checkpoint()
        if self.closed:
            raise trio.ClosedResourceError
        return [self.arrived.popleft() for _ in range(min(limit, len(self.arrived)))]

    def send_batch(self, datagrams: Sequence[Transmit]) -> None:
        self.sent.extend(datagrams)

    def close(self) -> None:
        self.closed = True
        self._news.set()


@dataclass
class Diary:
    """A machine that writes down what it is asked, and says what it is told to."""

    lines: list[tuple[str, object]] = field(default_factory=list)
    to_say: list[bytes] = field(default_factory=list)
    alarm: float | None = None
    on_receive: Callable[[bytes], None] = lambda _: None
    on_alarm: Callable[[], None] = lambda: None

    def receive(self, data: bytes, source: Address, now: float) -> None:
        assert source == PEER
        self.lines.append(("receive", data))
        self.on_receive(data)

    def handle_timer(self, now: float) -> None:
        assert self.alarm is not None
        assert self.alarm <= now
        self.lines.append(("alarm", now))
        self.alarm = None
        self.on_alarm()

    def next_timer(self) -> float | None:
        return self.alarm

    def datagrams_to_send(self, now: float) -> list[Transmit]:
        said, self.to_say = self.to_say, []
        if said:
            self.lines.append(("send", len(said)))
        return [Transmit(data, PEER) for data in said]


@pytest.fixture
def paper() -> PaperSocket:
    return PaperSocket()


async def test_all_that_has_arrived_is_taken_before_anything_is_answered(
    paper: PaperSocket, nursery: trio.Nursery
) -> None:
    machine = Diary()
    machine.on_receive = lambda data: machine.to_say.extend([data])
    paper.arrive(QUIC + b"1", QUIC + b"2", QUIC + b"3")
    nursery.start_soon(Endpoint(paper, machine).run)
    await wait_all_tasks_blocked()
    assert [what for what, _ in machine.lines] == ["receive", "receive", "receive", "send"]
    assert [data for data, _ in paper.sent] == [QUIC + b"1", QUIC + b"2", QUIC + b"3"]


async def test_a_poke_sends_at_once(paper: PaperSocket, nursery: trio.Nursery) -> None:
    machine = Diary()
    endpoint = Endpoint(paper, machine)
    nursery.start_soon(endpoint.run)
    await wait_all_tasks_blocked()
    machine.to_say.append(b"now")
    endpoint.poke()
    assert [data for data, _ in paper.sent] == [b"now"]
    assert endpoint.address == paper.address


async def test_the_owner_hears_before_the_machine_answers_and_what_it_adds_goes_along(
    paper: PaperSocket, nursery: trio.Nursery
) -> None:
    machine, heard = Diary(), 0

    def on_progress() -> None:
        nonlocal heard
        if machine.lines and machine.lines[-1][0] == "receive":
            heard += 1
            machine.to_say += [b"the owner's", b"words"]
        endpoint.poke()  # allowed, and not needed

    endpoint = Endpoint(paper, machine, on_progress)
    nursery.start_soon(endpoint.run)
    await wait_all_tasks_blocked()
    paper.arrive(QUIC)
    await wait_all_tasks_blocked()
    assert heard == 1
    assert machine.lines[-1] == ("send", 2)


async def test_what_the_owner_adds_after_a_flush_leaves_too(paper: PaperSocket, nursery: trio.Nursery) -> None:
    machine = Diary()

    def on_progress() -> None:
        if len(paper.sent) in (1, 2):
            machine.to_say.append(b"and more")

    endpoint = Endpoint(paper, machine, on_progress)
    nursery.start_soon(endpoint.run)
    await wait_all_tasks_blocked()
    machine.to_say.append(b"first")
    endpoint.poke()
    assert [data for data, _ in paper.sent] == [b"first", b"and more", b"and more"]


async def test_unknown_datagrams_are_counted_and_kept_from_the_machine(
    paper: PaperSocket, nursery: trio.Nursery
) -> None:
    machine = Diary()
    endpoint = Endpoint(paper, machine)
    nursery.start_soon(endpoint.run)
    paper.arrive(b"", b"\x01", QUIC, b"\x3f not STUN either")
    await wait_all_tasks_blocked()
    assert endpoint.unknown_datagrams == 3
    assert machine.lines == [("receive", QUIC)]


# Time


async def test_an_alarm_rings_on_time_and_what_it_says_leaves(
    paper: PaperSocket, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    machine, begin = Diary(alarm=trio.current_time() + 5), trio.current_time()
    machine.on_alarm = lambda: machine.to_say.append(b"ring")
    nursery.start_soon(Endpoint(paper, machine).run)
    await trio.sleep(4.999)
    assert not machine.lines
    await trio.sleep(0.002)
    assert machine.lines == [("alarm", begin + 5), ("send", 1)]


@pytest.mark.parametrize("moved_to", [1.0, 9.0])
async def test_a_moved_alarm_rings_once_and_at_its_new_time(
    paper: PaperSocket, nursery: trio.Nursery, autojump_clock: MockClock, moved_to: float
) -> None:
    begin = trio.current_time()
    machine = Diary(alarm=begin + 5)
    endpoint = Endpoint(paper, machine)
    nursery.start_soon(endpoint.run)
    await trio.sleep(0.5)
    machine.alarm = begin + moved_to
    endpoint.poke()
    await trio.sleep(20)
    assert machine.lines == [("alarm", begin + moved_to)]


async def test_an_alarm_set_by_a_datagram_rings(
    paper: PaperSocket, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    machine = Diary()

    def on_receive(_: bytes) -> None:
        machine.alarm = trio.current_time() + 2

    machine.on_receive = on_receive
    nursery.start_soon(Endpoint(paper, machine).run)
    await trio.sleep(1)
    paper.arrive(QUIC)
    await trio.sleep(5)
    assert [what for what, _ in machine.lines] == ["receive", "alarm"]


async def test_a_machine_that_always_wants_to_be_called_is_called_slowly(
    paper: PaperSocket, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    machine = Diary(alarm=0.0)

    def on_alarm() -> None:
        machine.alarm = 0.0

    machine.on_alarm = on_alarm
    nursery.start_soon(Endpoint(paper, machine).run)
    await trio.sleep(0.1)
    assert 0 < len(machine.lines) <= 0.1 / MIN_TIMER_S + 1


async def test_alarms_ring_under_constant_traffic(
    paper: PaperSocket, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    machine = Diary(alarm=trio.current_time() + 1)
    nursery.start_soon(Endpoint(paper, machine).run)
    for _ in range(30):
        paper.arrive(QUIC)
        await trio.sleep(0.1)
    assert "alarm" in [what for what, _ in machine.lines]


# Ends


async def test_a_machine_that_raises_is_seen(paper: PaperSocket) -> None:
    machine = Diary()

    def on_receive(_: bytes) -> None:
        raise ZeroDivisionError

    machine.on_receive = on_receive
    paper.arrive(QUIC)
    with pytest.RaisesGroup(ZeroDivisionError):
        await Endpoint(paper, machine).run()


async def test_cancelling_loses_nothing_that_has_arrived(paper: PaperSocket, nursery: trio.Nursery) -> None:
    machine = Diary()
    endpoint = Endpoint(paper, machine)
    with trio.CancelScope() as scope:
        scope.cancel()
        paper.arrive(QUIC)
        await endpoint.run()
    assert scope.cancelled_caught
    nursery.start_soon(endpoint.run)
    await wait_all_tasks_blocked()
    assert machine.lines == [("receive", QUIC)]


async def test_a_closed_socket_ends_the_run(paper: PaperSocket) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Endpoint(paper, Diary()).run)
        await wait_all_tasks_blocked()
        paper.close()


# The real thing


@dataclass
class OnePeer:
    """A machine of one connection."""

    quic: QuicConnection
    peer: Address
    messages: list[Message] = field(default_factory=list)
    arrived: trio.Event = field(default_factory=trio.Event)

    def receive(self, data: bytes, source: Address, now: float) -> None:
        assert source == self.peer
        self.quic.receive([data], now)

    def handle_timer(self, now: float) -> None:
        self.quic.handle_timer(now)

    def next_timer(self) -> float | None:
        return self.quic.next_timer()

    def datagrams_to_send(self, now: float) -> list[Transmit]:
        return [Transmit(datagram, self.peer) for datagram in self.quic.datagrams_to_send(now)]

    def on_progress(self) -> None:
        while (event := self.quic.next_event()) is not None:
            if isinstance(event, Message):
                self.messages.append(event)
                self.arrived.set()


async def test_two_endpoints_over_loopback_exchange_messages(nursery: trio.Nursery) -> None:
    network, now = TrioNetwork(), trio.current_time()
    sockets = [await network.bind(), await network.bind()]
    here, there = (Address("127.0.0.1", bound.address.port) for bound in sockets)
    one, other = make_identity(), make_identity()
    client = OnePeer(QuicConnection.client(one, other.fingerprint, now, alpn="test"), there)
    server = OnePeer(QuicConnection.server(other, one.fingerprint, now, alpn="test"), here)
    for machine, bound in ((client, sockets[0]), (server, sockets[1])):
        machine.quic.send(Stream.BULK, bytes(300_000))
        nursery.start_soon(Endpoint(bound, machine, machine.on_progress).run)
    for machine in (client, server):
        await machine.arrived.wait()
        assert machine.messages == [Message(Stream.BULK, bytes(300_000))]
    for bound in sockets:
        bound.close()
