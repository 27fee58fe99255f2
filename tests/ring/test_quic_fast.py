"""The fast way is taken for what it is for, and only for that. `test_quic_pair.py` holds it against the general way."""

from __future__ import annotations

from typing import Any

import pytest
from aioquic.quic.connection import QuicConnection as AioquicConnection

from kafila.ring.quic import Message, Stream
from tests.ring.wire import CLIENT, SERVER, Wire, established_wire


class General:
    """Counts what goes the library's own way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = self.written = 0
        receive, send = AioquicConnection.receive_datagram, AioquicConnection.datagrams_to_send

        def receive_datagram(core: AioquicConnection, *arguments: Any) -> None:
            self.read += 1
            receive(core, *arguments)

        def datagrams_to_send(core: AioquicConnection, now: float) -> list[tuple[bytes, Any]]:
            datagrams = send(core, now)
            self.written += len(datagrams)
            return datagrams

        monkeypatch.setattr(AioquicConnection, "receive_datagram", receive_datagram)
        monkeypatch.setattr(AioquicConnection, "datagrams_to_send", datagrams_to_send)


def exchange(wire: Wire, rounds: int) -> int:
    """Frames both ways, and how many datagrams that took."""
    datagrams = 0
    for number in range(rounds):
        wire.ends[CLIENT].send(Stream.BULK, bytes(8192))
        if number % 3 == 0:
            wire.ends[SERVER].send(Stream.CONTROL, b"ok")
        wire.flush()
        for _ in range(4):
            datagrams += len(wire.flying[CLIENT]) + len(wire.flying[SERVER])
            wire.carry()
        wire.wait(0.02)
    return datagrams


def test_frames_and_their_acknowledgements_go_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = established_wire()
    exchange(wire, 1)  # a stream is opened the general way
    general = General(monkeypatch)
    datagrams = exchange(wire, 60)
    assert len(wire.messages(SERVER)) == 61
    assert datagrams > 400
    assert general.read + general.written == 0


def test_a_gap_goes_the_general_way_and_the_fast_way_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = established_wire()
    general = General(monkeypatch)
    for _ in range(3):
        wire.ends[CLIENT].send(Stream.BULK, bytes(8192))
        wire.flush()
        del wire.flying[SERVER][2]
        wire.settle()
    assert len(wire.messages(SERVER)) == 3
    assert general.written > 0
    # The gaps are told until the peer has acknowledged that it was told of them.
    for _ in range(4):
        wire.ends[SERVER].ping()
        wire.settle()
        exchange(wire, 10)
    before = general.read + general.written
    exchange(wire, 20)
    assert general.read + general.written - before <= 2


def test_all_datagrams_of_a_flush_but_the_last_are_full() -> None:
    wire = established_wire()
    for size in (1200, 1452):
        wire.ends[CLIENT].path_changed(wire.now, size)
        wire.ends[CLIENT].send(Stream.BULK, bytes(8192))
        wire.flush()
        sizes = [len(datagram) for datagram in wire.flying[SERVER]]
        assert set(sizes[:-1]) == {size}
        assert sizes[-1] <= size
        wire.settle()


def test_a_datagram_that_comes_twice_is_taken_once() -> None:
    wire = established_wire()
    wire.ends[CLIENT].send(Stream.CONTROL, b"once")
    wire.flush()
    datagrams = list(wire.flying[SERVER])
    wire.deliver(SERVER, datagrams + datagrams)
    wire.deliver(SERVER, datagrams)
    assert wire.messages(SERVER) == [Message(Stream.CONTROL, b"once")]
    wire.settle()
    wire.deliver(SERVER, datagrams)
    due = wire.ends[SERVER].next_timer()
    assert due is not None
    assert due > wire.now + 1, "a replayed datagram is not even acknowledged"


def test_bytes_that_come_twice_in_other_packets_are_taken_once() -> None:
    wire = established_wire()
    wire.ends[CLIENT].send(Stream.CONTROL, b"once")
    wire.flush()
    late = list(wire.flying[SERVER])
    wire.flying[SERVER].clear()
    wire.settle()  # sent again after a timeout
    wire.deliver(SERVER, late)
    assert wire.messages(SERVER) == [Message(Stream.CONTROL, b"once")]


def test_nothing_leaves_when_there_is_nothing_to_say() -> None:
    wire = established_wire()
    for end in wire.ends:
        end._core._pacing_at = wire.now - 1  # type: ignore[union-attr]  # established; an old wish to send is forgotten
        assert end.datagrams_to_send(wire.now) == []
        due = end.next_timer()
        assert due is not None
        assert due > wire.now + 20, "only the idle timeout is left"


def test_a_window_larger_than_a_burst_leaves_spread_over_the_round_trip() -> None:
    wire = established_wire()
    client = wire.ends[CLIENT]
    for _ in range(12):
        client.send(Stream.BULK, bytes(300_000))
        wire.settle(rtt_s=0.05)
    core = client._core
    assert core is not None
    window = core._congestion.congestion_window
    assert window > 50 * 1200
    client.send(Stream.BULK, bytes(1_000_000))
    wire.flush()
    assert len(wire.flying[SERVER]) <= 12, "a burst"
    wire.wait(0.1)
    assert sum(map(len, wire.flying[SERVER])) > 0.9 * window
