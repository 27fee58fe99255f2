"""Our policies, and loud failure where a new aioquic has moved what they lean on."""

from __future__ import annotations

import pytest
from aioquic.quic.connection import QuicConnection as AioquicConnection
from aioquic.quic.recovery import QuicPacketRecovery

from kafila.ring import quic_core
from kafila.ring.quic import Closed, Message, Stream
from kafila.ring.quic_core import ACK_DELAY_S, ACK_EVERY_PACKETS, CoreConnection
from kafila.ring.quic_fast import FastConnection
from tests.ring.wire import CLIENT, SERVER, GeneralConnection, Wire, cores, established_wire

# What `quic_core.py`, `quic_fast.py` and `quic_congestion.py` reach for, by the object it stands on.
INSIDES = {
    "": "_ack_delay _ack_eliciting_sent_since_receipt _close_at _close_event _close_pending _crypto_streams _cryptos"
    " _datagrams_pending _events _handshake_confirmed _handshake_done_pending _host_cids _idle_timeout"
    " _local_ack_delay_exponent _local_max_data _local_max_streams_bidi _local_max_streams_uni _loss"
    " _max_datagram_size _network_paths _on_ack_delivery _on_max_stream_data_delivery _pacing_at _packet_number"
    " _peer_cid _ping_pending _probe_pending _remote_ack_delay_exponent _remote_max_data _remote_max_data_used"
    " _retire_connection_ids _spaces _state _streams _streams_blocked_pending _streams_queue host_cid tls",
    "tls": "_peer_certificate _request_client_certificate",
    "_loss": "_cc _in_persistent_congestion _on_packets_lost _pacer _pto_count _rtt_initial _rtt_initialized"
    " _rtt_latest _rtt_min _rtt_smoothed _rtt_variance on_ack_received on_packet_sent",
    "_network_paths.0": "is_validated remote_challenges",
    "_keys": "_update_key_requested key_phase recv send",
    "_keys.recv": "aead hp key_phase",
    "_keys.recv.hp": "_mask",
    "_space": "ack_at ack_eliciting_in_flight ack_queue expected_packet_number largest_acked_packet"
    " largest_received_packet largest_received_time received_packets sent_packets",
    "_streams_queue.0": "is_blocked is_finished max_stream_data_local max_stream_data_local_sent"
    " max_stream_data_remote receiver sender stream_id",
    "_streams_queue.0.sender": "_buffer _pending buffer_is_empty get_frame highest_offset on_data_delivery"
    " reset_pending",
    "_streams_queue.0.receiver": "handle_frame highest_offset starting_offset stop_pending",
}


def core_of(wire: Wire, number: int) -> FastConnection:
    core = wire.ends[number]._core
    assert core is not None
    return core


@pytest.mark.parametrize("number", [CLIENT, SERVER])
def test_the_library_has_the_insides_we_lean_on(number: int) -> None:
    core = core_of(established_wire(), number)
    missing = []
    for path, names in INSIDES.items():
        thing: object = core
        for step in filter(None, path.split(".")):
            thing = thing[int(step)] if step.isdigit() else getattr(thing, step)  # type: ignore[index]  # a list
        missing += [f"{path}.{name}" for name in names.split() if not hasattr(thing, name)]
    assert not missing


@pytest.mark.parametrize("name", ["_initialize", "_write_stream_limits", "datagrams_to_send", "receive_datagram"])
def test_the_library_has_the_methods_we_override(name: str) -> None:
    assert callable(getattr(AioquicConnection, name))


@pytest.mark.parametrize("name", ["_detect_loss", "on_ack_received"])
def test_the_library_has_the_loss_detection_we_override(name: str) -> None:
    assert callable(getattr(QuicPacketRecovery, name))


# Acknowledgements


