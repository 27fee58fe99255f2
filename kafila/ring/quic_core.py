"""The QUIC library's connection with our policies, and every touch of its insides but the fast path's.

aioquic is pinned to the minor releases whose insides these are; ``tests/ring/test_quic_core.py`` fails loudly where
another has moved them. What is ours:

- the client's certificate is asked for;
- flow control windows slide instead of doubling for ever, so a peer can make us hold only so much;
- acknowledgements wait for company (below);
- the window and the pacing of ``quic_congestion.py``, the patience of ``quic_loss.py``;
- forgetting a path.
"""

from __future__ import annotations

import logging
import math

from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import MAX_STREAM_DATA_FRAME_CAPACITY, QuicConnectionState
from aioquic.quic.connection import QuicConnection as AioquicConnection
from aioquic.quic.packet import QuicFrameType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream
from aioquic.tls import Epoch, Group
from cryptography.hazmat.primitives.serialization import Encoding

from kafila.ring.quic_congestion import INITIAL_WINDOW_PACKETS, BurstPacer, LinkCongestion
from kafila.ring.quic_loss import AdaptiveRecovery
from kafila.ring.quic_retry import Accept

# A peer's mistakes are events to us, not lines on somebody's terminal; and asking a logger costs something each packet.
logging.getLogger("quic").disabled = True

PEER = ("peer", 0)
"""The one address aioquic ever sees. Not an IP literal, so a server's preferred address is never tried either."""

STREAMS_EACH_WAY = 2

UNLIMITED_BYTES = 2**60
"""The window of the whole connection. The streams' windows are the bound; a second one would only cost frames."""

ACK_DELAY_S = 0.010
"""How long the acknowledgement of a lone frame waits for company; aioquic tells peers 25 ms (``max_ack_delay``), so
their timers allow for it. aioquic's own 1 ms would answer every frame with a packet."""

ACK_EVERY_PACKETS = INITIAL_WINDOW_PACKETS
"""Answered at once: a sender without losses has a window of at least these, so it never stands still for the delay."""

KEY_UPDATE_PACKETS = 2**22
"""Packets under one key: half of what AES-GCM bears (RFC 9001 section 6.6). The library never changes keys itself."""

UNANSWERED_PACKETS = 128
"""A member that only receives sends only acknowledgements, which nobody acknowledges (RFC 9000 section 13.2.4), and the
library keeps each until somebody does. After this many a PING asks."""


