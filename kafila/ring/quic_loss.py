"""When a packet is lost: the QUIC library's loss detection, which learns on a path that reorders (pure).

A packet is taken for lost when three later ones were acknowledged, or 9/8 of a round trip after one was (RFC 9002
section 6.1). Where packets overtake one another by more than that - two radios, a bonded line - much is sent twice and
the window shrinks again and again for nothing. RFC 9002 sections 6.1.1 and 6.1.2 leave it to senders to learn, and RFC
8985 (RACK) says how: once a packet that was given up is acknowledged after all, packets no longer count, only time; and
it is waited as much longer as that packet would have needed. What the window lost for it is given back (the idea of RFC
4015). Losses that stay losses make it forget again.
"""

from __future__ import annotations

import math
from typing import Any

from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import K_PACKET_THRESHOLD, K_TIME_THRESHOLD, QuicPacketRecovery, QuicPacketSpace

from kafila.ring.quic_congestion import LinkCongestion

LONGEST_WAIT = 3.0
"""In round trips. Beyond it a timeout would have probed anyway, and waiting for the lost would cost more than sending
twice."""
_MARGIN = 1.1
"""Beyond the latest packet seen so far."""
HONEST_LOSSES = 16
"""Round trips with losses, none of them mistaken, after which the path is taken for orderly again (RFC 8985, section
6.2, step 4: 16 recoveries)."""
MAX_GIVEN_UP = 256
"""Lost packets whose late acknowledgement would be noticed."""


class AdaptiveRecovery(QuicPacketRecovery):
    """The library's recovery with thresholds that learn. Its congestion control is set after construction."""

    _cc: LinkCongestion

    def __init__(self, **settings: Any) -> None:
        """As the library's."""
        super().__init__(**settings)
        self.learn_anew()

    def learn_anew(self) -> None:
        """Another path: what this one did says nothing of it."""
        self._time_threshold = K_TIME_THRESHOLD
        self._packet_threshold: float = K_PACKET_THRESHOLD
        self._given_up: dict[int, QuicSentPacket] = {}
        self._honest = 0
        self._judged_at = -math.inf

    def on_ack_received(self, *, ack_rangeset: RangeSet, ack_delay: float, now: float, space: QuicPacketSpace) -> None:
        """As the library's; first, see who has arrived after all."""
        if self._given_up and space.is_application_data:
            late = [packet for number, packet in self._given_up.items() if number in ack_rangeset]
            if late:
                self._arrived_after_all(late, now)
            self._forget_old(now)
        super().on_ack_received(ack_rangeset=ack_rangeset, ack_delay=ack_delay, now=now, space=space)

    def _arrived_after_all(self, late: list[QuicSentPacket], now: float) -> None:
        for packet in late:
            del self._given_up[packet.packet_number]
        longest_s = now - min(_sent_at(packet) for packet in late)
        needed = _MARGIN * longest_s / self._base_s()
        self._time_threshold = min(max(self._time_threshold, needed), LONGEST_WAIT)
        self._packet_threshold = math.inf
        self._honest = 0
        self._cc.on_loss_was_none(late)

    def _forget_old(self, now: float) -> None:
        """What is not acknowledged by now was truly lost."""
        patience_s = 2 * LONGEST_WAIT * self._base_s()
        old = [number for number, packet in self._given_up.items() if _sent_at(packet) < now - patience_s]
        for number in old:
            del self._given_up[number]
        if old:
            self._cc.on_loss_was_true()

    def _base_s(self) -> float:
        """What the time threshold multiplies (RFC 9002 section 6.1.2)."""
        return max(self._rtt_latest, self._rtt_smoothed) if self._rtt_initialized else self._rtt_initial

    def _detect_loss(self, *, now: float, space: QuicPacketSpace) -> None:
        """The library's (RFC 9002 appendix A.10), with our thresholds."""
        wait_s = self._time_threshold * self._base_s()
        lost: list[QuicSentPacket] = []
        space.loss_time = None
        for number, packet in space.sent_packets.items():
            if number > space.largest_acked_packet:
                break
            sent_at = _sent_at(packet)
            if number <= space.largest_acked_packet - self._packet_threshold or sent_at + wait_s <= now:
                lost.append(packet)
            elif space.loss_time is None or space.loss_time > sent_at + wait_s:
                space.loss_time = sent_at + wait_s
        if lost:
            self._give_up(lost, now, space)

    def _give_up(self, lost: list[QuicSentPacket], now: float, space: QuicPacketSpace) -> None:
        persistent = self._in_persistent_congestion(packets=lost)
        self._on_packets_lost(now=now, packets=lost, persistent_congestion=persistent, space=space)
        if now - self._judged_at > self._base_s():
            self._judged_at = now
            self._honest += 1
            if self._honest > HONEST_LOSSES:
                self._time_threshold, self._packet_threshold = K_TIME_THRESHOLD, K_PACKET_THRESHOLD
        if not space.is_application_data:
            self._cc.on_loss_was_true()  # of a handshake: not worth watching
            return
        self._given_up.update((packet.packet_number, packet) for packet in lost)
        while len(self._given_up) > MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]


def _sent_at(packet: QuicSentPacket) -> float:
    return packet.sent_time or 0.0  # never None for a packet that has left
