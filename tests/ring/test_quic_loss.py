"""Loss detection that learns: the overtaken is not lost, the lost is found, and the window gets its due back."""

from __future__ import annotations

import math

from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import K_PACKET_THRESHOLD, K_TIME_THRESHOLD, QuicPacketSpace
from aioquic.tls import Epoch
from hypothesis import given
from hypothesis import strategies as st

from kafila.ring.quic_congestion import INITIAL_WINDOW_PACKETS, BurstPacer, LinkCongestion
from kafila.ring.quic_loss import HONEST_LOSSES, LONGEST_WAIT, MAX_GIVEN_UP, AdaptiveRecovery

SIZE = 1200
RTT_S = 0.04
INITIAL = INITIAL_WINDOW_PACKETS * SIZE


class Path:
    """Packets sent one a millisecond, and acknowledged when a test says so."""

    def __init__(self) -> None:
        self.recovery = AdaptiveRecovery(
            congestion_control_algorithm="reno",
            initial_rtt=0.1,
            max_datagram_size=SIZE,
            peer_completed_address_validation=True,
            send_probe=lambda: None,
        )
        self.window = LinkCongestion(max_datagram_size=SIZE)
        self.recovery._cc = self.window
        self.recovery._pacer = BurstPacer(SIZE)  # type: ignore[assignment]  # as in the connection
        self.space = QuicPacketSpace(is_application_data=True)
        self.recovery.spaces = [self.space]
        self.lost: list[int] = []
        self.sent_at: dict[int, float] = {}

    def send(self, now: float) -> int:
        number = len(self.sent_at)
        packet = QuicSentPacket(
            epoch=Epoch.ONE_RTT,
            in_flight=True,
            is_ack_eliciting=True,
            is_crypto_packet=False,
            packet_number=number,
            packet_type=QuicPacketType.ONE_RTT,
            sent_time=now,
            sent_bytes=SIZE,
        )
        packet.delivery_handlers.append((self._told, (number,)))
        self.sent_at[number] = now
        self.recovery.on_packet_sent(packet=packet, space=self.space)
        return number

    def _told(self, state: object, number: int) -> None:
        if str(state).endswith("LOST"):
            self.lost.append(number)

    def acknowledge(self, now: float, *numbers: int) -> None:
        ranges = RangeSet()
        for number in numbers:
            ranges.add(number, number + 1)
        self.recovery.on_ack_received(ack_rangeset=ranges, ack_delay=0.0, now=now, space=self.space)

    def overtaken(self, now: float, late_s: float) -> list[int]:
        """Ten packets, the first of which arrives ``late_s`` after its time; what was given up meanwhile."""
        before = len(self.lost)
        numbers = [self.send(now + n / 1000) for n in range(10)]
        rest = numbers[1:]
        for number in rest:
            self.acknowledge(self.sent_at[number] + RTT_S, number)
        while (due := self.space.loss_time) is not None and due < now + RTT_S + late_s:
            self.recovery.on_loss_detection_timeout(now=due)
        self.acknowledge(now + RTT_S + late_s, *numbers)
        return self.lost[before:]


def test_three_packets_overtaking_one_are_loss_until_it_arrives() -> None:
    path = Path()
    assert path.overtaken(0.0, 0.03) == [0]
    assert path.overtaken(1.0, 0.03) == []
    assert path.overtaken(2.0, 0.03) == []


def test_longer_delays_are_learned_too_but_not_without_end() -> None:
    path = Path()
    path.overtaken(0.0, 0.02)
    assert path.overtaken(1.0, 0.06)
    assert not path.overtaken(2.0, 0.06)
    for turn in range(3, 10):
        assert path.overtaken(float(turn), 0.5), "a timeout would have come long before"
    assert path.recovery._time_threshold == LONGEST_WAIT


def test_the_window_gets_back_what_a_mistaken_loss_took() -> None:
    path = Path()
    numbers = [path.send(n / 1000) for n in range(10)]
    path.acknowledge(0.045, *numbers[4:])
    grown = INITIAL + 6 * SIZE
    assert path.lost
    assert path.window.congestion_window < grown
    path.acknowledge(0.05, *numbers)
    assert path.window.congestion_window >= grown
    assert path.window.ssthresh is None


def test_one_true_loss_among_mistaken_ones_keeps_the_window_small() -> None:
    path = Path()
    numbers = [path.send(n / 1000) for n in range(10)]
    path.acknowledge(0.045, *numbers[4:])
    shrunk = path.window.congestion_window
    path.acknowledge(0.05, *numbers[1:])  # the first never comes
    assert path.window.congestion_window == shrunk
    later = path.send(5.0)
    path.acknowledge(5.04, later)
    assert path.window.ssthresh is not None


def test_a_true_loss_is_still_found_on_a_path_that_reorders() -> None:
    path = Path()
    path.overtaken(0.0, 0.03)
    numbers = [path.send(1.0 + n / 1000) for n in range(10)]
    for number in numbers[1:]:
        path.acknowledge(path.sent_at[number] + RTT_S, number)
    due = path.space.loss_time
    assert due is not None
    assert due <= 1.0 + LONGEST_WAIT * RTT_S * 1.3
    path.recovery.on_loss_detection_timeout(now=due)
    assert path.lost[-1] == numbers[0]


def test_losses_that_stay_losses_make_the_path_orderly_again() -> None:
    path = Path()
    path.overtaken(0.0, 0.03)
    assert path.recovery._packet_threshold == math.inf
    for turn in range(1, HONEST_LOSSES + 2):
        numbers = [path.send(turn + n / 1000) for n in range(10)]
        path.acknowledge(turn + 0.05, *numbers[1:])
        if path.space.loss_time is not None:
            path.recovery.on_loss_detection_timeout(now=path.space.loss_time)
    assert path.recovery._packet_threshold == K_PACKET_THRESHOLD
    assert path.recovery._time_threshold == K_TIME_THRESHOLD


def test_a_new_path_is_learned_anew() -> None:
    path = Path()
    path.overtaken(0.0, 0.03)
    path.recovery.learn_anew()
    assert path.overtaken(1.0, 0.03)


def test_what_is_remembered_of_lost_packets_is_bounded() -> None:
    path = Path()
    numbers = [path.send(0.0) for _ in range(2 * MAX_GIVEN_UP)]
    path.acknowledge(0.04, numbers[-1])
    assert len(path.lost) > MAX_GIVEN_UP
    assert len(path.recovery._given_up) == MAX_GIVEN_UP
    path.acknowledge(1.0, path.send(0.96))
    path.acknowledge(60.0, path.send(59.96))
    assert not path.recovery._given_up
    assert not path.window._doubted


@given(st.lists(st.tuples(st.floats(0.0, 0.2), st.booleans()), min_size=1, max_size=80))
def test_whatever_the_order_every_packet_is_told_of_once_and_the_counts_add_up(fates: list[tuple[float, bool]]) -> None:
    """Packets with a delay each, some of which never arrive."""
    path = Path()
    events = [(n / 1000, n, "send") for n in range(len(fates))]
    events += [(n / 1000 + RTT_S + late_s, n, "ack") for n, (late_s, arrives) in enumerate(fates) if arrives]
    arrived: set[int] = set()
    for now, number, what in sorted(events):
        if what == "send":
            path.send(now)
        else:
            arrived.add(number)
            path.acknowledge(now, *arrived)
    assert len(path.lost) == len(set(path.lost))
    assert path.window.bytes_in_flight == SIZE * len(path.space.sent_packets)
    assert path.window.congestion_window >= 2 * SIZE
