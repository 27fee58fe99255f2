"""Sealed talk between members through a rendezvous that is not trusted."""

from __future__ import annotations

import os

from kafila.errors import ProtocolError, SealBroken
from kafila.mesh import Mesh
from kafila.ring.agreement import SessionMessage, decode_message, encode_message
from kafila.ring.sealing import Opener, Sealer, SessionKeys
from kafila.types import NodeId

GREETING = b"kafila"
"""Says nothing: that it opens is the message."""


class Room:
    """Seals what goes out and opens what comes in."""

    def __init__(self, mesh: Mesh, keys: SessionKeys, me: NodeId) -> None:
        self._mesh = mesh
        self._sealer = Sealer(keys, me, os.urandom)
        self._opener = Opener(keys, me)

    @property
    def tampered(self) -> int:
        """Messages that were altered, replayed, redirected or invented on their way."""
        return self._opener.broken

    def post(self, to: NodeId, message: SessionMessage) -> None:
        """Send to one member."""
        self._mesh.control.signal(to, self._sealer.seal(encode_message(message), to))

    def greeting(self) -> bytes:
        """What the host leaves with the rendezvous: a joiner that cannot open it has the wrong secret."""
        return self._sealer.seal_greeting(GREETING)

    def open_greeting(self, host: NodeId, sealed: bytes) -> None:
        """Whether the host has the same secret. Raises SealBroken when not."""
        self._opener.open_greeting(host, sealed)

    def open(self, sender: NodeId, sealed: bytes) -> SessionMessage | None:
        """The message ``sender`` sealed; None, and counted, for anything else."""
        try:
            return decode_message(self._opener.open(sender, sealed))
        except SealBroken:
            return None
        except ProtocolError:
            # Sealed by somebody who has the secret, so no attack: a member of another version, which the host refuses.
            return None