def test_the_acknowledgement_of_a_lone_frame_waits_for_company() -> None:
    wire = established_wire()
    wire.ends[CLIENT].send(Stream.BULK, bytes(5000))
    wire.flush()
    wire.deliver(SERVER, wire.flying[SERVER])
    assert wire.messages(SERVER)
    assert not wire.flying[CLIENT]
    wire.wait(ACK_DELAY_S * 0.9)
    assert not wire.flying[CLIENT]
    wire.wait(ACK_DELAY_S * 0.2)
    assert len(wire.flying[CLIENT]) == 1


def test_what_an_end_has_said_itself_makes_it_acknowledge_no_sooner() -> None:
    wire = established_wire()
    wire.ends[SERVER].send(Stream.CONTROL, b"said, and nothing is left to say")
    wire.flush()
    wire.flying[CLIENT].clear()
    wire.ends[CLIENT].send(Stream.BULK, bytes(1000))
    wire.flush()
    wire.deliver(SERVER, wire.flying[SERVER])
    assert wire.messages(SERVER)
    assert not wire.flying[CLIENT]


def test_many_packets_are_acknowledged_at_once_and_together() -> None:
    wire = established_wire()
    wire.ends[CLIENT].send(Stream.BULK, bytes(1100 * ACK_EVERY_PACKETS))
    wire.flush()
    assert len(wire.flying[SERVER]) == ACK_EVERY_PACKETS
    wire.deliver(SERVER, wire.flying[SERVER])
    assert len(wire.flying[CLIENT]) == 1


def test_a_gap_is_reported_at_once() -> None:
    wire = established_wire()
    wire.ends[CLIENT].send(Stream.BULK, bytes(5000))
    wire.flush()
    wire.deliver(SERVER, wire.flying[SERVER][:1] + wire.flying[SERVER][2:])
    assert len(wire.flying[CLIENT]) == 1
    wire.deliver(CLIENT, wire.flying[CLIENT])
    assert wire.flying[SERVER], "the lost packet is sent again without waiting for a timer"


def test_an_acknowledgement_rides_on_data_that_leaves_anyway() -> None:
    wire = established_wire()
    wire.ends[CLIENT].send(Stream.BULK, bytes(5000))
    wire.flush()
    wire.ends[SERVER].send(Stream.CONTROL, b"go on")
    wire.flying[CLIENT].clear()
    wire.ends[SERVER].receive(wire.flying[SERVER], wire.now)
    wire.ends[SERVER].send(Stream.CONTROL, b"more")
    wire.flush()
    assert len(wire.flying[CLIENT]) == 1
    wire.deliver(CLIENT, wire.flying[CLIENT])
    assert wire.ends[CLIENT].buffered_bytes == 0


# What a long life needs


def test_a_member_that_only_receives_keeps_no_endless_list_of_acknowledgements() -> None:
    wire = established_wire()
    for _ in range(3 * quic_core.UNANSWERED_PACKETS):
        wire.ends[CLIENT].send(Stream.BULK, bytes(2000))
        wire.settle()
    assert len(core_of(wire, SERVER)._space.sent_packets) <= 2 * quic_core.UNANSWERED_PACKETS


def test_keys_are_changed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = established_wire()
    monkeypatch.setattr(quic_core, "KEY_UPDATE_PACKETS", 50)
    core_of(wire, CLIENT)._next_key_update = 50
    phases = set()
    for number in range(60):
        wire.ends[number % 2].send(Stream.BULK, bytes(3000))
        wire.settle()
        phases.add(core_of(wire, SERVER)._keys.key_phase)
    assert len(wire.messages(CLIENT)) == len(wire.messages(SERVER)) == 30
    assert phases == {0, 1}


