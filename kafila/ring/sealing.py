"""What the session code's secret protects: keys from it, and sealed messages under them.

Members speak through a rendezvous that may be hostile. Every message they send is sealed, and everything the rendezvous
could lie about (version, session, sender, addressee, sequence) is authenticated. So it can drop messages and delay
them; it cannot read, alter, redirect, replay or invent one. A sealed message:

    version 1 | purpose 1 | epoch 16 | sequence 8 | ChaCha20-Poly1305 ciphertext and tag

Each :class:`Sealer` draws a random epoch and derives a key of its own from it, so the sequence alone is nonce enough:
no two processes, nor two starts of one, can ever use a nonce twice under one key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from kafila.errors import SealBroken
from kafila.ring.invite import SessionCode
from kafila.types import NODE_ID_BYTES, NodeId

VERSION = 1
KEY_BYTES = 32

# RFC 7914: 32 MiB and about 0.1 s on a laptop core, which a person joining does not notice. All 75 bits of a secret are
# out of reach anyway; when eight of its characters were overheard, the 35 bits left are still a century of one core.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**15, 8, 1

_EPOCH_BYTES = 16
_SEQUENCE_BYTES = 8
_NONCE_BYTES = 12
_HEADER_BYTES = 2 + _EPOCH_BYTES + _SEQUENCE_BYTES
_TAG_BYTES = 16
SEAL_OVERHEAD_BYTES = _HEADER_BYTES + _TAG_BYTES

REPLAY_WINDOW = 256
"""How far behind a sender's newest message one may arrive (the scheme of RFC 6479). The control channel is reliable and
ordered, so messages pass one another only across a reconnection: 64 would do, 256 costs 32 bytes a sender."""
_MAX_EPOCHS = 4096
"""Sender epochs remembered, under 1 KiB each. Only holders of the secret can add one, and a member adds one a start.
Forgetting one would let its messages be replayed, so a session that reaches this many refuses new ones instead."""


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """What a session code opens: ``signalling`` seals what goes through the rendezvous, ``link`` seals path probes.

    Keys are :data:`KEY_BYTES` long.
    """

    locator: str
    signalling: bytes = field(repr=False)
    link: bytes = field(repr=False)


@lru_cache(maxsize=1)  # a process has one session, unless it simulates all of its members
def derive_keys(code: SessionCode) -> SessionKeys:
    """The keys of a code. Takes about 0.1 s and 32 MiB, so a driver calls it in a thread."""
    stretched = Scrypt(salt=code.locator.encode(), length=KEY_BYTES, n=_SCRYPT_N, r=_SCRYPT_R, p=_SCRYPT_P).derive(
        code.secret.encode()
    )
    return SessionKeys(code.locator, _subkey(stretched, b"signalling"), _subkey(stretched, b"link"))


def _subkey(key: bytes, purpose: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=b"kafila 1 " + purpose).derive(key)


class _Purpose(IntEnum):
    BROADCAST = 0
    DIRECTED = 1
    GREETING = 2
    """What the rendezvous keeps for every joiner: read as often as needed, so outside the replay window."""


def _cipher(keys: SessionKeys, sender: NodeId, epoch: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(_subkey(keys.signalling, b"sender " + sender + epoch))


def _associated(keys: SessionKeys, header: bytes, sender: NodeId, to: NodeId | None) -> bytes:
    # Every part has a fixed length for a given purpose, and the header carries the purpose: no two readings are alike.
    return header + keys.locator.encode() + sender + (to or b"")


class Sealer:
    """Seals what one process says in one session."""

    def __init__(self, keys: SessionKeys, sender: NodeId, randbytes: Callable[[int], bytes]) -> None:
        """``randbytes(n)`` must be fit for keys: ``os.urandom`` outside tests."""
        self._keys = keys
        self._sender = sender
        self._epoch = randbytes(_EPOCH_BYTES)
        self._cipher = _cipher(keys, sender, self._epoch)
        self._sequence = 0

    def seal(self, plaintext: bytes, to: NodeId | None) -> bytes:
        """``plaintext`` for ``to`` alone, or for every member when ``to`` is None.

        A broadcast proves nothing of its age to a member who joined after it: what must be fresh is addressed.
        """
        return self._seal(_Purpose.BROADCAST if to is None else _Purpose.DIRECTED, plaintext, to)

    def seal_greeting(self, plaintext: bytes) -> bytes:
        """What the host leaves with the rendezvous. A joiner that cannot open it has a wrong secret."""
        return self._seal(_Purpose.GREETING, plaintext, None)

    def _seal(self, purpose: _Purpose, plaintext: bytes, to: NodeId | None) -> bytes:
        header = bytes((VERSION, purpose)) + self._epoch + self._sequence.to_bytes(_SEQUENCE_BYTES, "big")
        nonce = self._sequence.to_bytes(_NONCE_BYTES, "big")
        self._sequence += 1
        return header + self._cipher.encrypt(nonce, plaintext, _associated(self._keys, header, self._sender, to))


@dataclass(slots=True)
class _Window:
    """Which of one epoch's sequences have been seen: a bitmap whose bit 0 is ``newest``."""

    cipher: ChaCha20Poly1305
    newest: int = -1
    seen: int = 0

    def is_new(self, sequence: int) -> bool:
        if sequence > self.newest:
            return True
        behind = self.newest - sequence
        return behind < REPLAY_WINDOW and not self.seen >> behind & 1

    def mark(self, sequence: int) -> None:
        if sequence > self.newest:
            ahead = min(sequence - self.newest, REPLAY_WINDOW)
            self.seen = self.seen << ahead & (1 << REPLAY_WINDOW) - 1
            self.newest = sequence
        self.seen |= 1 << (self.newest - sequence)


