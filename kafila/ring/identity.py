"""Who a node is for one session: an Ed25519 key, a self-signed certificate for it, their fingerprint, and an X25519 key
for what it says before a handshake is done (``ring/early.py``).

Nobody vouches for the certificate and nobody reads its names or dates: peers compare its SHA-256 with the one the
sealed invitation channel gave them, and TLS proves that its owner holds the key (RFC 8446 section 4.4.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from kafila.ring.early import EarlyKey
from kafila.types import NODE_ID_BYTES, NodeId

FINGERPRINT_BYTES = 32

# Members' clocks need not agree, so the certificate never begins and never ends: the epoch, and the date that RFC 5280
# section 4.1.2.5 reserves for "no well-defined expiration".
_NOT_BEFORE = datetime(1970, 1, 1, tzinfo=UTC)
_NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Identity:
    """One node in one session. The private keys never leave the process and are never printed."""

    certificate_der: bytes
    private_key: Ed25519PrivateKey = field(repr=False)
    early: EarlyKey = field(default_factory=EarlyKey, repr=False, compare=False)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate, 32 bytes: what a peer pins."""
        return fingerprint_of(self.certificate_der)

    @property
    def node_id(self) -> NodeId:
        """The fingerprint's first eight bytes."""
        return node_id_of(self.fingerprint)


def make_identity() -> Identity:
    """A fresh identity. The key comes from the operating system's randomness."""
    key = Ed25519PrivateKey.generate()
    nobody = x509.Name([])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(nobody)
        .issuer_name(nobody)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .sign(key, algorithm=None)
    )
    return Identity(certificate.public_bytes(Encoding.DER), key)


def fingerprint_of(certificate_der: bytes) -> bytes:
    """SHA-256 of a certificate's DER encoding, 32 bytes."""
    return sha256(certificate_der).digest()


def node_id_of(fingerprint: bytes) -> NodeId:
    """The node id that a certificate fingerprint abbreviates."""
    return NodeId(fingerprint[:NODE_ID_BYTES])
