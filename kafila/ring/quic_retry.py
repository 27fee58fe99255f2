"""Address validation before allocation: a stateless QUIC Retry (RFC 9000 section 8.1.2, pure).

A server that is open to the world keeps nothing for a source address until that address has shown that it receives
what is sent to it. The token that shows it is an HMAC over the address, so the gate's memory is one secret.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # its home; re-exported without saying so
from aioquic.quic.packet import (
    QuicHeader,
    QuicPacketType,
    QuicProtocolVersion,
    encode_quic_retry,
    pull_quic_header,
)

from kafila.types import Address

MIN_INITIAL_BYTES = 1200
"""RFC 9000 section 14.1; it is also what makes every Retry smaller than what it answers."""

TOKEN_LIFETIME_S = 30.0
"""A client echoes a Retry token at once (RFC 9000 section 8.1.3); this covers its retransmissions."""

CONNECTION_ID_BYTES = 8
_MAC_BYTES = 16
_ISSUED = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Accept:
    """The source is validated: hand this to :meth:`QuicConnection.server` with the same datagram."""

    original_destination_cid: bytes
    retry_source_cid: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this, always shorter than what it answers, and keep nothing."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Not the beginning of a connection, or a token that does not hold."""


class RetryGate:
    """Sorts datagrams from sources a server does not know yet. ``secret``: 16 random bytes or more, one a process."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def check(self, datagram: bytes, source: Address, now: float) -> Accept | Reply | Drop:
        """What to do with ``datagram``. Never raises, whatever the bytes."""
        header = _initial_header(datagram)
        if header is None:
            return Drop()
        if not header.token:
            return Reply(self._retry(header, source, now))
        return self._verify(header, source, now)

    def _retry(self, header: QuicHeader, source: Address, now: float) -> bytes:
        issued = _ISSUED.pack(int(now * 1000))
        original = header.destination_cid
        return encode_quic_retry(
            version=QuicProtocolVersion.VERSION_1,
            source_cid=self._mac(b"cid", issued, original, source)[:CONNECTION_ID_BYTES],
            destination_cid=header.source_cid,
            original_destination_cid=original,
            retry_token=issued + self._mac(b"token", issued, original, source) + original,
        )

    def _verify(self, header: QuicHeader, source: Address, now: float) -> Accept | Drop:
        token = header.token
        issued, mac, original = (
            token[: _ISSUED.size],
            token[_ISSUED.size : _ISSUED.size + _MAC_BYTES],
            token[_ISSUED.size + _MAC_BYTES :],
        )
        if not hmac.compare_digest(mac, self._mac(b"token", issued, original, source)):
            return Drop()
        if now - _ISSUED.unpack(issued)[0] / 1000 > TOKEN_LIFETIME_S:
            return Drop()
        # The client must now address the connection id that the Retry came from (RFC 9000 section 17.2.5.2).
        retry_source = self._mac(b"cid", issued, original, source)[:CONNECTION_ID_BYTES]
        return Accept(original, retry_source) if header.destination_cid == retry_source else Drop()

    def _mac(self, purpose: bytes, issued: bytes, original: bytes, source: Address) -> bytes:
        text = b"|".join((purpose, issued, original.hex().encode(), source.host.encode(), b"%d" % source.port))
        return hmac.digest(self._secret, text, "sha256")[:_MAC_BYTES]


def packet_header(datagram: bytes) -> QuicHeader | None:
    """The first packet's header, or ``None`` where the bytes have none."""
    try:
        return pull_quic_header(Buffer(data=datagram), host_cid_length=CONNECTION_ID_BYTES)
    except ValueError:  # aioquic's word for any malformed header; its buffer errors derive from it
        return None


def _initial_header(datagram: bytes) -> QuicHeader | None:
    """The header of a datagram that may begin a connection, or ``None``."""
    header = packet_header(datagram) if len(datagram) >= MIN_INITIAL_BYTES else None
    if header is None or header.packet_type is not QuicPacketType.INITIAL:
        return None
    return header if header.version == QuicProtocolVersion.VERSION_1 else None
