"""The packets that a link is made of, taken past the QUIC library's general machinery.

Of a thousand packets of a link, nearly all are short-header packets of stream data and acknowledgements on a confirmed
connection. aioquic spends most of its time on each deciding things that are long settled. Here only the framing,
sealing and opening of those packets is ours: their bookkeeping (loss recovery, acknowledgement, reassembly, windows) is
the library's, and whatever is not such a packet goes to the library whole, before anything was changed. The two ways
are tested against each other. ``bench/hop.py`` says what it saves.

Wire format: RFC 9000 sections 17.3.1 (short header), 19.3 (ACK), 19.8 (STREAM); RFC 9001 section 5 (protection).
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from aioquic._crypto import AEAD, CryptoError, HeaderProtection
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnectionState
from aioquic.quic.crypto import CryptoContext
from aioquic.quic.packet import QuicPacketType, QuicStreamFrame, decode_packet_number
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import MAX_ACK_RANGES
from aioquic.quic.stream import QuicStream, QuicStreamSender
from aioquic.tls import Epoch

from kafila.ring.quic_core import CoreConnection
from kafila.ring.quic_frames import (
    ACK,
    ACK_BYTES,
    STREAM_HEADER_BYTES,
    ack_frame,
    read_ack,
    read_stream_header,
    stream_header,
)
from kafila.ring.quic_retry import CONNECTION_ID_BYTES, Accept

_LONG_HEADER = 0x80
_SHORT_HEADER = 0x40  # the fixed bit
_RESERVED_BITS = 0x18
_KEY_PHASE_SHIFT = 2
_NUMBER_BYTES = 2  # as the library sends them
_NUMBER_AT = 1 + CONNECTION_ID_BYTES
_HEADER_BYTES = _NUMBER_AT + _NUMBER_BYTES
_TAG_BYTES = 16
_SAMPLE_AT = _NUMBER_AT + 4  # RFC 9001 section 5.4.2: as if the number took four bytes
_SAMPLE_STOP = _SAMPLE_AT + 16
_SEALED_SAMPLE = slice(_SAMPLE_AT - _HEADER_BYTES, _SAMPLE_STOP - _HEADER_BYTES)


class _Piece(NamedTuple):
    """Bytes of a stream on their way out."""

    sender: QuicStreamSender
    stream_id: int
    offset: int
    data: memoryview


class _Plain(NamedTuple):
    """An opened packet of nothing but one ACK or none, and stream data."""

    number: int
    acknowledged: RangeSet | None
    ack_delay: int
    frames: list[tuple[QuicStream, QuicStreamFrame]]


class FastConnection(CoreConnection):
    """A connection whose ordinary packets are cheap."""

    def __init__(
        self, configuration: QuicConfiguration, deliver: Callable[[int, bytes], None], accepted: Accept | None = None
    ) -> None:
        """``deliver`` takes a stream's number and its next bytes, of packets read here; the library's own events carry
        the others', so collect those after every :meth:`take`."""
        super().__init__(configuration, accepted)
        self._deliver = deliver
        self._may_have_chores = True
        self._heard_at = -math.inf

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self._keys = self._cryptos[Epoch.ONE_RTT]
        self._crypto_stream: QuicStream = self._crypto_streams[Epoch.ONE_RTT]

    def take(self, datagram: bytes, now: float) -> None:
        """One datagram came, whatever it is."""
        if len(datagram) >= _SAMPLE_STOP and not datagram[0] & _LONG_HEADER and self._is_settled():
            try:
                packet = self._open(datagram)
            except CryptoError:
                return  # forged or damaged: lost
            if packet is not None:
                self._take_plain(packet, now)
                return
        self._may_have_chores = True
        super().take(datagram, now)

    def handle_timer(self, now: float) -> None:
        """As the library's."""
        self._may_have_chores = True
        super().handle_timer(now)

    def send_ping(self, uid: int) -> None:
        """As the library's."""
        self._may_have_chores = True
        super().send_ping(uid)

    def resend(self, now: float) -> None:
        """As the general one; what is lost may be other than data."""
        self._may_have_chores = True
        super().resend(now)

    def request_key_update(self) -> None:
        """As the library's."""
        self._may_have_chores = True
        super().request_key_update()

    def flush(self, now: float) -> list[bytes]:
        """The datagrams that should leave now."""
        self.has_said_all = False
        if not self._is_settled():
            return super().flush(now)
        self._look_after()
        if self._may_have_chores:
            self._may_have_chores = self._has_chores()
        if self._may_have_chores:
            return super().flush(now)
        sources = [stream for stream in self._streams_queue if not stream.sender.buffer_is_empty]
        self._hasten_acknowledgement(now, bool(sources))
        space = self._space
        acknowledge = space.ack_at is not None and space.ack_at <= now
        if acknowledge and len(space.ack_queue) > 1:
            return super().flush(now)
        if not (acknowledge or sources):
            self._pacing_at = None
            return []
        datagrams = self._send_plain(sources, acknowledge, now)
        self.has_said_all = True
        self._note_acknowledgement()
        return datagrams

    def _is_settled(self) -> bool:
        """Whether there is nothing left of the handshake, and no end in sight."""
        return self._handshake_confirmed and self._state is QuicConnectionState.CONNECTED and not self._close_pending

    def _has_chores(self) -> bool:
        """Whether anything waits to be said but stream data and acknowledgements."""
        path = self._network_paths[0]
        return bool(
            self._probe_pending
            or self._ping_pending
            or self._handshake_done_pending
            or self._retire_connection_ids
            or self._datagrams_pending
            or self._streams_blocked_pending
            or self._keys._update_key_requested
            or path.remote_challenges
            or not path.is_validated
            or len(self._network_paths) > 1
            or not self._crypto_stream.sender.buffer_is_empty
            or any(not connection_id.was_sent for connection_id in self._host_cids)
            or any(self._stream_has_chores(stream) for stream in self._streams_queue)
        )

    def _stream_has_chores(self, stream: QuicStream) -> bool:
        return (
            stream.is_blocked
            or stream.sender.reset_pending
            or stream.receiver.stop_pending
            or stream.is_finished
            or self._window_is_due(stream)
        )

    # Sending

    def _send_plain(self, sources: list[QuicStream], acknowledge: bool, now: float) -> list[bytes]:
        """As many datagrams as the window and the pacer let go, full ones but the last."""
        pieces = self._cut(sources, now)
        seal, datagrams = self._sealer(), list[bytes]()
        while pieces or acknowledge:
            packet, frames = _new_packet(self._packet_number, now), list[bytes | memoryview]()
            room = self._max_datagram_size - _HEADER_BYTES - _TAG_BYTES
            if acknowledge:
                room -= self._write_ack(packet, frames, now)
                acknowledge = False
            while pieces and room > STREAM_HEADER_BYTES:
                room -= _write_stream(packet, frames, pieces, room)
            datagram = seal(packet.packet_number, b"".join(frames))
            datagrams.append(datagram)
            packet.sent_bytes = len(datagram)
            self._register(packet, now)
        more = self._window() >= self._max_datagram_size and any(len(stream.sender._pending) for stream in sources)
        self._pacing_at = self._pacer.next_send_time(now) if more else None
        return datagrams

    def _window(self) -> int:
        return self._congestion.congestion_window - self._congestion.bytes_in_flight

    def _cut(self, sources: list[QuicStream], now: float) -> deque[_Piece]:
        """The stream bytes that may leave now, control before bulk. An acknowledgement that goes along may push the
        last of them into one datagram more than the window has room for."""
        packets = min(self._window(), self._pacer.allowance(now)) // self._max_datagram_size
        room = packets * (self._max_datagram_size - _HEADER_BYTES - _TAG_BYTES - STREAM_HEADER_BYTES)
        pieces: deque[_Piece] = deque()
        for stream in sorted(sources, key=_stream_number) if len(sources) > 1 else sources:
            sender = stream.sender
            while room > 0:
                highest = sender.highest_offset
                unused = self._remote_max_data - self._remote_max_data_used
                frame = sender.get_frame(room, min(highest + unused, stream.max_stream_data_remote))
                if frame is None:  # nothing more, or nothing more that the peer has room for
                    break
                self._remote_max_data_used += sender.highest_offset - highest
                pieces.append(_Piece(sender, _stream_number(stream), frame.offset, memoryview(frame.data)))
                room -= len(frame.data)
                if not len(sender._pending):
                    sender.buffer_is_empty = True  # as the library notes when it is asked in vain
                    break
        return pieces

    def _write_ack(self, packet: QuicSentPacket, frames: list[bytes | memoryview], now: float) -> int:
        space = self._space
        numbers = space.ack_queue[0]
        delay_us = int((now - (space.largest_received_time or now)) * 1_000_000)
        frames.append(ack_frame(numbers, delay_us >> self._local_ack_delay_exponent))
        packet.delivery_handlers.append((self._on_ack_delivery, (space, space.largest_received_packet)))
        space.ack_at = None
        return ACK_BYTES

    def _sealer(self) -> Callable[[int, bytes], bytes]:
        """Makes datagrams of packet numbers and payloads (RFC 9001 sections 5.3 and 5.4), under the present keys."""
        aead, hp = _protection(self._keys.send)
        first = _SHORT_HEADER | self._keys.key_phase << _KEY_PHASE_SHIFT | (_NUMBER_BYTES - 1)
        cid = self._peer_cid.cid
        start = bytes((first,)) + cid

        def seal(number: int, payload: bytes) -> bytes:
            shown_number = number & 0xFFFF
            sealed = aead.encrypt(payload, start + shown_number.to_bytes(_NUMBER_BYTES, "big"), number)
            mask = hp._mask(sealed[_SEALED_SAMPLE])
            shown_number ^= mask[1] << 8 | mask[2]
            return b"".join(
                (bytes((first ^ mask[0] & 0x1F,)), cid, shown_number.to_bytes(_NUMBER_BYTES, "big"), sealed)
            )

        return seal

    def _register(self, packet: QuicSentPacket, now: float) -> None:
        """The library's bookkeeping for a packet that leaves."""
        self._packet_number += 1
        self._loss.on_packet_sent(packet=packet, space=self._space)
        if packet.is_ack_eliciting and not self._ack_eliciting_sent_since_receipt:
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = True
        if packet.in_flight:
            # An acknowledgement alone is not paced (RFC 9002 section 7.7), or a receiver could talk itself to a halt.
            self._pacer.update_after_send(now)

    # Receiving

    def _open(self, data: bytes) -> _Plain | None:
        """A packet of ours to take, or ``None`` for the library to look at. Changes nothing.

        Raises CryptoError where it cannot be opened.
        """
        if data[1:_NUMBER_AT] != self.host_cid:
            return None
        keys = self._keys.recv
        aead, hp = _protection(keys)
        mask = hp._mask(data[_SAMPLE_AT:_SAMPLE_STOP])
        first = data[0] ^ mask[0] & 0x1F
        if first & (_RESERVED_BITS | 0x03) != _NUMBER_BYTES - 1 or first >> _KEY_PHASE_SHIFT & 1 != keys.key_phase:
            return None
        shown_number = int.from_bytes(data[_NUMBER_AT:_HEADER_BYTES], "big") ^ (mask[1] << 8 | mask[2])
        number = decode_packet_number(shown_number, 8 * _NUMBER_BYTES, self._space.expected_packet_number)
        header = bytes((first,)) + data[1:_NUMBER_AT] + shown_number.to_bytes(_NUMBER_BYTES, "big")
        return self._parse(number, aead.decrypt(data[_HEADER_BYTES:], header, number))

    def _parse(self, number: int, payload: bytes) -> _Plain | None:
        """The frames, or ``None`` where there is anything else or anything wrong: the library knows what to say."""
        acknowledged, ack_delay, at = None, 0, 0
        frames: list[tuple[QuicStream, QuicStreamFrame]] = []
        try:
            if payload[0] == ACK:
                acknowledged, ack_delay, at = read_ack(payload)
            while at < len(payload):
                header = read_stream_header(payload, at)
                if header is None or (stream := self._streams.get(header[0])) is None:
                    return None
                _, offset, size = header
                at += STREAM_HEADER_BYTES
                data = payload[at : at + size]
                if len(data) != size or offset + size > stream.max_stream_data_local:  # 0 for a stream of ours
                    return None
                frames.append((stream, QuicStreamFrame(data=data, offset=offset)))
                at += size
        except (IndexError, ValueError, struct.error):  # nothing at all, a damaged ACK, or another frame's end
            return None
        return _Plain(number, acknowledged, ack_delay, frames)

    def _take_plain(self, packet: _Plain, now: float) -> None:
        """What the library does with such a packet."""
        space, number = self._space, packet.number
        if number in space.received_packets:
            return
        space.expected_packet_number = max(space.expected_packet_number, number + 1)
        if packet.acknowledged is not None:
            delay_s = (packet.ack_delay << self._remote_ack_delay_exponent) / 1_000_000
            self._loss.on_ack_received(ack_rangeset=packet.acknowledged, ack_delay=delay_s, now=now, space=space)
            self._may_have_chores = True  # what was lost may have been other than data
            if self._new_path_packet is not None:
                self._settle_path(self._new_path_packet)
        for stream, frame in packet.frames:
            receiver = stream.receiver
            highest = receiver.highest_offset
            event = receiver.handle_frame(frame)
            self._local_max_data.used += receiver.highest_offset - highest
            if event is not None:
                self._deliver(_stream_number(stream), event.data)
                self._may_have_chores = self._may_have_chores or self._window_is_due(stream)
        self._note_received(number, now, asks_for_answer=bool(packet.frames))

    def _note_received(self, number: int, now: float, *, asks_for_answer: bool) -> None:
        space = self._space
        if now != self._heard_at:  # once a batch
            self._heard_at = now
            self._close_at = now + self._idle_timeout()
        self._ack_eliciting_sent_since_receipt = False
        if number > space.largest_received_packet:
            space.largest_received_packet, space.largest_received_time = number, now
        space.ack_queue.add(number)
        space.received_packets.add(number)
        if len(space.ack_queue) > MAX_ACK_RANGES:
            space.ack_queue.shift()
        if asks_for_answer and space.ack_at is None:
            space.ack_at = now + self._ack_delay


