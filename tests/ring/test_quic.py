from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import ProtocolError
from kafila.ring import quic
from kafila.ring.identity import Identity, make_identity
from kafila.ring.quic import Closed, Established, Message, QuicConnection, Stream
from kafila.ring.quic_core import CoreConnection
from tests.ring.wire import ALPN, CLIENT, IDENTITIES, SERVER, START_S, established_wire, fresh_wire

STRANGER = make_identity()


def text(size: int, number: int) -> bytes:
    """``size`` bytes that no other message has."""
    return Random(number).randbytes(size)


# Who is there


def test_both_ends_learn_whom_they_speak_to() -> None:
    wire = fresh_wire()
    wire.settle()
    assert wire.events[CLIENT] == [Established(IDENTITIES[SERVER].fingerprint)]
    assert wire.events[SERVER] == [Established(IDENTITIES[CLIENT].fingerprint)]


def test_without_an_expectation_a_peer_still_proves_who_it_is() -> None:
    wire = fresh_wire(STRANGER, client_expects=None, server_expects=None)
    wire.settle()
    assert wire.events[SERVER] == [Established(STRANGER.fingerprint)]


@pytest.mark.parametrize(
    ("client", "server", "offended"),
    [
        (STRANGER, IDENTITIES[SERVER], SERVER),
        (IDENTITIES[CLIENT], STRANGER, CLIENT),
        (IDENTITIES[SERVER], IDENTITIES[SERVER], SERVER),
        (IDENTITIES[CLIENT], IDENTITIES[CLIENT], CLIENT),
    ],
    ids=["strange client", "strange server", "client as the server", "server as the client"],
)
def test_another_certificate_closes_both_ends_with_the_reason(
    client: Identity, server: Identity, offended: int
) -> None:
    wire = fresh_wire(client, server)
    for end in wire.ends:
        end.send(Stream.CONTROL, b"for the invited alone")
    wire.settle()
    assert wire.closed(offended) == Closed("the certificate is not the invited one's", by_peer=False)
    assert wire.closed(1 - offended) == Closed("the certificate is not the invited one's", by_peer=True)
    assert not wire.messages(CLIENT)
    assert not wire.messages(SERVER)
    assert not wire.established(offended)


def test_a_client_without_a_certificate_is_turned_away() -> None:
    wire = fresh_wire(server_expects=None)
    wire.ends[CLIENT]._configuration.certificate = None
    wire.ends[CLIENT]._core.tls.certificate = None  # type: ignore[union-attr]  # what a foreign client would do
    wire.ends[CLIENT].send(Stream.CONTROL, b"trust me")
    wire.settle()
    assert wire.closed(SERVER) == Closed("no certificate was shown", by_peer=False)
    assert wire.closed(CLIENT) == Closed("no certificate was shown", by_peer=True)
    assert not wire.messages(SERVER)


@pytest.mark.parametrize("impostor", [CLIENT, SERVER])
def test_the_right_certificate_without_its_key_is_turned_away(impostor: int) -> None:
    pair = list(IDENTITIES)
    pair[impostor] = replace(pair[impostor], private_key=Ed25519PrivateKey.generate())
    wire = fresh_wire(*pair)
    wire.ends[impostor].send(Stream.CONTROL, b"trust me")
    wire.settle()
    assert not wire.established(1 - impostor)
    assert not wire.messages(1 - impostor)
    closed = wire.closed(1 - impostor)
    assert closed is not None
    assert not closed.by_peer


def test_a_client_of_another_protocol_is_turned_away() -> None:
    wire = fresh_wire()
    wire.ends = (
        QuicConnection.client(IDENTITIES[CLIENT], IDENTITIES[SERVER].fingerprint, START_S, alpn="another"),
        wire.ends[SERVER],
    )
    wire.settle()
    assert wire.closed(SERVER) is not None
    assert wire.closed(CLIENT) is not None


def test_a_server_says_nothing_to_a_client_it_has_not_met() -> None:
    """TLS gives a server its sending keys before the client has shown a certificate."""
    wire = fresh_wire(STRANGER)
    wire.ends[SERVER].send(Stream.CONTROL, b"for the invited alone")
    wire.ends[CLIENT]._expected = None
    wire.settle()
    assert wire.established(CLIENT)
    assert not wire.messages(CLIENT)


