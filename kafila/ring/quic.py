"""One authenticated QUIC connection to one peer (sans-IO): the adapter over the QUIC library.

aioquic never sees an address: the peer is one opaque constant, so its own migration and path validation stay asleep,
and what a path is stays below (``nat/paths.py``). When the path changes, :meth:`QuicConnection.path_changed` says so.

    state      receives                      becomes
    waiting    first Initial (server only)   handshake
    handshake  TLS done, peer is who we want established      event Established
    handshake  TLS done, peer is another     closed           event Closed; the peer is told why
    any        peer closes, timeout, error   closed           event Closed
    any        close()                       closed           event Closed

Messages given to :meth:`QuicConnection.send` before ``established`` wait here: a server could otherwise speak to a
client that has not yet shown its certificate. Nothing of the peer's is delivered before ``established``, but for what
both ends, where they have each other's keys, say early (``ring/early.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, QuicPacketType

from kafila.errors import ProtocolError
from kafila.ring.early import EarlyWords
from kafila.ring.identity import Identity, fingerprint_of
from kafila.ring.messages import MAX_MESSAGE_BYTES, MessageReader, frame_message
from kafila.ring.quic_core import PEER
from kafila.ring.quic_events import Closed, Established, Event, Message, Stream
from kafila.ring.quic_fast import FastConnection
from kafila.ring.quic_retry import Accept, packet_header
from kafila.ring.quic_setup import (
    IDLE_TIMEOUT_S,
    MAX_DATAGRAM_BYTES,
    MIN_DATAGRAM_BYTES,
    STREAM_WINDOW_BYTES,
    configuration_for,
    printable,
    usable_size,
)

__all__ = [
    "IDLE_TIMEOUT_S",
    "MAX_DATAGRAM_BYTES",
    "MIN_DATAGRAM_BYTES",
    "STREAM_WINDOW_BYTES",
    "Closed",
    "Established",
    "Event",
    "Message",
    "QuicConnection",
    "Stream",
]

MAX_BUFFERED_BYTES = 256 * 2**20
"""Four of the largest messages. Callers watch ``buffered_bytes`` and stay far below; a peer that lets it come to this
has stopped reading, and the connection closes."""

# TLS alerts (RFC 8446 section 6).
_BAD_CERTIFICATE = QuicErrorCode.CRYPTO_ERROR + 42
_USER_CANCELED = QuicErrorCode.CRYPTO_ERROR + 90


class QuicConnection:
    """One connection. Make it with :meth:`client` or :meth:`server`."""

    def __init__(
        self,
        configuration: QuicConfiguration,
        expected_fingerprint: bytes | None,
        now: float,
        accepted: Accept | None,
        max_message_bytes: int,
        early: EarlyWords | None = None,
    ) -> None:
        self._early = early
        self._configuration = configuration
        self._expected = expected_fingerprint
        self._core: FastConnection | None = None
        self._waiting_until = now + configuration.idle_timeout
        self._established = False
        self._closed = False
        self._events: deque[Event] = deque()  # bounded by its owner, who drains it after every input
        self._held: list[tuple[Stream, bytes]] = []
        self._held_bytes = 0
        first = 2 if configuration.is_client else 3  # unidirectional stream ids (RFC 9000 section 2.1)
        self._outgoing = {stream: first + 4 * stream for stream in Stream}
        self._incoming = {(first ^ 1) + 4 * stream: (stream, MessageReader(max_message_bytes)) for stream in Stream}
        self._accepted = accepted
        self._still = False
        """Nothing came since a flush that left nothing to say: until the timer, another would say nothing."""
        self._timer: float | None = None
        self._timer_holds = False
        if configuration.is_client:
            self._core = FastConnection(configuration, self._deliver)
            self._core.connect(PEER, now)

    @classmethod
    def client(
        cls,
        identity: Identity,
        expected_fingerprint: bytes | None,
        now: float,
        *,
        alpn: str,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        early: EarlyWords | None = None,
    ) -> QuicConnection:
        """The side that speaks first. ``expected_fingerprint`` ``None``: any server will do.

        A peer that announces a message over ``max_message_bytes`` is cut off. ``early`` says the first words of what is
        sent before the connection is established.
        """
        configuration = configuration_for(identity, alpn, idle_timeout_s, max_message_bytes, is_client=True)
        return cls(configuration, expected_fingerprint, now, None, max_message_bytes, early)

    @classmethod
    def server(
        cls,
        identity: Identity,
        expected_fingerprint: bytes | None,
        now: float,
        *,
        alpn: str,
        accepted: Accept | None = None,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        early: EarlyWords | None = None,
    ) -> QuicConnection:
        """The side that waits. ``expected_fingerprint`` ``None``: any client that shows a certificate and has its key.

        ``accepted`` is what a :class:`RetryGate` said of the first datagram; without it no Retry was sent.
        """
        configuration = configuration_for(identity, alpn, idle_timeout_s, max_message_bytes, is_client=False)
        return cls(configuration, expected_fingerprint, now, accepted, max_message_bytes, early)

    @property
    def established(self) -> bool:
        """Whether the peer is authenticated and the connection still open."""
        return self._established and not self._closed

    @property
    def closed(self) -> bool:
        """Whether the connection is over."""
        return self._closed

    @property
    def buffered_bytes(self) -> int:
        """What was given to :meth:`send` and is not yet acknowledged: the number to hold back by."""
        return self._held_bytes + (self._core.unacknowledged_bytes if self._core else 0)

    @property
    def awaits_answer(self) -> bool:
        """Whether anything is out that the peer must acknowledge: mere acknowledgements are answered by nobody."""
        return self._core is not None and self._core.awaits_answer

    @property
    def rtt_s(self) -> float | None:
        """The smoothed round-trip time of the present path, seconds; ``None`` before the first sample."""
        return self._core.smoothed_rtt_s if self._core else None

    @property
    def minimum_rtt_s(self) -> float | None:
        """The shortest round trip of the present path, seconds: what the way costs without either end's business."""
        return self._core.minimum_rtt_s if self._core else None

    @property
    def connection_ids(self) -> tuple[bytes, ...]:
        """What the peer may address this end by: how a server with one socket tells its connections apart."""
        return self._core.local_connection_ids if self._core else ()

    @property
    def newest_packet(self) -> int:
        """The highest number of a packet that the peer's session key has protected; -1 before the first. It rises only
        on what is authentic and newer than all before: the proof that an address change asks for (RFC 9000, 9.3)."""
        return self._core.newest_packet if self._core else -1

    def receive(self, datagrams: Sequence[bytes], now: float) -> None:
        """Take what the socket had. Never raises, whatever the bytes."""
        self._stir()
        for datagram in datagrams:
            if self._closed:
                return
            if self._core is not None:
                self._core.take(datagram, now)
            else:
                self._begin(datagram, now)
            if self._core is not None and self._core.has_news:
                self._collect(self._core)

    def receive_early(self, datagram: bytes) -> None:
        """Take a datagram of early words. Never raises; once the handshake is done it is of no use."""
        self._stir()
        if self._early is None or self._established or self._closed:
            return
        if (words := self._early.receive(datagram)) is not None:
            number, data = words
            self._read(*next(incoming for incoming in self._incoming.values() if incoming[0] == number), data)

    def handle_timer(self, now: float) -> None:
        """Call at or after :meth:`next_timer`."""
        self._stir()
        if self._closed:
            return
        if self._core is not None:
            self._core.handle_timer(now)
            self._collect(self._core)
        elif now >= self._waiting_until:
            self._finish("nobody called", by_peer=False)

    def next_timer(self) -> float | None:
        """When :meth:`handle_timer` wants to be called; ``None`` once closed."""
        if not self._timer_holds:
            self._timer_holds = True
            if self._closed:
                self._timer = None
            else:
                self._timer = self._core.get_timer() if self._core else self._waiting_until
        return self._timer

    def datagrams_to_send(self, now: float) -> list[bytes]:
        """What should leave now. Call after every other method; it costs nothing where nothing has changed."""
        if self._still:
            due = self._timer if self._timer_holds else self.next_timer()
            if due is None or now < due:
                return []
        datagrams = [] if self._core is None else self._core.flush(now)
        if self._early is not None and not self._established:
            # After the handshake's own: a peer that does not know us yet keeps only so many.
            datagrams += self._early.datagrams_to_send()
        self._still = not datagrams or (self._core is not None and self._core.has_said_all)
        self._timer_holds = False
        return datagrams

    def next_event(self) -> Event | None:
        """The next thing that happened, or ``None``."""
        return self._events.popleft() if self._events else None

    def send(self, stream: Stream, message: bytes) -> None:
        """Queue one message; ignored once closed. Raises ProtocolError over ``MAX_MESSAGE_BYTES``."""
        self._stir()
        framed = frame_message(message)
        if self._closed:
            return
        if self.buffered_bytes + len(framed) > MAX_BUFFERED_BYTES:
            self._close_core("the peer stopped reading")
        elif self._established and self._core is not None:
            self._core.send_data(self._outgoing[stream], framed)
        else:
            self._held.append((stream, framed))
            self._held_bytes += len(framed)
            if self._early is not None:
                self._early.say(stream, framed)

    def ping(self) -> None:
        """Ask for an acknowledgement: keeps an idle connection open, and makes a dead one notice."""
        self._stir()
        if self.established and self._core is not None:
            self._core.send_ping(0)

    def path_changed(self, now: float, max_datagram_bytes: int) -> None:
        """Datagrams travel another way from now on: forget the old way's round trip, window and datagram size.

        ``max_datagram_bytes`` is the QUIC payload that the path carries, at least 1,200 (ProtocolError otherwise).
        """
        self._stir()
        self._configuration.max_datagram_size = usable_size(max_datagram_bytes)
        if self._core is not None:
            self._core.reset_path(now, self._configuration.max_datagram_size)

    def path_silent(self, now: float) -> None:
        """The present path carries nothing any more: what was sent and is unanswered is sent again at once."""
        self._stir()
        if self._core is not None:
            self._core.resend(now)

    def datagram_size_changed(self, max_datagram_bytes: int) -> None:
        """The path is the same, but carries larger or smaller datagrams than was known: nothing is forgotten.

        ``max_datagram_bytes`` as for :meth:`path_changed`.
        """
        self._stir()
        self._configuration.max_datagram_size = usable_size(max_datagram_bytes)
        if self._core is not None:
            self._core.resize(self._configuration.max_datagram_size)

    def retry_now(self) -> None:
        """The way to the peer was gone and is back: try what is unacknowledged at once, not when a timeout that has
        doubled again and again is over."""
        self._stir()
        if self._core is not None:
            self._core.retry_now()

    def close(self, now: float, reason: str) -> None:  # noqa: ARG002  - every input of a machine carries the time
        """End the connection; the peer hears ``reason`` (cut to 200 bytes) with the next datagram."""
        self._stir()
        if not self._closed:
            self._close_core(reason)

    def _stir(self) -> None:
        """Something comes in: there may be something to say, and another time to say it at."""
        self._still = self._timer_holds = False

    def _begin(self, datagram: bytes, now: float) -> None:
        """A server's first datagram: only a valid Initial makes a connection, so no stray one spoils it."""
        header = packet_header(datagram)
        if header is not None and header.packet_type is QuicPacketType.INITIAL:
            core = FastConnection(
                self._configuration, self._deliver, self._accepted or Accept(header.destination_cid, b"")
            )
            core.take(datagram, now)
            self._core = None if core.untouched else core

    def _collect(self, core: FastConnection) -> None:
        """Turn the library's events into ours."""
        while not self._closed and (event := core.next_event()) is not None:
            if isinstance(event, events.StreamDataReceived):
                self._deliver(event.stream_id, event.data, ended=event.end_stream)
            elif isinstance(event, events.HandshakeCompleted):
                self._authenticate(core)
            elif isinstance(event, events.StreamReset | events.StopSendingReceived):
                self._close_core("the peer broke a stream")
        ended = core.close_event
        if ended is not None and not self._closed:
            self._finish(printable(ended.reason_phrase) or f"error {ended.error_code:#x}", by_peer=core.closed_by_peer)

    def _authenticate(self, core: FastConnection) -> None:
        certificate_der = core.peer_certificate_der
        fingerprint = fingerprint_of(certificate_der) if certificate_der else b""
        if not fingerprint:
            self._close_core("no certificate was shown", _BAD_CERTIFICATE)
        elif self._expected is not None and fingerprint != self._expected:
            self._close_core("the certificate is not the invited one's", _BAD_CERTIFICATE)
        else:
            self._established = True
            self._events.append(Established(fingerprint))
            for stream_id in self._outgoing.values():
                # The library takes a lower stream opened after a higher one for finished: open both, in order.
                core.send_stream_data(stream_id, b"")
            for stream, framed in self._held:
                core.send_stream_data(self._outgoing[stream], framed)
            self._held.clear()
            self._held_bytes = 0

    def _deliver(self, stream_id: int, data: bytes, *, ended: bool = False) -> None:
        """The next bytes of one of the peer's streams."""
        if not self.established:
            return
        incoming = self._incoming.get(stream_id)
        if incoming is None or ended:
            self._close_core("the peer opened or ended a stream it may not")
            return
        stream, reader = incoming
        try:
            unsaid = data if self._early is None else self._early.confirm(stream, data)
        except ProtocolError as error:
            self._close_core(str(error))
        else:
            self._read(stream, reader, unsaid)

    def _read(self, stream: Stream, reader: MessageReader, data: bytes) -> None:
        try:
            for message in reader.feed(data):
                self._events.append(Message(stream, message))
        except ProtocolError as error:
            self._close_core(str(error))

    def _close_core(self, reason: str, tls_error: int | None = None) -> None:
        reason = printable(reason)
        if self._core is not None:
            # A TLS alert keeps its words through the handshake; an application's close would lose them there (RFC
            # 9000 section 10.2.3), and the peer could tell its owner nothing but a number.
            if tls_error is None and not self._core.is_confirmed:
                tls_error = _USER_CANCELED
            frame_type = None if tls_error is None else QuicFrameType.CRYPTO
            self._core.close(tls_error or QuicErrorCode.NO_ERROR, frame_type, reason)
        self._finish(reason, by_peer=False)

    def _finish(self, reason: str, *, by_peer: bool) -> None:
        self._closed = True
        self._held.clear()
        self._held_bytes = 0
        self._events.append(Closed(reason, by_peer))
