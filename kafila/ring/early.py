"""A link's first words, said before its handshake is done (pure).

Through a relay every datagram takes a whole round trip to the rendezvous, and TLS with both sides authenticated takes
three of them before the first application byte. But the two know each other already: the sealed introduction that told
each the other's certificate told it an X25519 key as well. So the first bytes of both streams also travel at once, in
datagrams of their own, sealed with a key that only these two can compute (static-static Diffie-Hellman, as in the first
message of the Noise pattern KK, with the session's link key mixed in):

    0x82 | sender 8 | opening 4 | number 4 | ChaCha20-Poly1305 of: stream 1 | offset 4 | bytes

They are an addition, never a replacement: QUIC carries the same bytes again from offset 0, so a lost one costs only
time, and what was believed early is compared with what the authenticated connection then says. A difference ends it.

Replay: a key counts the links that were opened with it, and its owner's peers take early words only of a newer opening
than any they have heard; within one, each byte is taken once. The keys differ by direction and by session epoch, and
they live as long as the process. What is weaker than in QUIC, and for these bytes alone: whoever later seizes the
*running* process of either end can read what was recorded, and whoever seizes one end's key can speak to that end as
any peer.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from itertools import count

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kafila.errors import ProtocolError
from kafila.types import NODE_ID_BYTES, NodeId
from kafila.wire import EARLY_KIND

STREAMS = 2
MAX_STREAM_DATAGRAMS = 5
"""For each of the two streams: together the initial window of RFC 9002 section 7.2, for nothing paces these."""
MAX_DATAGRAM_BYTES = 1200
"""Fits wherever QUIC's first datagram fits."""

_HEADER = struct.Struct(f"!B{NODE_ID_BYTES}sII")
_PLACE = struct.Struct("!BI")
_TAG_BYTES = 16
_OVERHEAD_BYTES = _HEADER.size + _PLACE.size + _TAG_BYTES
_ROOM_BYTES = MAX_DATAGRAM_BYTES - _OVERHEAD_BYTES
MAX_STREAM_BYTES = MAX_STREAM_DATAGRAMS * _ROOM_BYTES
"""So much of a stream's beginning can be said early."""


@dataclass(slots=True)
class EarlyKey:
    """A node's X25519 key for one session, and what must be remembered for as long as it lives: how many links it has
    opened, so that no nonce repeats, and the newest opening heard of each peer, so that no word is taken twice."""

    private: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate, repr=False)
    openings: count[int] = field(default_factory=lambda: count(1), repr=False)
    heard: dict[tuple[bytes, int], int] = field(default_factory=dict, repr=False)
    """By the peer's fingerprint and the epoch: an entry a link that spoke early."""

    @property
    def public(self) -> bytes:
        """32 bytes, for the sealed introduction."""
        return self.private.public_key().public_bytes_raw()


@dataclass(frozen=True, slots=True)
class Party:
    """One end of a link: its certificate's fingerprint (SHA-256) and its public X25519 key, 32 bytes each."""

    fingerprint: bytes
    public: bytes

    @property
    def node_id(self) -> NodeId:
        """The fingerprint's first eight bytes."""
        return NodeId(self.fingerprint[:NODE_ID_BYTES])


@dataclass(slots=True)
class _Outgoing:
    """The beginning of one of our streams."""

    waiting: bytearray = field(default_factory=bytearray)
    offset: int = 0
    datagrams: int = 0

    def take(self) -> tuple[int, bytes] | None:
        """The next datagram's offset and bytes."""
        if not self.waiting or self.datagrams == MAX_STREAM_DATAGRAMS:
            return None
        offset, data = self.offset, bytes(self.waiting[:_ROOM_BYTES])
        del self.waiting[:_ROOM_BYTES]
        self.offset += len(data)
        self.datagrams += 1
        return offset, data


@dataclass(slots=True)
class _Incoming:
    """The beginning of one of the peer's streams."""

    believed: bytearray = field(default_factory=bytearray)
    compared: int = 0
    ahead: dict[int, bytes] = field(default_factory=dict)
    """By offset, what waits for a gap before it to be filled: fewer than a stream's datagrams."""

    def take(self, offset: int, data: bytes) -> bytes:
        """What is now complete that was not before."""
        if offset < len(self.believed) or offset + len(data) > MAX_STREAM_BYTES:
            return b""
        if len(self.ahead) == MAX_STREAM_DATAGRAMS:
            return b""
        self.ahead[offset] = data
        before = len(self.believed)
        while (piece := self.ahead.pop(len(self.believed), None)) is not None:
            self.believed += piece
        return bytes(self.believed[before:])

    def confirm(self, data: bytes) -> bytes:
        """As :meth:`EarlyWords.confirm`."""
        if self.compared == len(self.believed):
            return data
        known = bytes(self.believed[self.compared : self.compared + len(data)])
        if data[: len(known)] != known:
            raise ProtocolError("the peer's first words were not its own")
        self.compared += len(known)
        return data[len(known) :]


