"""What a link asks of the QUIC library, and the numbers behind it."""

from __future__ import annotations

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import QuicProtocolVersion
from cryptography import x509

from kafila.errors import ProtocolError
from kafila.ring.identity import Identity
from kafila.ring.quic_retry import CONNECTION_ID_BYTES

MIN_DATAGRAM_BYTES = 1200
"""What every path must carry (RFC 9000 section 14); larger once ``path_changed`` says so."""

MAX_DATAGRAM_BYTES = 16_000
"""The library writes the length of a STREAM frame in 14 bits. More than any jumbo frame."""

IDLE_TIMEOUT_S = 30.0
"""Twice the 15 s keepalive of a path (DESIGN section 5): one lost keepalive must not end a connection."""

STREAM_WINDOW_BYTES = 16 * 2**20
"""How far a peer may send ahead of the first byte missing: a gigabit over 128 ms. Reassembly can be made to hold this
much a stream, less where messages are limited to less."""

_LEAST_WINDOW_BYTES = 64 * 2**10
_MAX_REASON_BYTES = 200
"""A close reason fits one datagram of 1,200 bytes, and one line of a terminal."""


def configuration_for(
    identity: Identity, alpn: str, idle_timeout_s: float, max_message_bytes: int, *, is_client: bool
) -> QuicConfiguration:
    """One connection's. A peer may send so far ahead as two of its longest messages."""
    return QuicConfiguration(
        alpn_protocols=[alpn],
        certificate=x509.load_der_x509_certificate(identity.certificate_der),
        private_key=identity.private_key,
        connection_id_length=CONNECTION_ID_BYTES,
        idle_timeout=idle_timeout_s,
        is_client=is_client,
        max_datagram_size=MIN_DATAGRAM_BYTES,
        max_stream_data=min(STREAM_WINDOW_BYTES, 2 * max_message_bytes + _LEAST_WINDOW_BYTES),
        # One version: nothing to negotiate, and one set of initial keys to derive.
        supported_versions=[QuicProtocolVersion.VERSION_1],
        # Nobody signs these certificates; ``QuicConnection`` compares fingerprints.
        verify_mode=0,
    )


def usable_size(max_datagram_bytes: int) -> int:
    """What is made use of of a path's datagram size. Raises ProtocolError under ``MIN_DATAGRAM_BYTES``."""
    if max_datagram_bytes < MIN_DATAGRAM_BYTES:
        raise ProtocolError(f"a path of {max_datagram_bytes} bytes cannot carry QUIC: it needs {MIN_DATAGRAM_BYTES}")
    return min(max_datagram_bytes, MAX_DATAGRAM_BYTES)


def printable(text: str) -> str:
    """One line fit for a terminal, whoever wrote it, at most ``_MAX_REASON_BYTES`` in UTF-8."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown.encode(errors="replace")[:_MAX_REASON_BYTES].decode(errors="ignore")