class CoreConnection(AioquicConnection):
    """aioquic's connection as a link wants it."""

    def __init__(self, configuration: QuicConfiguration, accepted: Accept | None = None) -> None:
        configuration.max_data = UNLIMITED_BYTES
        self._stream_window = configuration.max_stream_data
        super().__init__(
            configuration=configuration,
            original_destination_connection_id=accepted.original_destination_cid if accepted else None,
            retry_source_connection_id=accepted.retry_source_cid or None if accepted else None,
        )
        self._ack_delay = ACK_DELAY_S
        for limit, count in ((self._local_max_streams_bidi, 0), (self._local_max_streams_uni, STREAMS_EACH_WAY)):
            limit.value = limit.sent = count
        self._loss: AdaptiveRecovery = AdaptiveRecovery(
            congestion_control_algorithm=configuration.congestion_control_algorithm,
            initial_rtt=configuration.initial_rtt,
            max_datagram_size=configuration.max_datagram_size,
            peer_completed_address_validation=not configuration.is_client,
            send_probe=self._send_probe,
        )
        self._loss._cc = self._congestion = LinkCongestion(max_datagram_size=configuration.max_datagram_size)
        self._set_pacer(configuration.max_datagram_size)
        self._next_key_update = KEY_UPDATE_PACKETS
        self._answered_packet = -1
        self._answered_ranges = 0
        self._new_path_packet: int | None = None
        self.has_said_all = False
        """Whether the last flush, though it had something, left nothing for another before an input or the timer."""

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._request_client_certificate = True
        # One group, which every Kafila has: a client makes a key for each that it offers, needed or not.
        self.tls._supported_groups = [Group.X25519]
        self._space: QuicPacketSpace = self._spaces[Epoch.ONE_RTT]

    @property
    def is_confirmed(self) -> bool:
        """Whether both ends are known to have finished the handshake (RFC 9001 section 4.1.2)."""
        return self._handshake_confirmed

    @property
    def peer_certificate_der(self) -> bytes | None:
        """The certificate whose key the peer has shown to hold (TLS CertificateVerify), or ``None``."""
        certificate = self.tls._peer_certificate
        return certificate.public_bytes(Encoding.DER) if certificate else None

    @property
    def close_event(self) -> events.ConnectionTerminated | None:
        """Why the connection is ending, known before the library's draining period is over."""
        return self._close_event

    @property
    def closed_by_peer(self) -> bool:
        """Whether a CONNECTION_CLOSE came, rather than an error or timeout of our own."""
        return self._state is QuicConnectionState.DRAINING

    @property
    def smoothed_rtt_s(self) -> float | None:
        """Smoothed round-trip time, ``None`` before the first sample."""
        return self._loss._rtt_smoothed if self._loss._rtt_initialized else None

    @property
    def minimum_rtt_s(self) -> float | None:
        """The shortest round trip seen (RFC 9002 section 5.2), ``None`` before the first sample."""
        return self._loss._rtt_min if self._loss._rtt_initialized else None

    @property
    def local_connection_ids(self) -> tuple[bytes, ...]:
        """Every connection id that was given to the peer and is still in force."""
        return tuple(each.cid for each in self._host_cids)

    @property
    def newest_packet(self) -> int:
        """The highest 1-RTT packet number received and authenticated, -1 before the first."""
        return self._space.largest_received_packet

    @property
    def unacknowledged_bytes(self) -> int:
        """Stream bytes handed over and not yet acknowledged."""
        total = 0
        for stream in self._streams.values():  # a generator would cost more than what it adds up: once a message
            total += len(stream.sender._buffer)
        return total

    @property
    def awaits_answer(self) -> bool:
        """Whether anything is out that the peer must acknowledge."""
        return self._loss.bytes_in_flight > 0

    @property
    def untouched(self) -> bool:
        """A server that no valid packet has reached."""
        return self._state is QuicConnectionState.FIRSTFLIGHT

    @property
    def has_news(self) -> bool:
        """Whether there are events to collect, or an end to notice."""
        return bool(self._events) or self._close_event is not None

    def send_data(self, stream_id: int, data: bytes) -> None:
        """As ``send_stream_data``, which looks up again whether a stream that is there may be written to."""
        if (stream := self._streams.get(stream_id)) is None:
            self.send_stream_data(stream_id, data)
        else:
            stream.sender.write(data)

    def take(self, datagram: bytes, now: float) -> None:
        """One datagram came."""
        self.receive_datagram(datagram, PEER, now)
        if self._new_path_packet is not None:
            self._settle_path(self._new_path_packet)

    def flush(self, now: float) -> list[bytes]:
        """The datagrams that should leave now."""
        self._look_after()
        self._hasten_acknowledgement(now, any(not stream.sender.buffer_is_empty for stream in self._streams_queue))
        datagrams = [datagram for datagram, _ in self.datagrams_to_send(now)]
        self._note_acknowledgement()
        return datagrams

    def reset_path(self, now: float, max_datagram_bytes: int) -> None:
        """Datagrams go another way: forget the old way's round trip and window, and use the new one's datagram size."""
        self._max_datagram_size = max_datagram_bytes
        self._loss._cc = self._congestion = self._congestion.successor(now, max_datagram_bytes)
        self._forget_round_trip()
        self._new_path_packet = self._packet_number

    def retry_now(self) -> None:
        """What is lost may get through again: forget how long the timeouts had grown (RFC 9002 section 6.2.1)."""
        self._loss._pto_count = 0

    def resend(self, now: float) -> None:
        """What is unacknowledged went a way that leads nowhere: send it again, whatever the window thinks of that."""
        if self._handshake_confirmed:
            self._loss._on_packets_lost(
                congestion_event=False, now=now, packets=tuple(self._space.sent_packets.values()), space=self._space
            )

    def resize(self, max_datagram_bytes: int) -> None:
        """The same way carries datagrams of another size."""
        self._max_datagram_size = max_datagram_bytes
        self._congestion.resize(max_datagram_bytes)
        self._pacer.resize(max_datagram_bytes)

    def _forget_round_trip(self) -> None:
        loss = self._loss
        loss._pto_count = 0
        loss.learn_anew()
        loss._rtt_initialized = False
        loss._rtt_min = math.inf
        loss._rtt_latest = loss._rtt_smoothed = loss._rtt_variance = 0.0
        self._set_pacer(self._max_datagram_size)

    def _set_pacer(self, max_datagram_bytes: int) -> None:
        self._pacer = BurstPacer(max_datagram_bytes)
        self._loss._pacer = self._pacer  # type: ignore[assignment]  # it has all that is called

    def _settle_path(self, first_packet: int) -> None:
        """Until a packet sent the new way is acknowledged, every round trip measured is the old way's."""
        if self._space.largest_acked_packet >= first_packet:
            self._new_path_packet = None
        else:
            self._forget_round_trip()

    def _hasten_acknowledgement(self, now: float, data_leaves: bool) -> None:
        """Acknowledge now: many packets, a gap that opened or closed, or along with data that leaves anyway."""
        space = self._space
        if space.ack_at is not None and (
            data_leaves
            or space.ack_at <= now
            or space.largest_received_packet - self._answered_packet >= ACK_EVERY_PACKETS
            or len(space.ack_queue) != self._answered_ranges
        ):
            # Strictly in the past: the library lets the pacer hold back what is due at this very instant, and then its
            # timer says "now" for ever.
            space.ack_at = min(space.ack_at, math.nextafter(now, -math.inf))

    def _note_acknowledgement(self) -> None:
        space = self._space
        if space.ack_at is None:
            self._answered_packet = space.largest_received_packet
            self._answered_ranges = len(space.ack_queue)

    def _look_after(self) -> None:
        """What the library leaves undone in a connection that lives long."""
        if self._packet_number >= self._next_key_update:
            self._next_key_update = self._packet_number + KEY_UPDATE_PACKETS
            self.request_key_update()
        space = self._space
        if (
            len(space.sent_packets) > UNANSWERED_PACKETS
            and not space.ack_eliciting_in_flight
            and space.ack_at is not None
        ):
            self.send_ping(0)

    def _write_stream_limits(self, builder: QuicPacketBuilder, space: QuicPacketSpace, stream: QuicStream) -> None:  # noqa: ARG002  - the library's signature
        """Slide the stream's window, half a window at a time."""
        if self._window_is_due(stream):
            if stream.max_stream_data_local_sent == stream.max_stream_data_local:  # else it was lost: say it again
                stream.max_stream_data_local = stream.receiver.starting_offset() + self._stream_window
            frame = builder.start_frame(
                QuicFrameType.MAX_STREAM_DATA,
                capacity=MAX_STREAM_DATA_FRAME_CAPACITY,
                handler=self._on_max_stream_data_delivery,
                handler_args=(stream,),
            )
            frame.push_uint_var(stream.stream_id or 0)
            frame.push_uint_var(stream.max_stream_data_local)
            stream.max_stream_data_local_sent = stream.max_stream_data_local

    def _window_is_due(self, stream: QuicStream) -> bool:
        limit = stream.max_stream_data_local
        return limit != stream.max_stream_data_local_sent or (
            limit - stream.receiver.starting_offset() <= self._stream_window // 2 and limit > 0  # 0: a stream of ours
        )
