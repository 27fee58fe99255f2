"""What a member and the rendezvous say to each other on their control connection (pure codec).

    version 1 | kind 1 | body

Members are not named in what they say: the rendezvous takes a member's id from the certificate of its connection, so
nobody can claim another's. Sealed blobs pass through unread. Two things stay the same in every version for ever: the
first two bytes, and :class:`Refused`, so that each side can tell the other in words that it is too old.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from ipaddress import ip_address
from typing import Any, NamedTuple

from kafila.errors import ProtocolError
from kafila.ring.invite import ALPHABET, LOCATOR_CHARS
from kafila.types import NODE_ID_BYTES, Address, NodeId

VERSION = 1
ALPN = "kafila-rendezvous"
"""Says no version: two that differ must get as far as :class:`Refused`, not fail in TLS without a reason."""

MAX_SEALED_BYTES = 64 * 1024
"""A plan with the addresses of 64 members is about 32 KiB; nothing that members say here is larger."""
MAX_MEMBERS = 64
"""More than a trusted group has machines; bounds a roster and what one session makes the rendezvous remember."""
MAX_GREETING_BYTES = 4 * 1024
"""Enough for a name and a model; it lies with the rendezvous as long as the session does."""
MAX_CONTROL_BYTES = MAX_SEALED_BYTES + 64
"""The largest message: one sealed blob and who sent it."""


class Reason(IntEnum):
    """Why the rendezvous says no."""

    VERSION = 1
    UNKNOWN_SESSION = 2
    LOCATOR_TAKEN = 3
    FULL = 4
    EVICTED = 5
    """The host put this member out."""
    BUSY = 6
    """A limit of the rendezvous itself; later may do."""
    REPLACED = 7
    """The same identity registered over a newer connection."""


class Departure(IntEnum):
    """How a member went."""

    LEFT = 1
    LOST = 2
    """Its connection fell silent or broke."""
    EVICTED = 3


@dataclass(frozen=True, slots=True)
class Create:
    """The host opens a session, or comes back to it."""

    locator: str
    seats: int
    """How many members it takes, the host included: 1 to ``MAX_MEMBERS``."""
    greeting: bytes
    """Sealed by the host, given to every joiner."""


@dataclass(frozen=True, slots=True)
class Join:
    """A member enters a session that it has not been in."""

    locator: str


@dataclass(frozen=True, slots=True)
class Restore:
    """A member comes back, and should the rendezvous have forgotten the session, tells what it was."""

    locator: str
    host: NodeId
    seats: int
    greeting: bytes


@dataclass(frozen=True, slots=True)
class Send:
    """Pass ``sealed`` to one member, or to all others when ``to`` is None."""

    to: NodeId | None
    sealed: bytes


@dataclass(frozen=True, slots=True)
class Evict:
    """The host puts a member out; it cannot come back with the same identity."""

    member: NodeId


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there, and from which address do you see me?"""


@dataclass(frozen=True, slots=True)
class Confirm:
    """The nonce of a challenge (:mod:`kafila.ring.notice`): the member does receive at its new address."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class Joined:
    """Registered, as host or as member. ``members`` are the others there now; ``observed`` is the sender's address."""

    host: NodeId
    seats: int
    greeting: bytes
    members: tuple[NodeId, ...]
    observed: Address


@dataclass(frozen=True, slots=True)
class MemberJoined:
    """Somebody else entered, or came back."""

    member: NodeId


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """Somebody else went."""

    member: NodeId
    how: Departure