# Messages


def test_messages_sent_before_the_handshake_arrive_after_it() -> None:
    wire = fresh_wire()
    for number, end in enumerate(wire.ends):
        end.send(Stream.BULK, text(5000, number))
        end.send(Stream.CONTROL, b"")
    wire.settle()
    for number in (CLIENT, SERVER):
        assert set(wire.messages(number)) == {
            Message(Stream.BULK, text(5000, 1 - number)),
            Message(Stream.CONTROL, b""),
        }


def test_control_goes_before_bulk_that_was_queued_first() -> None:
    wire = established_wire()
    client = wire.ends[CLIENT]
    client.send(Stream.BULK, text(200_000, 1))
    client.send(Stream.CONTROL, b"stop")
    client._core._streams_queue.reverse()  # type: ignore[union-attr]  # established; the library turns its queue
    wire.flush()
    wire.deliver(SERVER, wire.flying[SERVER][:1])
    assert wire.messages(SERVER) == [Message(Stream.CONTROL, b"stop")]


def test_a_large_message_arrives_through_windows_smaller_than_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafila.ring.quic_setup.STREAM_WINDOW_BYTES", 100_000)
    wire = fresh_wire()
    wire.ends[SERVER].send(Stream.BULK, text(900_000, 7))
    wire.settle(60.0)
    assert wire.messages(CLIENT) == [Message(Stream.BULK, text(900_000, 7))]
    assert wire.ends[SERVER].buffered_bytes == 0


def test_buffered_bytes_count_what_is_held_and_what_is_not_acknowledged() -> None:
    wire = fresh_wire()
    client = wire.ends[CLIENT]
    client.send(Stream.BULK, bytes(100))
    assert client.buffered_bytes == 104
    wire.settle()
    assert client.buffered_bytes == 0
    client.send(Stream.CONTROL, bytes(10))
    wire.flush()
    assert client.buffered_bytes == 14
    wire.settle()
    assert client.buffered_bytes == 0


def test_a_peer_that_stops_reading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quic, "MAX_BUFFERED_BYTES", 50_000)
    wire = established_wire()
    for _ in range(6):
        wire.ends[CLIENT].send(Stream.BULK, bytes(10_000))
    wire.flush()
    assert wire.closed(CLIENT) == Closed("the peer stopped reading", by_peer=False)


def test_a_message_over_the_peers_limit_closes_the_connection() -> None:
    wire = fresh_wire(max_message_bytes=1000)
    wire.ends[CLIENT].send(Stream.CONTROL, bytes(1001))
    wire.settle()
    closed = wire.closed(SERVER)
    assert closed is not None
    assert "1001" in closed.reason
    assert wire.closed(CLIENT) == Closed(closed.reason, by_peer=True)


# Ends


@pytest.mark.parametrize("who", [CLIENT, SERVER])
@pytest.mark.parametrize("flights", range(1, 6))
def test_a_close_keeps_its_words_however_far_the_handshake_is(who: int, flights: int) -> None:
    wire = fresh_wire()
    wire.flush()
    for flight in range(flights):
        to = SERVER if flight % 2 == 0 else CLIENT
        batch, wire.flying[to][:] = list(wire.flying[to]), []
        wire.deliver(to, batch)
    wire.ends[who].close(wire.now, "somebody left")
    wire.settle()
    assert wire.closed(who) == Closed("somebody left", by_peer=False)
    assert wire.closed(1 - who) == Closed("somebody left", by_peer=True)


@pytest.mark.parametrize("who", [CLIENT, SERVER])
def test_close_is_one_event_on_each_side(who: int) -> None:
    wire = established_wire()
    wire.ends[who].send(Stream.CONTROL, b"too late")
    wire.ends[who].close(wire.now, "the ring is done")
    wire.ends[who].close(wire.now, "said twice")
    wire.settle()
    assert wire.closed(who) == Closed("the ring is done", by_peer=False)
    assert wire.closed(1 - who) == Closed("the ring is done", by_peer=True)
    for end in wire.ends:
        end.send(Stream.BULK, b"nobody there")
        end.ping()
        end.path_changed(wire.now, 1452)
        assert end.next_timer() is None
        assert end.datagrams_to_send(wire.now + 1) == []
        assert end.buffered_bytes == 0 or not end.established