def _write_stream(packet: QuicSentPacket, frames: list[bytes | memoryview], pieces: deque[_Piece], room: int) -> int:
    """What fits of the first piece; how much room that takes."""
    sender, stream_id, offset, data = pieces.popleft()
    size = room - STREAM_HEADER_BYTES
    if size < len(data):
        pieces.appendleft(_Piece(sender, stream_id, offset + size, data[size:]))
        data = data[:size]
    size = len(data)
    frames.append(stream_header(stream_id, offset, size))
    frames.append(data)
    packet.in_flight = packet.is_ack_eliciting = True
    packet.delivery_handlers.append((sender.on_data_delivery, (offset, offset + size, False)))
    return STREAM_HEADER_BYTES + size


def _protection(keys: CryptoContext) -> tuple[AEAD, HeaderProtection]:
    if keys.aead is None or keys.hp is None:
        raise CryptoError("these keys are gone")
    return keys.aead, keys.hp


def _stream_number(stream: QuicStream) -> int:
    return stream.stream_id or 0


def _new_packet(number: int, now: float) -> QuicSentPacket:
    return QuicSentPacket(
        epoch=Epoch.ONE_RTT,
        in_flight=False,
        is_ack_eliciting=False,
        is_crypto_packet=False,
        packet_number=number,
        packet_type=QuicPacketType.ONE_RTT,
        sent_time=now,
    )