@dataclass(frozen=True, slots=True)
class Signal:
    """What ``sender`` gave to pass on."""

    sender: NodeId
    sealed: bytes


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to :class:`Ping`."""

    observed: Address


@dataclass(frozen=True, slots=True)
class Refused:
    """No; nothing but this follows. The member closes the connection, so that the word arrives before the end does."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """A message of a version that this program does not speak; never sent, only understood."""

    version: int


ToServer = Create | Join | Restore | Send | Evict | Ping | Confirm
ToMember = Joined | MemberJoined | MemberLeft | Signal | Pong | Refused
Message = ToServer | ToMember

_U8 = struct.Struct(">B")
_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
NONCE_BYTES = 16


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, length: int) -> bytes:
        taken = self._data[self._at : self._at + length]
        if len(taken) != length:
            raise ProtocolError("a control message is cut short")
        self._at += length
        return taken

    def number(self, layout: struct.Struct) -> int:
        value: int = layout.unpack(self.take(layout.size))[0]
        return value

    @property
    def done(self) -> bool:
        return self._at == len(self._data)


class _Field(NamedTuple):
    """How one field of a message is written and read; both check that it means something."""

    write: Callable[[Any], bytes]
    read: Callable[[_Reader], Any]


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise ProtocolError(f"a control message has {what}")


def _write_locator(locator: str) -> bytes:
    _check(len(locator) == LOCATOR_CHARS and set(locator) <= set(ALPHABET), "a locator that is none")
    return locator.encode()


def _read_locator(reader: _Reader) -> str:
    locator = reader.take(LOCATOR_CHARS).decode("latin-1")
    _write_locator(locator)
    return locator


def _write_fixed(length: int) -> Callable[[bytes], bytes]:
    def write(value: bytes) -> bytes:
        _check(len(value) == length, f"{len(value)} bytes where {length} belong")
        return value

    return write


def _write_seats(seats: int) -> bytes:
    _check(1 <= seats <= MAX_MEMBERS, f"{seats} seats where 1 to {MAX_MEMBERS} are possible")
    return _U8.pack(seats)


def _read_seats(reader: _Reader) -> int:
    seats = reader.number(_U8)
    _write_seats(seats)
    return seats


def _blob(limit: int) -> _Field:
    def write(blob: bytes) -> bytes:
        _check(len(blob) <= limit, f"{len(blob)} sealed bytes, over the limit of {limit}")
        return _U32.pack(len(blob)) + blob

    def read(reader: _Reader) -> bytes:
        length = reader.number(_U32)
        _check(length <= limit, f"{length} sealed bytes, over the limit of {limit}")
        return reader.take(length)

    return _Field(write, read)


def _read_node(reader: _Reader) -> NodeId:
    return NodeId(reader.take(NODE_ID_BYTES))


def _write_nodes(nodes: tuple[NodeId, ...]) -> bytes:
    _check(len(nodes) <= MAX_MEMBERS, f"{len(nodes)} members where {MAX_MEMBERS} are possible")
    return _U8.pack(len(nodes)) + b"".join(map(_NODE.write, nodes))


def _read_nodes(reader: _Reader) -> tuple[NodeId, ...]:
    count = reader.number(_U8)
    _check(count <= MAX_MEMBERS, f"{count} members where {MAX_MEMBERS} are possible")
    return tuple(_read_node(reader) for _ in range(count))


def _write_addressee(to: NodeId | None) -> bytes:
    return b"\0" if to is None else b"\1" + _NODE.write(to)


def _read_addressee(reader: _Reader) -> NodeId | None:
    flag = reader.number(_U8)
    _check(flag <= 1, "an addressee that is neither one nor all")
    return _read_node(reader) if flag else None


def _write_address(address: Address) -> bytes:
    packed = ip_address(address.host).packed
    return _U8.pack(len(packed)) + packed + _U16.pack(address.port)


def _read_address(reader: _Reader) -> Address:
    length = reader.number(_U8)
    _check(length in (4, 16), "an address of no known family")
    return Address(str(ip_address(reader.take(length))), reader.number(_U16))


def _enum(kind: type[IntEnum]) -> _Field:
    known = frozenset(kind)

    def read(reader: _Reader) -> IntEnum:
        value = reader.number(_U8)
        _check(value in known, f"an unknown {kind.__name__.lower()}")
        return kind(value)

    return _Field(_U8.pack, read)


_LOCATOR = _Field(_write_locator, _read_locator)
_SEATS = _Field(_write_seats, _read_seats)
_SEALED = _blob(MAX_SEALED_BYTES)
_GREETING = _blob(MAX_GREETING_BYTES)
_NODE = _Field(_write_fixed(NODE_ID_BYTES), _read_node)
_NODES = _Field(_write_nodes, _read_nodes)
_ADDRESSEE = _Field(_write_addressee, _read_addressee)
_ADDRESS = _Field(_write_address, _read_address)
_NONCE = _Field(_write_fixed(NONCE_BYTES), lambda reader: reader.take(NONCE_BYTES))

# kind byte: the message and its fields in order. Requests below 64, answers from 64, Refused 127 in every version.
_LAYOUT: dict[int, tuple[type[Any], tuple[_Field, ...]]] = {
    1: (Create, (_LOCATOR, _SEATS, _GREETING)),
    2: (Join, (_LOCATOR,)),
    3: (Restore, (_LOCATOR, _NODE, _SEATS, _GREETING)),
    4: (Send, (_ADDRESSEE, _SEALED)),
    5: (Evict, (_NODE,)),
    6: (Ping, ()),
    7: (Confirm, (_NONCE,)),
    64: (Joined, (_NODE, _SEATS, _GREETING, _NODES, _ADDRESS)),
    65: (MemberJoined, (_NODE,)),
    66: (MemberLeft, (_NODE, _enum(Departure))),
    67: (Signal, (_NODE, _SEALED)),
    68: (Pong, (_ADDRESS,)),
    127: (Refused, (_enum(Reason),)),
}
_REFUSED = 127
_KINDS = {message: kind for kind, (message, _) in _LAYOUT.items()}


def encode(message: Message) -> bytes:
    """The bytes of ``message``. Raises ProtocolError where a field is out of bounds (a caller's mistake)."""
    kind = _KINDS[type(message)]
    values = (getattr(message, field.name) for field in fields(message))
    body = b"".join(field.write(value) for field, value in zip(_LAYOUT[kind][1], values, strict=True))
    return bytes((VERSION, kind)) + body


def decode(data: bytes) -> Message | OtherVersion:
    """The message in ``data``. Raises ProtocolError for bytes that are none."""
    reader = _Reader(data)
    version, kind = reader.take(2)
    if version != VERSION and kind != _REFUSED:
        return OtherVersion(version)
    if kind not in _LAYOUT:
        raise ProtocolError(f"a control message is of unknown kind {kind}")
    message, layout = _LAYOUT[kind]
    values = [field.read(reader) for field in layout]
    _check(reader.done, "bytes after its end")
    decoded: Message = message(*values)
    return decoded