def test_a_reason_is_one_printable_line_whoever_wrote_it() -> None:
    wire = established_wire()
    wire.ends[CLIENT].close(wire.now, "\x1b[2J" + "ü" * 500 + "\n")
    wire.settle()
    closed = wire.closed(SERVER)
    assert closed is not None
    assert closed.reason.isprintable()
    assert len(closed.reason.encode()) <= 200


def test_silence_closes_both_ends() -> None:
    wire = established_wire()
    wire.wait(quic.IDLE_TIMEOUT_S + 1)
    assert wire.closed(CLIENT) == Closed("Idle timeout", by_peer=False)
    assert wire.closed(SERVER) == Closed("Idle timeout", by_peer=False)


def test_pings_keep_a_silent_connection_open() -> None:
    wire = established_wire()
    for _ in range(10):
        wire.ends[SERVER].ping()
        wire.settle()
        wire.wait(quic.IDLE_TIMEOUT_S / 2)
    assert all(end.established for end in wire.ends)


def test_a_dead_peer_is_noticed_while_sending() -> None:
    wire = established_wire()
    wire.ends[CLIENT].send(Stream.BULK, bytes(5000))
    for _ in range(40):
        wire.wait(1.0)
        wire.flying[SERVER].clear()
    assert wire.closed(CLIENT) is not None


def test_a_server_that_nobody_calls_gives_up() -> None:
    server = QuicConnection.server(IDENTITIES[SERVER], None, START_S, alpn=ALPN)
    due = server.next_timer()
    assert due == START_S + quic.IDLE_TIMEOUT_S
    server.handle_timer(due)
    assert server.next_event() == Closed("nobody called", by_peer=False)
    assert server.next_timer() is None


# Whatever comes


@given(st.lists(st.binary(max_size=1500), max_size=10))
def test_arbitrary_bytes_never_raise_and_never_spoil_a_handshake(junk: list[bytes]) -> None:
    wire = fresh_wire()
    for end in wire.ends:
        end.receive(junk, START_S)
        end.receive([b"\xc0\0\0\0\1" + each for each in junk], START_S)
    wire.ends[CLIENT].send(Stream.CONTROL, b"still here")
    wire.settle()
    assert wire.messages(SERVER) == [Message(Stream.CONTROL, b"still here")]


@given(st.data())
def test_damaged_datagrams_never_raise_and_are_only_lost(data: st.DataObject) -> None:
    wire = fresh_wire() if data.draw(st.booleans()) else established_wire()
    for number, end in enumerate(wire.ends):
        end.send(Stream.BULK, text(6000, number))
    for _ in range(4):
        wire.flush()
        for number in (CLIENT, SERVER):
            damaged = []
            for datagram in wire.flying[number]:
                at, changed = data.draw(st.integers(0, len(datagram) - 1)), bytearray(datagram)
                changed[at] ^= data.draw(st.integers(1, 255))
                damaged.append(bytes(changed[: data.draw(st.integers(1, len(changed)))]))
            wire.deliver(number, damaged)
        wire.carry()
    wire.settle()
    for number in (CLIENT, SERVER):
        if wire.closed(number) is None:
            assert wire.messages(number) == [Message(Stream.BULK, text(6000, 1 - number))]


# The path


def test_a_new_path_forgets_the_old_ones_window_and_size() -> None:
    wire = established_wire()
    client = wire.ends[CLIENT]
    for number in range(30):
        client.send(Stream.BULK, text(20_000, number))
        wire.settle()
    client.path_changed(wire.now, 1452)
    client.send(Stream.BULK, text(100_000, 99))
    wire.flush()
    assert {len(datagram) for datagram in wire.flying[SERVER]} == {1452}
    assert len(wire.flying[SERVER]) == 10  # the initial window of RFC 9002


