"""Every touch of the QUIC library's insides, in one place.

``tests/ring/test_quic_core.py`` fails loudly where a new aioquic has moved them.
"""

from __future__ import annotations

from aioquic.quic import events
from aioquic.quic.connection import QuicConnection as AioquicConnection
from aioquic.quic.connection import QuicConnectionState
from aioquic.tls import Epoch
from cryptography.hazmat.primitives.serialization import Encoding

PEER = ("peer", 0)
"""The one address aioquic ever sees. Not an IP literal, so a server's preferred address is never tried either."""


class CoreConnection(AioquicConnection):
    """aioquic's connection, asking for the client's certificate."""

    def _initialize(self, peer_cid: bytes) -> None:
        super()._initialize(peer_cid)
        self.tls._request_client_certificate = True

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
    def local_connection_ids(self) -> tuple[bytes, ...]:
        """Every connection id that was given to the peer and is still in force."""
        return tuple(each.cid for each in self._host_cids)

    @property
    def newest_packet(self) -> int:
        """The highest 1-RTT packet number received and authenticated, -1 before the first."""
        space = self._spaces.get(Epoch.ONE_RTT)
        return space.largest_received_packet if space else -1

    @property
    def unacknowledged_bytes(self) -> int:
        """Stream bytes handed over and not yet acknowledged."""
        return sum(len(stream.sender._buffer) for stream in self._streams.values())

    def reset_path(self, now: float, max_datagram_bytes: int) -> None:  # noqa: ARG002  - about to be used
        """Forget what was learnt of the old path."""
        self._max_datagram_size = max_datagram_bytes
