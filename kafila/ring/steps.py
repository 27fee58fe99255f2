"""What the machines of :mod:`kafila.ring.session` want sent and done (pure values)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kafila.ring.agreement import Assign, MemberInfo, ModelOffer, RefusalReason, SessionMessage
from kafila.types import Capability, NodeId


class Outgoing(NamedTuple):
    """A message to seal for one member."""

    to: NodeId
    message: SessionMessage


@dataclass(frozen=True, slots=True)
class Present:
    """Somebody joined, or the roster changed; ``expected`` 0 while unknown."""

    names: tuple[str, ...]
    expected: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Host only: a member cannot take part, and why; its place is free."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class MeasureWanted:
    """Measure this device with the offer's shapes, then call ``measured`` or ``trouble``."""

    name: str
    offer: ModelOffer


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The host takes this guest; nothing is measured."""

    name: str
    offer: ModelOffer


@dataclass(frozen=True, slots=True)
class Guests:
    """Host only: who is here as a guest now."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GuestCame:
    """Head only: link with a guest, and answer it."""

    member: MemberInfo


@dataclass(frozen=True, slots=True)
class GuestLeft:
    """Head only: a guest is gone; what it asked is of no use any more."""

    member: NodeId


@dataclass(frozen=True, slots=True)
class PlanWanted:
    """Host only: divide the model among these, in the order they joined, then call ``assign`` or ``end``."""

    members: tuple[tuple[MemberInfo, Capability], ...]


@dataclass(frozen=True, slots=True)
class BuildWanted:
    """Load the shard and link with the neighbours, then call ``ready``."""

    assignment: Assign


@dataclass(frozen=True, slots=True)
class Fetching:
    """How far a member is with fetching its share: at the host of everybody, at a member of itself."""

    name: str
    done_bytes: int
    wanted_bytes: int


@dataclass(frozen=True, slots=True)
class Serving:
    """Prompts may be asked."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is over. ``names``: who left, where that is why; ``refusal``: where the host did not take us;
    ``wished``: the host's owner ended it, so nothing is wrong."""

    text: str
    names: tuple[str, ...] = ()
    refusal: RefusalReason | None = None
    wished: bool = False


@dataclass(frozen=True, slots=True)
class Moved:
    """A ring neighbour is reached elsewhere now."""

    member: MemberInfo


Event = (
    Present
    | Dropped
    | MeasureWanted
    | Welcomed
    | PlanWanted
    | BuildWanted
    | Fetching
    | Moved
    | Guests
    | GuestCame
    | GuestLeft
    | Serving
    | Ended
)
