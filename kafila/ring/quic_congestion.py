"""How fast one link sends: the congestion window and the pacer handed to the QUIC library (pure).

A ring's traffic is short frames with long silences, and now and then a prefill. The library's own control grows its
window in silence (RFC 9002 section 7.8 forbids that: the window would say nothing about the path when a prefill comes),
leaves slow start at the jitter of a LAN, and paces each packet of a frame by a timer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from aioquic.quic.congestion.base import QuicCongestionControl
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.tls import Epoch

INITIAL_WINDOW_PACKETS = 10  # RFC 9002 section 7.2
MINIMUM_WINDOW_PACKETS = 2  # RFC 9002 section 7.2
MAXIMUM_WINDOW_BYTES = 16 * 2**20
"""A gigabit over 128 ms. Packet numbers travel as 16 bits, so fewer than 32,768 packets may be in flight."""

_LOSS_FACTOR = 0.7
"""CUBIC's decrease (RFC 9438 section 4.6), gentler than Reno's half: home links lose to radio as well as to queues."""

_HYSTART_SAMPLES = 8  # RFC 9406 section 4.3, N_RTT_SAMPLE
_HYSTART_MIN_RISE_S = 0.004  # RFC 9406 section 4.3, MIN_RTT_THRESH
_HYSTART_MAX_RISE_S = 0.016  # RFC 9406 section 4.3, MAX_RTT_THRESH

_PACING_GAIN = 1.25  # RFC 9002 section 7.7
BURST_S = 0.002
"""What may leave at once: what the path carries in this time, or the initial window (RFC 9002 section 7.7) if that is
more. So a frame of 8 KiB is never paced, and a path with a round trip under 2 ms is not paced at all."""


class LinkCongestion(QuicCongestionControl):
    """NewReno that only grows while its window is what limits it, with HyStart's exit from slow start."""

    def __init__(self, *, max_datagram_size: int) -> None:
        super().__init__(max_datagram_size=max_datagram_size)
        self.congestion_window = INITIAL_WINDOW_PACKETS * max_datagram_size
        self._datagram_bytes = max_datagram_size
        self._recovery_began = -math.inf
        self._in_use_at = -math.inf
        self._acked_in_avoidance = 0
        self._lowest_rtt_s = math.inf
        self._raised_samples = 0
        self._before_loss: tuple[int, int | None] | None = None
        self._doubted: set[tuple[Epoch, int]] = set()

    def successor(self, now: float, max_datagram_size: int) -> LinkCongestion:
        """For a new path: the initial window again. What is in flight went the old way, and its loss says nothing."""
        fresh = LinkCongestion(max_datagram_size=max_datagram_size)
        fresh.bytes_in_flight = self.bytes_in_flight
        fresh._recovery_began = now
        return fresh

    def resize(self, max_datagram_size: int) -> None:
        """Other datagrams, the same path."""
        self._datagram_bytes = max_datagram_size
        self.congestion_window = max(self.congestion_window, self._least())

    def on_packet_acked(self, *, now: float, packet: QuicSentPacket) -> None:  # noqa: ARG002  - the library's signature
        """Grow, if the window was in use when the packet left."""
        self.bytes_in_flight -= packet.sent_bytes
        window = self.congestion_window
        sent_at = packet.sent_time or 0.0
        if not self._recovery_began < sent_at <= self._in_use_at or window >= MAXIMUM_WINDOW_BYTES:
            return
        if self.ssthresh is None or window < self.ssthresh:
            self.congestion_window += packet.sent_bytes
            return
        self._acked_in_avoidance += packet.sent_bytes
        if self._acked_in_avoidance >= window:
            self._acked_in_avoidance -= window
            self.congestion_window += self._datagram_bytes

    def on_packet_sent(self, *, packet: QuicSentPacket) -> None:
        """Count what is in flight."""
        self.bytes_in_flight += packet.sent_bytes
        if self.bytes_in_flight * 2 >= self.congestion_window:
            self._in_use_at = packet.sent_time or 0.0

    def on_packets_expired(self, *, packets: Iterable[QuicSentPacket]) -> None:
        """Forget packets without calling them lost."""
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes

    def on_packets_lost(self, *, now: float, packets: Iterable[QuicSentPacket]) -> None:
        """Shrink, once a round trip."""
        last_sent = -math.inf
        for packet in packets:
            self.bytes_in_flight -= packet.sent_bytes
            last_sent = packet.sent_time or 0.0
            self._doubted.add((packet.epoch, packet.packet_number))
        if last_sent > self._recovery_began:
            self._recovery_began = now
            self._before_loss = self._before_loss or (self.congestion_window, self.ssthresh)
            self.congestion_window = max(int(self.congestion_window * _LOSS_FACTOR), self._least())
            self.ssthresh = self.congestion_window

    def on_loss_was_none(self, packets: Iterable[QuicSentPacket]) -> None:
        """These arrived after all. When nothing else has shrunk the window, it is what it was (RFC 4015)."""
        self._doubted.difference_update((packet.epoch, packet.packet_number) for packet in packets)
        if self._before_loss is not None and not self._doubted:
            window, self.ssthresh = self._before_loss
            self.congestion_window = max(self.congestion_window, window)
            self._before_loss = None

    def on_loss_was_true(self) -> None:
        """What shrank the window was no mistake."""
        self._before_loss = None
        self._doubted.clear()

    def on_persistent_congestion(self) -> None:
        """Nothing got through for several round trips (RFC 9002 section 7.6)."""
        self.congestion_window = self._least()
        self._recovery_began = -math.inf

    def on_rtt_measurement(self, *, now: float, rtt: float) -> None:  # noqa: ARG002  - the library's signature
        """Leave slow start when the round trip stays raised: a queue is building (RFC 9406)."""
        if self.ssthresh is not None:
            return
        rise = min(max(self._lowest_rtt_s / 8, _HYSTART_MIN_RISE_S), _HYSTART_MAX_RISE_S)
        self._raised_samples = self._raised_samples + 1 if rtt > self._lowest_rtt_s + rise else 0
        self._lowest_rtt_s = min(self._lowest_rtt_s, rtt)
        if self._raised_samples >= _HYSTART_SAMPLES:
            self.ssthresh = self.congestion_window

    def _least(self) -> int:
        return MINIMUM_WINDOW_PACKETS * self._datagram_bytes