def test_a_new_path_forgets_the_old_ones_round_trip() -> None:
    wire = established_wire()

    def measure(rtt_s: float) -> float | None:
        for number in range(30):
            wire.ends[CLIENT].send(Stream.BULK, text(20_000, number))
            wire.settle(rtt_s=rtt_s)
        return wire.ends[CLIENT].rtt_s

    assert (measure(0.2) or 0.0) > 0.1
    assert 0.0 < (wire.ends[CLIENT].minimum_rtt_s or 0.0) <= (wire.ends[CLIENT].rtt_s or 0.0)
    wire.ends[CLIENT].path_changed(wire.now, 1452)
    assert wire.ends[CLIENT].rtt_s is None
    assert wire.ends[CLIENT].minimum_rtt_s is None
    assert (measure(0.002) or 1.0) < 0.02


def test_an_answer_to_what_went_the_old_way_says_nothing_of_the_new() -> None:
    wire = established_wire()
    client = wire.ends[CLIENT]
    client.send(Stream.CONTROL, b"the long way")
    wire.flush()
    wire.wait(0.15)
    client.path_changed(wire.now, 1200)
    wire.carry()
    wire.wait(0.05)
    wire.carry()
    assert client.rtt_s is None


def test_another_datagram_size_on_the_same_path_forgets_nothing() -> None:
    wire = established_wire()
    client = wire.ends[CLIENT]
    for number in range(30):
        client.send(Stream.BULK, text(20_000, number))
        wire.settle(rtt_s=0.05)
    core = client._core
    assert isinstance(core, CoreConnection)
    for size in (1452, 1200, 9000):
        before, window = client.rtt_s, core._congestion.congestion_window
        assert window > 20_000, "grown"
        client.datagram_size_changed(size)
        client.send(Stream.BULK, text(100_000, size))
        wire.flush()
        assert client.rtt_s == before is not None
        assert max(len(datagram) for datagram in wire.flying[SERVER]) == size
        assert core._congestion.congestion_window == window
        wire.settle(rtt_s=0.05)
        assert wire.messages(SERVER)[-1] == Message(Stream.BULK, text(100_000, size))


def test_a_path_that_is_too_small_for_quic_is_a_callers_mistake() -> None:
    with pytest.raises(ProtocolError, match="1200"):
        established_wire().ends[CLIENT].path_changed(START_S, 1199)
    with pytest.raises(ProtocolError, match="1200"):
        established_wire().ends[CLIENT].datagram_size_changed(1199)


def test_a_giant_path_is_used_as_far_as_frames_reach() -> None:
    wire = established_wire()
    wire.ends[CLIENT].path_changed(wire.now, 65_507)
    wire.ends[CLIENT].send(Stream.BULK, text(50_000, 3))
    wire.settle()
    assert wire.messages(SERVER) == [Message(Stream.BULK, text(50_000, 3))]


def test_the_library_never_thinks_of_paths_itself() -> None:
    """One constant address: nothing for it to validate, nowhere to migrate."""
    wire = established_wire()
    for number in range(20):
        wire.ends[number % 2].send(Stream.BULK, text(4000, number))
        wire.ends[number % 2].path_changed(wire.now, 1200 + number)
        wire.settle()
    for end in wire.ends:
        core = end._core
        assert isinstance(core, CoreConnection)
        assert len(core._network_paths) == 1
        assert core._network_paths[0].is_validated
        assert not core._network_paths[0].local_challenge_sent


@pytest.mark.parametrize("arrives_after_all", [False, True])
def test_what_went_down_a_silent_path_is_sent_again_at_once_and_arrives_once(*, arrives_after_all: bool) -> None:
    wire = established_wire()
    wire.ends[CLIENT].send(Stream.BULK, text(5000, 1))
    wire.flush()
    swallowed, wire.flying[SERVER][:] = list(wire.flying[SERVER]), []
    wire.ends[CLIENT].path_silent(wire.now)
    wire.flush()
    assert len(wire.flying[SERVER]) >= len(swallowed), "not at once"
    if arrives_after_all:
        wire.deliver(SERVER, swallowed)
    wire.settle()
    assert wire.messages(SERVER) == [Message(Stream.BULK, text(5000, 1))]
    assert not wire.ends[CLIENT].buffered_bytes


def test_a_path_that_is_silent_during_the_handshake_changes_nothing() -> None:
    wire = fresh_wire()
    for end in wire.ends:
        end.path_silent(wire.now)
    wire.settle()
    assert wire.established(CLIENT)
    assert wire.established(SERVER)
