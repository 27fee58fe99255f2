"""What happened to the way to a peer. ``str()`` of an event is one line fit for a person."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kafila.types import Address, PathKind

MAX_EVENTS = 64
"""Far more than happens between two looks; the oldest is dropped."""


def show_address(address: Address | None) -> str:
    """``192.168.1.7:4242``, ``[fe80::1]:4242``, or ``the relay``."""
    if address is None:
        return "the relay"
    return f"[{address.host}]:{address.port}" if ":" in address.host else f"{address.host}:{address.port}"


def show_path(kind: PathKind, address: Address | None) -> str:
    """``direct 192.168.1.7:4242`` or ``relayed``."""
    return kind.value if address is None else f"{kind.value} {show_address(address)}"


def _show_rtt(rtt_s: float | None) -> str:
    return "round trip not yet measured" if rtt_s is None else f"{rtt_s * 1e3:.1f} ms"


@dataclass(frozen=True, slots=True)
class PathChanged:
    """Bulk data now relies on another path: its round trip and congestion are unknown to QUIC."""

    kind: PathKind
    address: Address | None
    """Where direct datagrams go; None when relayed."""
    rtt_s: float | None
    max_datagram_bytes: int
    previous_kind: PathKind
    previous_address: Address | None

    def __str__(self) -> str:
        before = show_path(self.previous_kind, self.previous_address)
        after = show_path(self.kind, self.address)
        return (
            f"path changed from {before} to {after}, {_show_rtt(self.rtt_s)}, {self.max_datagram_bytes}-byte datagrams"
        )


@dataclass(frozen=True, slots=True)
class DatagramSizeChanged:
    """The same path carries larger or smaller datagrams than was known."""

    max_datagram_bytes: int
    previous_bytes: int

    def __str__(self) -> str:
        if self.max_datagram_bytes < self.previous_bytes:
            return f"path stopped carrying {self.previous_bytes}-byte datagrams, using {self.max_datagram_bytes} bytes"
        return f"path carries {self.max_datagram_bytes}-byte datagrams"


@dataclass(frozen=True, slots=True)
class PathSilent:
    """A direct path that carried data gave no sign of life."""

    address: Address
    silence_s: float
    data_only: bool
    """Probes still get through; data does not."""

    def __str__(self) -> str:
        what = "stopped carrying data" if self.data_only else "went silent"
        return f"direct path {show_address(self.address)} {what} for {self.silence_s:.2f} s, using the relay too"


@dataclass(frozen=True, slots=True)
class PathNarrowed:
    """A direct path answers pings but no longer carries datagrams of the size in use."""

    address: Address
    size_bytes: int

    def __str__(self) -> str:
        return f"direct path {show_address(self.address)} stopped carrying {self.size_bytes}-byte datagrams"


@dataclass(frozen=True, slots=True)
class PathLost:
    """A direct path that had gone silent did not come back; it is looked for every few seconds."""

    address: Address

    def __str__(self) -> str:
        return f"direct path {show_address(self.address)} did not come back, relayed until it does"


@dataclass(frozen=True, slots=True)
class PathTooNarrow:
    """A direct path exists but does not carry the 1200 bytes that QUIC needs."""

    address: Address

    def __str__(self) -> str:
        return f"direct path {show_address(self.address)} carries only small packets, not using it"


@dataclass(frozen=True, slots=True)
class PunchFailed:
    """A round of punching found no direct path."""

    tried: int
    retry_in_s: float

    def __str__(self) -> str:
        if not self.tried:
            return "the peer has no address that can be tried directly, staying on the relay"
        addresses = "address" if self.tried == 1 else "addresses"
        return f"no direct path to any of {self.tried} {addresses}, relayed; next try in {self.retry_in_s:.0f} s"


@dataclass(frozen=True, slots=True)
class KeepaliveShortened:
    """A NAT on the way forgets sooner than expected."""

    idle_s: float
    interval_s: float

    def __str__(self) -> str:
        return (
            f"a NAT forgot the path after {self.idle_s:.0f} s without traffic, "
            f"keeping it open every {self.interval_s:.0f} s"
        )


@dataclass(frozen=True, slots=True)
class MappingMoved:
    """The peer sees us elsewhere than before: a NAT gave us another port or address under a path in use."""

    address: Address
    """The peer's."""
    observed: Address
    before: Address

    def __str__(self) -> str:
        seen, before = show_address(self.observed), show_address(self.before)
        return f"a NAT moved us: {show_address(self.address)} sees us at {seen}, before at {before}"


Event = (
    PathChanged
    | DatagramSizeChanged
    | PathSilent
    | PathNarrowed
    | PathLost
    | PathTooNarrow
    | PunchFailed
    | KeepaliveShortened
    | MappingMoved
)


class EventLog:
    """Events not yet taken, and what the last of them said of the path in use."""

    def __init__(self, max_datagram_bytes: int) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._address: Address | None = None
        self._bytes = max_datagram_bytes

    def append(self, event: Event) -> None:
        """Something happened."""
        self._events.append(event)

    def path_is(self, address: Address | None, rtt_s: float | None, max_datagram_bytes: int) -> None:
        """The path in use and its datagram size, whether or not they are new."""
        before, before_bytes = self._address, self._bytes
        self._address, self._bytes = address, max_datagram_bytes
        if address != before:
            was, now = (PathKind.RELAYED if end is None else PathKind.DIRECT for end in (before, address))
            self._events.append(PathChanged(now, address, rtt_s, max_datagram_bytes, was, before))
        elif max_datagram_bytes != before_bytes:
            self._events.append(DatagramSizeChanged(max_datagram_bytes, before_bytes))

    def next(self) -> Event | None:
        """The oldest event not yet taken."""
        return self._events.popleft() if self._events else None
