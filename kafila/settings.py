"""What a person asks of a node, checked; the commands turn options into these."""

from __future__ import annotations

from dataclasses import dataclass, field

from kafila.planning import Wishes
from kafila.ring.invite import HostPort, SessionCode
from kafila.types import Sampling


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Open a session."""

    model: str
    members: int | None
    """How many to wait for, the host included; None: until told to start."""
    context: int | None
    """Tokens a conversation may hold; None: what the model and good sense allow."""
    slots: int
    """Answers at once."""
    rendezvous: HostPort | None
    """None: run one inside this process."""
    wishes: Wishes = field(default_factory=Wishes)


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """Join one."""

    code: SessionCode
    rendezvous: HostPort
    model: str | None
    """Where this machine keeps the checkpoint, if not where the host does."""
    guest: bool = False
    """Ask only, and hold no share."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The local interface: where, for whom, and what a request that does not say gets."""

    host: str
    port: int
    """TCP; 0: any."""
    fixed: bool
    """Whether it has to be that port, or may be the next free one."""
    key: str | None = None
    """What every request has to bring; None, on loopback alone: nothing."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 0
    rolling: bool = False
    """Whether a conversation that is too long loses its oldest turns."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What both have."""

    role: HostSettings | JoinSettings
    name: str
    machine: bytes
    """The same for all processes that reach one another over loopback, and for no others."""
    port: int = 0
    """UDP port to bind; 0: any."""
    stun: tuple[HostPort, ...] = ()
    """Servers to ask, besides the rendezvous, what the NAT here does."""
    port_mapping: bool = True
    """Whether the router may be asked to open the port."""
    api: ApiSettings | None = None
    """None: there is no local interface."""
