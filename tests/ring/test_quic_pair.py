"""Two connections and everything a network does to datagrams: what is sent arrives once and in order, or it ends.

Each sequence runs with our packets on both ends, and with the library's own general way on one end or both, so that
the two ways of writing and of reading a packet are held against each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kafila.ring.quic import Stream
from kafila.ring.quic_fast import FastConnection
from tests.ring.wire import CLIENT, SERVER, GeneralConnection, Kind, Wire, cores, fresh_wire

kinds = st.sampled_from([FastConnection, GeneralConnection])

sides = st.sampled_from([CLIENT, SERVER])
places = st.integers(0, 40)


@dataclass(frozen=True)
class Send:
    side: int
    stream: Stream
    size: int


@dataclass(frozen=True)
class Deliver:
    """Some of what flies, from the middle: the rest is overtaken."""

    side: int
    first: int
    count: int


@dataclass(frozen=True)
class Drop:
    side: int
    at: int


@dataclass(frozen=True)
class Duplicate:
    side: int
    at: int


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class NewPath:
    side: int
    datagram_bytes: int


@dataclass(frozen=True)
class Ping:
    side: int


@dataclass(frozen=True)
class Close:
    side: int


Operation = Send | Deliver | Drop | Duplicate | Wait | NewPath | Ping | Close

faults = st.one_of(
    st.builds(Send, sides, st.sampled_from(Stream), st.integers(0, 30_000)),
    st.builds(Deliver, sides, places, st.integers(1, 40)),
    st.builds(Drop, sides, places),
    st.builds(Duplicate, sides, places),
    st.builds(Wait, st.floats(0.0, 1.0)),
    st.builds(NewPath, sides, st.sampled_from([1200, 1372, 1452, 9000])),
    st.builds(Ping, sides),
)
Sent = tuple[dict[Stream, list[bytes]], dict[Stream, list[bytes]]]


def perform(operation: Operation, wire: Wire, sent: Sent) -> None:
    match operation:
        case Send(side, stream, size):
            message = len(sent[side][stream]).to_bytes(4, "big") + bytes(size)
            sent[side][stream].append(message)
            wire.ends[side].send(stream, message)
        case Deliver(side, first, count):
            batch = wire.flying[side][first : first + count]
            del wire.flying[side][first : first + count]
            wire.deliver(side, batch)
        case Drop(side, at):
            del wire.flying[side][at : at + 1]
        case Duplicate(side, at):
            wire.flying[side].extend(wire.flying[side][at : at + 1])
        case Wait(seconds):
            wire.wait(seconds)
        case NewPath(side, datagram_bytes):
            wire.ends[side].path_changed(wire.now, datagram_bytes)
        case Ping(side):
            wire.ends[side].ping()
        case Close(side):
            wire.ends[side].close(wire.now, "enough")
    wire.flush()


def play(operations: list[Operation], client: Kind, server: Kind) -> tuple[Wire, Sent]:
    """Run ``operations``, then a wire without faults, until nothing moves."""
    sent: Sent = ({stream: [] for stream in Stream}, {stream: [] for stream in Stream})
    with cores(client, server):
        wire = fresh_wire()
        wire.flush()
        for operation in operations:
            perform(operation, wire, sent)
        wire.settle(60.0)
    return wire, sent


def received(wire: Wire, at: int) -> dict[Stream, list[bytes]]:
    return {stream: [each.data for each in wire.messages(at) if each.stream is stream] for stream in Stream}


@given(st.lists(faults, max_size=60), kinds, kinds)
def test_every_message_arrives_once_and_in_order_or_the_connection_closes(
    operations: list[Operation], client: Kind, server: Kind
) -> None:
    wire, sent = play(operations, client, server)
    for side in (CLIENT, SERVER):
        arrived = received(wire, 1 - side)
        if wire.closed(CLIENT) is None and wire.closed(SERVER) is None:
            assert arrived == sent[side]
        for stream in Stream:
            assert arrived[stream] == sent[side][stream][: len(arrived[stream])]


@given(st.lists(faults, max_size=30), sides, st.lists(faults, max_size=10), kinds, kinds)
def test_a_close_in_the_midst_leaves_a_beginning_of_what_was_sent_and_one_reason(
    before: list[Operation], who: int, after: list[Operation], client: Kind, server: Kind
) -> None:
    wire, sent = play([*before, Close(who), *after], client, server)
    closed = wire.closed(who)
    assert closed is not None
    for side in (CLIENT, SERVER):
        for stream, arrived in received(wire, 1 - side).items():
            assert arrived == sent[side][stream][: len(arrived)]


@given(st.lists(st.tuples(sides, st.integers(1, 30_000)), min_size=1, max_size=20), st.integers(2, 9), kinds, kinds)
def test_a_wire_that_loses_every_nth_datagram_loses_no_message(
    messages: list[tuple[int, int]], nth: int, client: Kind, server: Kind
) -> None:
    operations: list[Operation] = []
    for side, size in messages:
        operations += [
            Send(side, Stream.BULK, size),
            Drop(1 - side, nth),
            Deliver(CLIENT, 0, 40),
            Deliver(SERVER, 0, 40),
        ]
        operations += [Wait(0.02)]
    wire, sent = play(operations, client, server)
    assert wire.closed(CLIENT) is None
    assert wire.closed(SERVER) is None
    assert [received(wire, 1 - side) for side in (CLIENT, SERVER)] == list(sent)