class EarlyWords:
    """One link's."""

    def __init__(self, key: EarlyKey, me: bytes, peer: Party, link_key: bytes, epoch: int) -> None:
        """``me`` is this end's fingerprint, ``link_key`` the session's, ``epoch`` the assignment's.

        Raises ProtocolError for a peer whose key is none.
        """
        try:
            shared = key.private.exchange(X25519PublicKey.from_public_bytes(peer.public))
        except ValueError as error:  # not 32 bytes, or a point that gives everybody the same secret (RFC 7748, 6.1)
            raise ProtocolError(f"{peer.node_id.hex()} announced a key that is none") from error
        ours = Party(me, key.public)
        self._key = key
        self._heard_of = peer.fingerprint, epoch
        self._in = ChaCha20Poly1305(_derive(shared, link_key, peer, ours, epoch))
        self._out = ChaCha20Poly1305(_derive(shared, link_key, ours, peer, epoch))
        self._me, self._peer = ours.node_id, peer.node_id
        self._opening = next(key.openings)
        self._number = 0
        self._believed_opening: int | None = None
        self._outgoing = [_Outgoing() for _ in range(STREAMS)]
        self._incoming = [_Incoming() for _ in range(STREAMS)]

    def say(self, stream: int, data: bytes) -> None:
        """The next bytes of one of our streams; what is beyond :data:`MAX_STREAM_BYTES` of it waits for QUIC."""
        outgoing = self._outgoing[stream]
        outgoing.waiting += data[: MAX_STREAM_BYTES - outgoing.offset - len(outgoing.waiting)]

    def datagrams_to_send(self) -> list[bytes]:
        """What was said since the last call; a stream's :data:`MAX_STREAM_DATAGRAMS` once used up, nothing of it."""
        datagrams = []
        for stream, outgoing in enumerate(self._outgoing):
            while (piece := outgoing.take()) is not None:
                offset, data = piece
                header = _HEADER.pack(EARLY_KIND, self._me, self._opening, self._number)
                datagrams.append(header + self._out.encrypt(_nonce(header), _PLACE.pack(stream, offset) + data, header))
                self._number += 1
        return datagrams

    def receive(self, datagram: bytes) -> tuple[int, bytes] | None:
        """The next bytes of one of the peer's streams, as (stream, bytes). None for what is forged, replayed or out of
        bounds, and for what has a gap before it. Never raises."""
        place = self._open(datagram)
        if place is None or place[0] >= STREAMS:
            return None
        stream, offset, data = place
        fresh = self._incoming[stream].take(offset, data)
        return (stream, fresh) if fresh else None

    def _open(self, datagram: bytes) -> tuple[int, int, bytes] | None:
        if not _OVERHEAD_BYTES < len(datagram) <= MAX_DATAGRAM_BYTES:
            return None
        header = datagram[: _HEADER.size]
        kind, sender, opening, _ = _HEADER.unpack(header)
        if kind != EARLY_KIND or sender != self._peer:
            return None
        if opening != self._believed_opening and opening <= self._key.heard.get(self._heard_of, 0):
            return None
        try:
            plain = self._in.decrypt(_nonce(header), datagram[_HEADER.size :], header)
        except InvalidTag:
            return None
        if self._believed_opening is None:
            self._believed_opening = self._key.heard[self._heard_of] = opening
        elif opening != self._believed_opening:
            return None
        stream, offset = _PLACE.unpack_from(plain)
        return stream, offset, plain[_PLACE.size :]

    def confirm(self, stream: int, data: bytes) -> bytes:
        """What of the authenticated stream's next bytes was not said early. Raises ProtocolError where the two differ:
        then somebody else spoke early."""
        return self._incoming[stream].confirm(data)


def _derive(shared: bytes, link_key: bytes, sender: Party, recipient: Party, epoch: int) -> bytes:
    """The key of one direction: everything that both must agree on is in it, each part of fixed length."""
    parts = (sender.fingerprint, sender.public, recipient.fingerprint, recipient.public, epoch.to_bytes(8, "big"))
    info = b"kafila early words v1" + b"".join(parts)
    return HKDF(algorithm=SHA256(), length=32, salt=link_key, info=info).derive(shared)


def _nonce(header: bytes) -> bytes:
    """Opening and number: no two datagrams under one key share both."""
    return header[1 + NODE_ID_BYTES :].rjust(12, b"\0")