class BurstPacer:
    """A token bucket of bytes (RFC 9002 section 7.7) that wakes for bursts, never for single packets."""

    def __init__(self, max_datagram_bytes: int) -> None:
        self._datagram_bytes = max_datagram_bytes
        self._rate = 0.0  # bytes a second; 0 before the first round trip is known: unpaced, the window bounds it
        self._capacity = float(INITIAL_WINDOW_PACKETS * max_datagram_bytes)
        self._tokens = self._capacity
        self._filled_at = -math.inf

    def resize(self, max_datagram_bytes: int) -> None:
        """Other datagrams, the same path."""
        self._datagram_bytes = max_datagram_bytes
        self._set_capacity()

    def update_rate(self, congestion_window: int, smoothed_rtt: float) -> None:
        """Spread a window, and a quarter more, over a round trip."""
        self._rate = _PACING_GAIN * congestion_window / max(smoothed_rtt, 1e-6)
        self._set_capacity()

    def _set_capacity(self) -> None:
        self._capacity = max(INITIAL_WINDOW_PACKETS * self._datagram_bytes, self._rate * BURST_S)

    def allowance(self, now: float) -> int:
        """How many bytes may leave now."""
        if not self._rate:
            return MAXIMUM_WINDOW_BYTES
        if now > self._filled_at:
            self._tokens = min(self._capacity, self._tokens + (now - self._filled_at) * self._rate)
            self._filled_at = now
        return int(self._tokens)

    def next_send_time(self, now: float) -> float | None:
        """``None`` to send now, or the time when half a burst may leave."""
        if self.allowance(now) >= self._datagram_bytes:
            return None
        return now + (self._capacity / 2 - self._tokens) / self._rate

    def update_after_send(self, now: float) -> None:  # noqa: ARG002  - the library's signature
        """A packet left."""
        self._tokens -= self._datagram_bytes
