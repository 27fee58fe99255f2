from __future__ import annotations

from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from kafila.ring.identity import FINGERPRINT_BYTES, fingerprint_of, make_identity, node_id_of
from kafila.types import NODE_ID_BYTES


def test_a_fingerprint_is_the_certificates_hash_and_the_node_id_its_beginning() -> None:
    identity = make_identity()
    assert identity.fingerprint == sha256(identity.certificate_der).digest() == fingerprint_of(identity.certificate_der)
    assert len(identity.fingerprint) == FINGERPRINT_BYTES
    assert identity.node_id == identity.fingerprint[:NODE_ID_BYTES] == node_id_of(identity.fingerprint)


def test_the_certificate_is_signed_by_its_own_key_and_never_expires() -> None:
    identity = make_identity()
    certificate = x509.load_der_x509_certificate(identity.certificate_der)
    key = certificate.public_key()
    assert isinstance(key, Ed25519PublicKey)
    key.verify(certificate.signature, certificate.tbs_certificate_bytes)
    assert key == identity.private_key.public_key()
    assert certificate.not_valid_before_utc.year == 1970
    assert certificate.not_valid_after_utc.year == 9999


def test_no_two_identities_are_alike() -> None:
    assert len({make_identity().node_id for _ in range(20)}) == 20


def test_the_private_key_is_not_printed() -> None:
    assert "private_key" not in repr(make_identity())