class Opener:
    """Opens what others sealed, for one member. What it cannot vouch for raises SealBroken; ``broken`` counts it."""

    def __init__(self, keys: SessionKeys, me: NodeId) -> None:
        self._keys = keys
        self._me = me
        self._windows: dict[tuple[NodeId, bytes], _Window] = {}
        self.broken = 0

    def open(self, sender: NodeId, sealed: bytes) -> bytes:
        """The plaintext of a message from ``sender`` to this member or to all. Raises SealBroken."""
        purpose, epoch, sequence = self._header(sender, sealed)
        if purpose is _Purpose.GREETING:
            raise self._refusal(sender, "is a greeting where a message belongs")
        if sender == self._me:
            raise self._refusal(sender, "was sent back to the one who sealed it")
        window = self._windows.get((sender, epoch))
        if window is None:
            if len(self._windows) >= _MAX_EPOCHS:
                raise self._refusal(sender, "comes after more restarts than one session may see")
            window = _Window(_cipher(self._keys, sender, epoch))
        if not window.is_new(sequence):
            raise self._refusal(sender, "was seen before")
        to = self._me if purpose is _Purpose.DIRECTED else None
        plaintext = self._decrypt(window.cipher, sender, sealed, to)
        window.mark(sequence)
        self._windows[sender, epoch] = window  # only now: a forgery must not take up room
        return plaintext

    def open_greeting(self, host: NodeId, sealed: bytes) -> bytes:
        """The plaintext of what ``host`` left for joiners; opening it again is allowed. Raises SealBroken."""
        purpose, epoch, _ = self._header(host, sealed)
        if purpose is not _Purpose.GREETING:
            raise self._refusal(host, "is a message where a greeting belongs")
        return self._decrypt(_cipher(self._keys, host, epoch), host, sealed, None)

    def _header(self, sender: NodeId, sealed: bytes) -> tuple[_Purpose, bytes, int]:
        if len(sender) != NODE_ID_BYTES or len(sealed) < SEAL_OVERHEAD_BYTES:
            raise self._refusal(sender, "is cut short")
        if sealed[0] != VERSION:
            raise self._refusal(sender, f"was sealed by another version of Kafila ({sealed[0]}, this is {VERSION})")
        if sealed[1] not in _PURPOSES:
            raise self._refusal(sender, "is of a kind this version does not know")
        epoch = sealed[2 : 2 + _EPOCH_BYTES]
        return _Purpose(sealed[1]), epoch, int.from_bytes(sealed[2 + _EPOCH_BYTES : _HEADER_BYTES], "big")

    def _decrypt(self, cipher: ChaCha20Poly1305, sender: NodeId, sealed: bytes, to: NodeId | None) -> bytes:
        header = sealed[:_HEADER_BYTES]
        nonce = header[-_SEQUENCE_BYTES:].rjust(_NONCE_BYTES, b"\0")
        try:
            return cipher.decrypt(nonce, sealed[_HEADER_BYTES:], _associated(self._keys, header, sender, to))
        except InvalidTag as error:
            raise self._refusal(sender, "was altered, redirected, or made without the session's secret") from error

    def _refusal(self, sender: NodeId, why: str) -> SealBroken:
        self.broken += 1
        return SealBroken(f"a sealed message said to come from {sender.hex()} {why}; it was dropped")


_PURPOSES = frozenset(_Purpose)
