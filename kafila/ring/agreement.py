"""What the members of a session tell one another through the rendezvous, sealed (pure codec).

Sealing is :mod:`kafila.ring.sealing`'s business; here is only what is inside. The host decides, members report.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar

from kafila.ring import records
from kafila.types import Address, Capability, ModelManifest, NodeId

PROTOCOL_VERSION = 1
"""Raised when a member of another version could not follow; such members refuse each other in words."""


EDGES = "edges"
"""A member that knows this takes and passes on ``frames.Edge``."""
PARTS = "parts"
"""A member that knows this answers to ``kafila.ring.parts`` over its links."""
SCORES = "scores"
"""A member that knows this passes on what asks for ``frames.Scores``, and as the last of a ring sends them."""
LAST_ROWS = "last-rows"
"""A member that knows this, as the last of a ring, sends back only the rows that tokens may be drawn from
(:func:`kafila.types.last_rows`), and as the head expects no others."""
KNOWN = (EDGES, PARTS, SCORES, LAST_ROWS)
"""What this version knows beyond the messages that every member of :data:`PROTOCOL_VERSION` does. A member is sent
nothing that it does not name, for what it cannot read ends its session."""


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """Who a member is and where it might be reached."""

    node_id: NodeId
    name: str
    """What its owner calls it; shown to people, unique in the session."""
    fingerprint: bytes
    """SHA-256 of its certificate: what links pin."""
    addresses: tuple[Address, ...]
    machine: bytes
    """A digest of the machine's identity and boot: members with the same one may reach each other over loopback."""
    version: int = PROTOCOL_VERSION
    rendezvous_rtt_s: float | None = None
    nat_report: str = ""
    """JSON of the NAT report, for whoever predicts reachability; empty where it was not measured."""
    kinds: tuple[str, ...] = ()
    """How each of ``addresses`` came to be, by its place (``kafila.nat.candidates.CandidateKind``); an address without
    one is an interface's, as in messages of older members."""
    early_key: bytes = b""
    """X25519, 32 bytes, for what is said before a link's handshake is done (``ring/early.py``); empty: nothing is."""
    knows: tuple[str, ...] = ()
    """Of :data:`KNOWN`; of an older member: nothing."""

    def moved(self, reachable: Reachable) -> MemberInfo:
        """The same member where it is reached now."""
        return replace(
            self,
            addresses=reachable.addresses,
            kinds=reachable.kinds,
            nat_report=reachable.nat_report,
            rendezvous_rtt_s=reachable.rendezvous_rtt_s,
        )


@dataclass(frozen=True, slots=True)
class ModelOffer:
    """The model a session serves and how much of it is reserved for talk."""

    manifest: ModelManifest
    source: str
    """Where a member may find the checkpoint: a folder, an address or a name."""
    config: str
    """The checkpoint's config.json, so that a member can measure with the model's own shapes."""
    dtype: str
    context: int
    """Tokens a request may hold."""
    slots: int
    """Requests whose caches are reserved at once."""
    quantize: str = ""
    """How members quantize the checkpoint while they load it (``kafila.shard.schemes``); empty: not at all."""
    kv_dtype: str = ""
    """What keys and values are held in; empty: ``dtype``."""
    revision: str = ""
    """The hub's commit, where ``source`` is a name there."""
    fingerprint: str = ""
    """What tells this checkpoint from every other, for members that have it from elsewhere."""


class RefusalReason(Enum):
    """Why a host does not take a member."""

    FULL = "full"
    STARTED = "started"
    VERSION = "version"


@dataclass(frozen=True, slots=True)
class Hello:
    """A member introduces itself to the host."""

    kind: ClassVar[str] = "hello"
    member: MemberInfo
    guest: bool = False
    """Asks and holds no share: comes at any time, takes nobody's place, and may leave without ending anything."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The host takes a member."""

    kind: ClassVar[str] = "welcome"
    name: str
    """What the member is called in this session: the name it gave, or that with a number should it be taken."""
    offer: ModelOffer


@dataclass(frozen=True, slots=True)
class Refusal:
    """The host does not take a member."""

    kind: ClassVar[str] = "refusal"
    reason: RefusalReason
    text: str


@dataclass(frozen=True, slots=True)
class Roster:
    """The host tells everybody who is there; ``expected`` is 0 while the host has not said how many to wait for."""

    kind: ClassVar[str] = "roster"
    names: tuple[str, ...]
    expected: int


@dataclass(frozen=True, slots=True)
class Reachable:
    """Where a member is reached from now on: to the host once its network is surveyed, which is before ``Measured``;
    to host and ring neighbours whenever that changes. The fields are :class:`MemberInfo`'s."""

    kind: ClassVar[str] = "reachable"
    addresses: tuple[Address, ...]
    kinds: tuple[str, ...] = ()
    nat_report: str = ""
    rendezvous_rtt_s: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A member's device, measured with the model's shapes."""

    kind: ClassVar[str] = "measured"
    capability: Capability


@dataclass(frozen=True, slots=True)
class Assign:
    """The plan, and whom to link with: ``ring`` in order beginning at the head, a :class:`MemberInfo` each."""

    kind: ClassVar[str] = "assign"
    epoch: int
    plan: str
    """The plan's own JSON; the ring does not look inside."""
    ring: tuple[MemberInfo, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """How far a member is with fetching its share; about once a second, and nothing depends on it."""

    kind: ClassVar[str] = "fetched"
    done_bytes: int
    wanted_bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A member holds its shard and has its links."""

    kind: ClassVar[str] = "ready"
    epoch: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Everybody is ready: prompts may be asked."""

    kind: ClassVar[str] = "serve"
    epoch: int


@dataclass(frozen=True, slots=True)
class Visit:
    """The host tells the head of a guest, who links with the head and nobody else."""

    kind: ClassVar[str] = "visit"
    member: MemberInfo


@dataclass(frozen=True, slots=True)
class VisitOver:
    """The host tells the head that a guest is gone."""

    kind: ClassVar[str] = "visit-over"
    member: NodeId


@dataclass(frozen=True, slots=True)
class Trouble:
    """A member cannot go on (model missing, device out of memory): one line for people."""

    kind: ClassVar[str] = "trouble"
    text: str


@dataclass(frozen=True, slots=True)
class Over:
    """The session has ended and why."""

    kind: ClassVar[str] = "over"
    text: str
    names: tuple[str, ...] = field(default=())
    """Who left or failed, where that is why."""
    wished: bool = False
    """Whether the host's owner simply ended it: no fault."""


SessionMessage = (
    Hello
    | Welcome
    | Refusal
    | Roster
    | Reachable
    | Measured
    | Assign
    | Fetched
    | Ready
    | Serve
    | Visit
    | VisitOver
    | Trouble
    | Over
)
_FAMILY = records.kinds(
    Hello, Welcome, Refusal, Roster, Reachable, Measured, Assign, Fetched, Ready, Serve, Visit, VisitOver, Trouble, Over
)


def encode_message(message: SessionMessage) -> bytes:
    """The message's bytes, before sealing."""
    return records.encode(message)


def decode_message(data: bytes) -> SessionMessage:
    """The message in ``data``, after opening. Raises ProtocolError for anything else."""
    message: SessionMessage = records.decode(data, _FAMILY, "a session message")
    return message