def test_a_peer_may_send_only_so_far_ahead() -> None:
    wire = established_wire()
    window = core_of(wire, SERVER)._stream_window
    for _ in range(8):
        wire.ends[CLIENT].send(Stream.BULK, bytes(window // 3))
        wire.settle()
    assert len(wire.messages(SERVER)) == 8
    for stream in core_of(wire, SERVER)._streams.values():
        assert stream.max_stream_data_local <= stream.receiver.starting_offset() + window


def test_a_lost_window_is_told_again_as_soon_as_the_loss_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafila.ring.quic_setup.STREAM_WINDOW_BYTES", 100_000)
    wire = established_wire()
    client, server = wire.ends
    while True:
        client.send(Stream.BULK, bytes(9_000))
        wire.flush()
        batch, wire.flying[SERVER][:] = list(wire.flying[SERVER]), []
        wire.deliver(SERVER, batch)
        if core_of(wire, SERVER)._streams[6].max_stream_data_local_sent > 100_000:
            wire.flying[CLIENT].pop()  # the window, lost
            break
        wire.settle()
    for _ in range(4):
        server.send(Stream.CONTROL, b"x")
        wire.flush()
    wire.carry()
    wire.wait(ACK_DELAY_S)  # less than a timeout of the server's
    assert core_of(wire, CLIENT)._streams[6].max_stream_data_remote == 100_000
    wire.carry()
    wire.carry()
    assert core_of(wire, CLIENT)._streams[6].max_stream_data_remote > 100_000


# Peers that break the rules after they were let in


def hostile_wire() -> tuple[Wire, CoreConnection]:
    """A server of ours, and a client that has shown its certificate and now does as it likes."""
    with cores(GeneralConnection, FastConnection):
        wire = established_wire()
    client = core_of(wire, CLIENT)
    client._remote_max_streams_bidi = client._remote_max_streams_uni = 1000
    client._remote_max_stream_data_bidi_remote = 1000
    return wire, client


def speak(wire: Wire) -> None:
    """Deliver what the client's core was made to say behind its connection's back, which thinks it has said all."""
    wire.ends[CLIENT].retry_now()
    wire.settle()


@pytest.mark.parametrize("stream_id", [0, 10, 402], ids=["bidirectional", "a third", "far"])
def test_a_stream_too_many_closes_the_connection(stream_id: int) -> None:
    wire, client = hostile_wire()
    client.send_stream_data(stream_id, b"x")
    speak(wire)
    assert wire.closed(SERVER) == Closed("Too many streams open", by_peer=False)
    assert not wire.messages(SERVER)


def test_writing_on_the_others_stream_closes_the_connection() -> None:
    wire, client = hostile_wire()
    client._streams[2].stream_id = 3
    client.send_stream_data(2, b"x")
    speak(wire)
    assert wire.closed(SERVER) == Closed("Stream is send-only", by_peer=False)


@pytest.mark.parametrize("words", [b"", b"last words"])
def test_ending_a_long_lived_stream_closes_the_connection(words: bytes) -> None:
    wire, client = hostile_wire()
    client.send_stream_data(2, words, end_stream=True)
    speak(wire)
    assert wire.closed(SERVER) == Closed("the peer opened or ended a stream it may not", by_peer=False)


def test_resetting_a_stream_closes_the_connection() -> None:
    wire, client = hostile_wire()
    wire.ends[CLIENT].send(Stream.CONTROL, b"x")
    wire.settle()
    client.reset_stream(2, 7)
    speak(wire)
    assert wire.closed(SERVER) == Closed("the peer broke a stream", by_peer=False)
    assert wire.messages(SERVER) == [Message(Stream.CONTROL, b"x")]


@pytest.mark.parametrize("opened", [False, True])
def test_data_beyond_the_window_closes_the_connection(opened: bool) -> None:
    wire, client = hostile_wire()
    if opened:
        wire.ends[CLIENT].send(Stream.CONTROL, b"x")
        wire.settle()
    sender = client._streams[2].sender
    sender._buffer_start = sender._buffer_stop = 2**40
    client._streams[2].max_stream_data_remote = 2**50
    sender.write(b"far away")
    speak(wire)
    assert wire.closed(SERVER) == Closed("Over stream data limit", by_peer=False)
