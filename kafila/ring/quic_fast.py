"""The packets that a link is made of, taken past the QUIC library's general machinery.

Of a thousand packets of a link, nearly all are short-header packets of stream data and acknowledgements on a confirmed
connection. aioquic spends most of its time on each deciding things that are long settled. Here only the framing,
sealing and opening of those packets is ours: their bookkeeping (loss recovery, acknowledgement, reassembly, windows) is
the library's, and whatever is not such a packet goes to the library whole, before anything was changed. The two ways
are tested against each other. ``bench/hop.py`` says what it saves.

Wire format: RFC 9000 sections 17.3.1 (short header), 19.3 (ACK), 19.8 (STREAM); RFC 9001 section 5 (protection).
"""

from __future__ import annotations

from typing import NamedTuple

from aioquic._crypto import AEAD, CryptoError, HeaderProtection
from aioquic.buffer import (  # type: ignore[attr-defined]  # Buffer's home; re-exported without saying so
    Buffer,
    encode_uint_var,
)
from aioquic.quic.connection import NetworkAddress, QuicConnectionState
from aioquic.quic.crypto import CryptoContext
from aioquic.quic.packet import QuicPacketType, QuicStreamFrame, decode_packet_number, pull_ack_frame
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import MAX_ACK_RANGES
from aioquic.quic.stream import QuicStream
from aioquic.tls import Epoch

from kafila.ring.quic_core import CoreConnection
from kafila.ring.quic_retry import CONNECTION_ID_BYTES

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

_ACK = 0x02
_STREAM = 0x08
_STREAM_END = 0x10
_FIN = 0x01
_LENGTH = 0x02
_OFFSET = 0x04


class _Plain(NamedTuple):
    """An opened packet of nothing but one ACK or none, and stream data."""

    number: int
    acknowledged: RangeSet | None
    ack_delay: int
    frames: list[tuple[QuicStream, QuicStreamFrame]]


