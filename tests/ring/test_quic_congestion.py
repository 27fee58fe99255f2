from __future__ import annotations

from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.tls import Epoch
from hypothesis import given
from hypothesis import strategies as st

from kafila.ring.quic_congestion import (
    BURST_S,
    INITIAL_WINDOW_PACKETS,
    MAXIMUM_WINDOW_BYTES,
    MINIMUM_WINDOW_PACKETS,
    BurstPacer,
    LinkCongestion,
)

SIZE = 1200
INITIAL = INITIAL_WINDOW_PACKETS * SIZE


def packet(sent_at: float) -> QuicSentPacket:
    return QuicSentPacket(
        epoch=Epoch.ONE_RTT,
        in_flight=True,
        is_ack_eliciting=True,
        is_crypto_packet=False,
        packet_number=0,
        packet_type=QuicPacketType.ONE_RTT,
        sent_time=sent_at,
        sent_bytes=SIZE,
    )


def exchange(window: LinkCongestion, packets: int, now: float, rtt_s: float = 0.05) -> None:
    """Send ``packets`` at ``now``, all acknowledged a round trip later."""
    sent = [packet(now) for _ in range(packets)]
    for each in sent:
        window.on_packet_sent(packet=each)
    for each in sent:
        window.on_packet_acked(now=now + rtt_s, packet=each)
    window.on_rtt_measurement(now=now + rtt_s, rtt=rtt_s)


def test_a_window_in_use_doubles_every_round_trip() -> None:
    window = LinkCongestion(max_datagram_size=SIZE)
    assert window.congestion_window == INITIAL
    for turn in range(4):
        exchange(window, window.congestion_window // SIZE, float(turn))
        assert window.congestion_window == INITIAL * 2 ** (turn + 1)
    assert window.bytes_in_flight == 0


def test_a_window_that_is_not_in_use_does_not_grow() -> None:
    window = LinkCongestion(max_datagram_size=SIZE)
    for turn in range(1000):
        exchange(window, 4, float(turn))
    assert window.congestion_window == INITIAL


def test_a_loss_shrinks_the_window_once_a_round_trip_and_growth_is_slow_after_it() -> None:
    window = LinkCongestion(max_datagram_size=SIZE)
    for turn in range(5):
        exchange(window, window.congestion_window // SIZE, float(turn))
    before = window.congestion_window
    lost = [packet(10.0), packet(10.01)]
    for each in lost:
        window.on_packet_sent(packet=each)
    window.on_packets_lost(now=10.05, packets=lost[:1])
    after = window.congestion_window
    assert before // 2 < after < before
    window.on_packets_lost(now=10.06, packets=lost[1:])
    assert window.congestion_window == after
    exchange(window, after // SIZE, 11.0)
    assert after < window.congestion_window <= after + 2 * SIZE


def test_a_queue_that_builds_ends_the_doubling() -> None:
    window = LinkCongestion(max_datagram_size=SIZE)
    exchange(window, 10, 0.0, rtt_s=0.05)
    for turn in range(8):
        exchange(window, 10, 1.0 + turn, rtt_s=0.08)
    assert window.ssthresh is not None


def test_a_lans_jitter_does_not_end_the_doubling() -> None:
    window = LinkCongestion(max_datagram_size=SIZE)
    for turn in range(50):
        exchange(window, 10, float(turn), rtt_s=0.0003 + 0.002 * (turn % 2))
    assert window.ssthresh is None


def test_a_new_path_begins_anew_and_old_losses_do_not_count() -> None:
    window = LinkCongestion(max_datagram_size=SIZE)
    for turn in range(5):
        exchange(window, window.congestion_window // SIZE, float(turn))
    old = packet(9.0)
    window.on_packet_sent(packet=old)
    fresh = window.successor(10.0, 1452)
    assert fresh.congestion_window == INITIAL_WINDOW_PACKETS * 1452
    assert fresh.bytes_in_flight == SIZE
    fresh.on_packets_lost(now=10.1, packets=[old])
    assert fresh.congestion_window == INITIAL_WINDOW_PACKETS * 1452
    assert fresh.bytes_in_flight == 0


@given(st.lists(st.tuples(st.sampled_from("salpe"), st.integers(1, 50)), max_size=100))
def test_the_window_keeps_its_bounds_and_its_count(steps: list[tuple[str, int]]) -> None:
    window, flying, now = LinkCongestion(max_datagram_size=SIZE), list[QuicSentPacket](), 0.0
    for what, count in steps:
        now += 0.01
        chosen, rest = flying[:count], flying[count:]
        if what == "s":
            sent = [packet(now) for _ in range(count)]
            flying += sent
            for each in sent:
                window.on_packet_sent(packet=each)
        elif what == "a":
            flying = rest
            for each in chosen:
                window.on_packet_acked(now=now, packet=each)
        elif what == "l" and chosen:
            flying = rest
            window.on_packets_lost(now=now, packets=chosen)
        elif what == "p":
            window.on_persistent_congestion()
        elif what == "e":
            flying = rest
            window.on_packets_expired(packets=chosen)
        assert window.bytes_in_flight == SIZE * len(flying)
        assert MINIMUM_WINDOW_PACKETS * SIZE <= window.congestion_window <= MAXIMUM_WINDOW_BYTES + SIZE


# Pacing


def test_nothing_is_paced_before_the_round_trip_is_known() -> None:
    pacer = BurstPacer(SIZE)
    for _ in range(1000):
        assert pacer.next_send_time(1.0) is None
        pacer.update_after_send(1.0)


def test_a_frame_leaves_at_once_whatever_the_round_trip() -> None:
    pacer = BurstPacer(SIZE)
    pacer.update_rate(INITIAL, 0.3)
    for _ in range(INITIAL_WINDOW_PACKETS):
        assert pacer.next_send_time(1.0) is None
        pacer.update_after_send(1.0)
    assert pacer.next_send_time(1.0) is not None


def test_it_wakes_for_half_a_burst_and_keeps_the_rate() -> None:
    pacer, window, rtt_s = BurstPacer(SIZE), 100 * SIZE, 0.1
    pacer.update_rate(window, rtt_s)
    now, sent, wakes = 1.0, 0, 0
    while now < 2.0:
        due = pacer.next_send_time(now)
        if due is None:
            pacer.update_after_send(now)
            sent += 1
        else:
            assert due > now
            now, wakes = due, wakes + 1
    assert 10 * 100 <= sent <= 10 * 100 * 1.3 + INITIAL_WINDOW_PACKETS
    assert wakes < sent / 3


def test_a_pacer_that_waits_for_larger_datagrams_waits_for_whole_ones() -> None:
    pacer = BurstPacer(1200)
    pacer.update_rate(INITIAL, 0.1)
    assert pacer.next_send_time(1.0) is None
    for _ in range(INITIAL_WINDOW_PACKETS):
        pacer.update_after_send(1.0)
    pacer.resize(9000)
    due = pacer.next_send_time(1.0)
    assert due is not None
    assert pacer.next_send_time(due) is None


def test_a_path_within_a_burst_is_not_paced_at_all() -> None:
    pacer, window = BurstPacer(SIZE), 400 * SIZE
    pacer.update_rate(window, BURST_S)
    for _ in range(400):
        assert pacer.next_send_time(1.0) is None
        pacer.update_after_send(1.0)
