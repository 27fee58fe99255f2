"""The answering side of STUN: Binding responses, and RFC 5780's replies from another address, without a reflector.

Two rules make it safe to leave open to the world (both stricter than the RFCs):

* a reply is never larger than its request: optional attributes are left out to fit, and a request too small even for
  the bare answer gets none;
* CHANGE-REQUEST, which makes a server send from an address that was not asked, is honoured only for a request that
  carries the cookie handed to that very source address a short while ago. The cookie travels as NONCE: every plain
  response brings one, and a request without a fresh one gets 438 (Stale Nonce) and one. Nothing is stored.

There are up to four sockets: two hosts times two ports. A server that does not know its own public host (bound to a
wildcard, or behind a one-to-one NAT) advertises the unspecified host, which our client reads as "the host you asked".
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kafila.nat.stun import (
    STALE_NONCE,
    UNKNOWN_ATTRIBUTE,
    Attribute,
    Change,
    ErrorCode,
    MessageClass,
    StunMessage,
    decode,
    encode,
)
from kafila.types import Address

_COOKIE_LIFETIME_S = 60
"""A cookie is good for this long at least and twice as long at most. A classification takes about a second."""
_COOKIE_BYTES = 12  # 96 bits: not to be guessed by sending; 16 characters of base64


@dataclass(frozen=True, slots=True)
class Local:
    """Which of the four sockets: ``host`` and ``port`` are 0 (primary) or 1 (alternate)."""

    host: int
    port: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One datagram for the source of the request, from socket ``local``."""

    data: bytes
    local: Local


@dataclass(frozen=True, slots=True)
class StunServer:
    """The responder of one address family.

    ``hosts`` are the one or two public hosts as clients reach them (``0.0.0.0`` or ``::`` for one not known), ``ports``
    the one or two ports, each open on every host. ``key`` is secret, at least 16 random bytes.
    """

    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    key: bytes

    def respond(self, data: bytes, source: Address, local: Local, now: float) -> Reply | None:
        """What to answer to ``data`` that came from ``source`` to socket ``local``; ``None``: nothing.

        ``now`` is in seconds on a clock that goes forward, the same for every call.
        """
        request = decode(data)
        if request is None or request.kind is not MessageClass.REQUEST:
            return None
        reply_from = self._changed(local, request.change)
        if request.not_understood or reply_from is None:
            refused = request.not_understood or (int(Attribute.CHANGE_REQUEST),)
            return _fit(_error(request, UNKNOWN_ATTRIBUTE, unknown_attributes=refused), local, len(data))
        cookie = self.cookie(source, now)
        if reply_from != local and not self._is_fresh(request.nonce, source, now):
            return _fit(_error(request, STALE_NONCE, nonce=cookie), local, len(data))
        opposite = self._opposite(local)
        reply = StunMessage(
            MessageClass.SUCCESS,
            request.transaction_id,
            xor_mapped_address=source,
            response_origin=self._address(reply_from),
            other_address=self._address(opposite) if opposite != local else None,
            nonce=cookie,
        )
        return _fit(reply, reply_from, len(data))

    def cookie(self, source: Address, now: float) -> bytes:
        """The NONCE that lets ``source``, and nobody else, ask for a reply from another socket."""
        return self._cookie_of(source, int(now // _COOKIE_LIFETIME_S))

    def _is_fresh(self, nonce: bytes, source: Address, now: float) -> bool:
        current = int(now // _COOKIE_LIFETIME_S)
        return any(hmac.compare_digest(nonce, self._cookie_of(source, period)) for period in (current, current - 1))

    def _cookie_of(self, source: Address, period: int) -> bytes:
        text = f"kafila-stun {period} {source.port} {source.host}".encode()
        return urlsafe_b64encode(hmac.digest(self.key, text, hashlib.sha256)[:_COOKIE_BYTES])

    def _changed(self, local: Local, change: Change | None) -> Local | None:
        """The socket CHANGE-REQUEST names; ``None`` where there is no such socket."""
        if change is None:
            return local
        host = 1 - local.host if change.address else local.host
        port = 1 - local.port if change.port else local.port
        return Local(host, port) if host < len(self.hosts) and port < len(self.ports) else None

    def _opposite(self, local: Local) -> Local:
        """The socket that differs the most from ``local``: what OTHER-ADDRESS names (RFC 5780 section 7.4)."""
        host = 1 - local.host if len(self.hosts) > 1 else local.host
        port = 1 - local.port if len(self.ports) > 1 else local.port
        return Local(host, port)

    def _address(self, local: Local) -> Address:
        return Address(self.hosts[local.host], self.ports[local.port])


def _error(
    request: StunMessage, error: ErrorCode, *, nonce: bytes = b"", unknown_attributes: tuple[int, ...] = ()
) -> StunMessage:
    return StunMessage(
        MessageClass.ERROR,
        request.transaction_id,
        error=error,
        nonce=nonce,
        unknown_attributes=unknown_attributes,
    )


def _fit(reply: StunMessage, local: Local, limit_bytes: int) -> Reply | None:
    """``reply`` with as many attributes as fit ``limit_bytes``; ``None`` where not even the core fits."""
    for smaller in _ever_smaller(reply):
        data = encode(smaller)
        if len(data) <= limit_bytes:
            return Reply(data, local)
    return None


def _ever_smaller(reply: StunMessage) -> Iterator[StunMessage]:
    """``reply``, then without RESPONSE-ORIGIN, then without OTHER-ADDRESS and without words, then without NONCE.

    An error is of use without its phrase and list, 438 not without its NONCE (then a client would ask for ever).
    """
    yield reply
    reply = replace(reply, response_origin=None)
    yield reply
    wordless = replace(reply.error, reason="") if reply.error else None
    reply = replace(reply, other_address=None, unknown_attributes=reply.unknown_attributes[:1], error=wordless)
    yield reply
    if reply.error is None:
        yield replace(reply, nonce=b"")