class FastConnection(CoreConnection):
    """A connection whose ordinary packets are cheap."""

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self._keys = self._cryptos[Epoch.ONE_RTT]
        self._crypto_stream: QuicStream = self._crypto_streams[Epoch.ONE_RTT]

    def receive_datagram(self, data: bytes, addr: NetworkAddress, now: float) -> None:
        """One datagram, whatever it is."""
        if len(data) >= _SAMPLE_STOP and not data[0] & _LONG_HEADER and self._is_settled():
            try:
                packet = self._open(data)
            except CryptoError:
                return  # forged or damaged: lost
            if packet is not None:
                self._take_plain(packet, now)
                return
        super().receive_datagram(data, addr, now)

    def _build(self, now: float) -> list[bytes]:
        return self._send_plain(now) if self._is_settled() and not self._has_chores(now) else super()._build(now)

    def _is_settled(self) -> bool:
        """Whether there is nothing left of the handshake, and no end in sight."""
        return self._handshake_confirmed and self._state is QuicConnectionState.CONNECTED and not self._close_pending

    def _has_chores(self, now: float) -> bool:
        """Whether anything waits to be said but stream data and an acknowledgement without gaps."""
        space, path = self._space, self._network_paths[0]
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
            or (space.ack_at is not None and space.ack_at <= now and len(space.ack_queue) > 1)
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

    def _send_plain(self, now: float) -> list[bytes]:
        """As many datagrams as the window and the pacer let go, full ones but the last. Control goes before bulk."""
        space, congestion, pacer = self._space, self._loss._cc, self._loss._pacer
        sources = [stream for stream in self._streams_queue if not stream.sender.buffer_is_empty]
        sources.sort(key=_stream_number)
        acknowledge = space.ack_at is not None and space.ack_at <= now
        datagrams: list[bytes] = []
        self._pacing_at = None
        while sources or acknowledge:
            packet, payload = _new_packet(self._packet_number, now), bytearray()
            if acknowledge:  # never held back
                self._write_ack(packet, payload, now)
                acknowledge = False
            else:
                self._pacing_at = pacer.next_send_time(now)
                if self._pacing_at is not None:
                    break
            if congestion.congestion_window - congestion.bytes_in_flight >= self._max_datagram_size:
                self._write_streams(packet, payload, sources)
            if not payload:
                break
            datagrams.append(self._seal(packet, payload))
            self._register(packet, now)
            pacer.update_after_send(now)
        return datagrams

    def _write_ack(self, packet: QuicSentPacket, payload: bytearray, now: float) -> None:
        space = self._space
        numbers = space.ack_queue[0]
        delay_us = int((now - (space.largest_received_time or now)) * 1_000_000)
        payload.append(_ACK)
        payload += encode_uint_var(numbers.stop - 1)
        payload += encode_uint_var(delay_us >> self._local_ack_delay_exponent)
        payload.append(0)  # no further ranges
        payload += encode_uint_var(numbers.stop - 1 - numbers.start)
        packet.delivery_handlers.append((self._on_ack_delivery, (space, space.largest_received_packet)))
        space.ack_at = None

    def _write_streams(self, packet: QuicSentPacket, payload: bytearray, sources: list[QuicStream]) -> None:
        """Fill the packet, and take out of ``sources`` those with nothing more that may be sent."""
        capacity = self._max_datagram_size - _HEADER_BYTES - _TAG_BYTES
        while sources:
            stream = sources[0]
            sender = stream.sender
            offset, highest = sender.next_offset, sender.highest_offset
            start = bytes((_STREAM | _LENGTH | (_OFFSET if offset else 0), _stream_number(stream)))
            if offset:
                start += encode_uint_var(offset)
            room = capacity - len(payload) - len(start) - 2
            if room <= 0:
                return
            allowed = min(highest + self._remote_max_data - self._remote_max_data_used, stream.max_stream_data_remote)
            frame = sender.get_frame(room, allowed)
            if frame is None:
                del sources[0]
                continue
            length = len(frame.data)
            payload += start
            payload += (0x4000 | length).to_bytes(2, "big")
            payload += frame.data
            packet.in_flight = packet.is_ack_eliciting = True
            packet.delivery_handlers.append((sender.on_data_delivery, (offset, offset + length, False)))
            self._remote_max_data_used += sender.highest_offset - highest
            if not len(sender._pending):
                sender.buffer_is_empty = True
                del sources[0]

    def _seal(self, packet: QuicSentPacket, payload: bytearray) -> bytes:
        number, keys = packet.packet_number, self._keys
        aead, hp = _protection(keys.send)
        first = _SHORT_HEADER | keys.key_phase << _KEY_PHASE_SHIFT | (_NUMBER_BYTES - 1)
        shown_number = number & 0xFFFF
        cid = self._peer_cid.cid
        header = bytes((first,)) + cid + shown_number.to_bytes(_NUMBER_BYTES, "big")
        sealed = aead.encrypt(bytes(payload), header, number)
        mask = hp._mask(sealed[_SEALED_SAMPLE])
        shown_number ^= mask[1] << 8 | mask[2]
        datagram = bytes((first ^ mask[0] & 0x1F,)) + cid + shown_number.to_bytes(_NUMBER_BYTES, "big") + sealed
        packet.sent_bytes = len(datagram)
        return datagram

    def _register(self, packet: QuicSentPacket, now: float) -> None:
        """The library's bookkeeping for a packet that leaves."""
        self._packet_number += 1
        self._loss.on_packet_sent(packet=packet, space=self._space)
        if packet.is_ack_eliciting and not self._ack_eliciting_sent_since_receipt:
            self._close_at = now + self._idle_timeout()
            self._ack_eliciting_sent_since_receipt = True

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
            buffer = Buffer(data=payload)
            while not buffer.eof():
                kind = buffer.pull_uint8()
                if kind == _ACK and not at:
                    acknowledged, ack_delay = pull_ack_frame(buffer)
                elif _STREAM <= kind < _STREAM_END and not kind & _FIN:
                    stream = self._streams.get(buffer.pull_uint_var())
                    offset = buffer.pull_uint_var() if kind & _OFFSET else 0
                    length = buffer.pull_uint_var() if kind & _LENGTH else len(payload) - buffer.tell()
                    if stream is None or offset + length > stream.max_stream_data_local:  # 0 for a stream of ours
                        return None
                    frames.append((stream, QuicStreamFrame(data=buffer.pull_bytes(length), offset=offset)))
                else:
                    return None
                at = buffer.tell()
        except ValueError:  # aioquic's word for any malformed frame; its buffer errors derive from it
            return None
        return _Plain(number, acknowledged, ack_delay, frames) if at else None

    def _take_plain(self, packet: _Plain, now: float) -> None:
        """What the library does with such a packet."""
        space, number = self._space, packet.number
        if number in space.received_packets:
            return
        space.expected_packet_number = max(space.expected_packet_number, number + 1)
        if packet.acknowledged is not None:
            delay_s = (packet.ack_delay << self._remote_ack_delay_exponent) / 1_000_000
            self._loss.on_ack_received(ack_rangeset=packet.acknowledged, ack_delay=delay_s, now=now, space=space)
        for stream, frame in packet.frames:
            highest = stream.receiver.highest_offset
            event = stream.receiver.handle_frame(frame)
            self._local_max_data.used += stream.receiver.highest_offset - highest
            if event is not None:
                self._events.append(event)
        self._close_at = now + self._idle_timeout()
        self._ack_eliciting_sent_since_receipt = False
        if number > space.largest_received_packet:
            space.largest_received_packet, space.largest_received_time = number, now
        space.ack_queue.add(number)
        space.received_packets.add(number)
        if len(space.ack_queue) > MAX_ACK_RANGES:
            space.ack_queue.shift()
        if packet.frames and space.ack_at is None:
            space.ack_at = now + self._ack_delay


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
