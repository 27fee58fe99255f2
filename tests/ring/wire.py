"""Two ends of one connection and the wire between them, without sockets or clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from aioquic.quic.configuration import QuicConfiguration

from kafila.ring.identity import Identity, make_identity
from kafila.ring.quic import Closed, Established, Event, Message, QuicConnection
from kafila.ring.quic_core import CoreConnection
from kafila.ring.quic_fast import FastConnection
from kafila.ring.quic_retry import Accept

ALPN = "kafila-test"
START_S = 1000.0

CLIENT, SERVER = 0, 1
IDENTITIES: tuple[Identity, Identity] = (make_identity(), make_identity())


class GeneralConnection(CoreConnection):
    """Every packet the library's own way: what our packets are held against, and a peer that can misbehave."""

    def __init__(
        self, configuration: QuicConfiguration, deliver: Callable[[int, bytes], None], accepted: Accept | None = None
    ) -> None:
        super().__init__(configuration, accepted)


Kind = type[FastConnection] | type[GeneralConnection]


@contextmanager
def cores(client: Kind, server: Kind) -> Iterator[None]:
    """Connections that begin in here are of these kinds."""

    def make(
        configuration: QuicConfiguration, deliver: Callable[[int, bytes], None], accepted: Accept | None = None
    ) -> CoreConnection:
        return (client if configuration.is_client else server)(configuration, deliver, accepted)

    with patch("kafila.ring.quic.FastConnection", make):
        yield


@dataclass
class Wire:
    """``ends[0]`` is the client. ``flying[n]`` are datagrams on their way to end ``n``, oldest first."""

    ends: tuple[QuicConnection, QuicConnection]
    now: float = START_S
    flying: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))
    events: tuple[list[Event], list[Event]] = field(default_factory=lambda: ([], []))

    def flush(self) -> None:
        """Let both ends speak, and note what happened to them."""
        for number, end in enumerate(self.ends):
            while (event := end.next_event()) is not None:
                self.events[number].append(event)
            self.flying[1 - number].extend(end.datagrams_to_send(self.now))

    def deliver(self, to: int, datagrams: list[bytes]) -> None:
        """Hand ``datagrams`` to an end, as one batch from its socket."""
        self.ends[to].receive(datagrams, self.now)
        self.flush()

    def carry(self) -> bool:
        """Deliver all that flies; whether anything did."""
        moved = False
        for number in (CLIENT, SERVER):
            batch, self.flying[number][:] = list(self.flying[number]), []
            if batch:
                moved = True
                self.deliver(number, batch)
        return moved

    def wait(self, seconds: float) -> None:
        """Let time pass, ringing every alarm in it, with nothing delivered."""
        until, rung = self.now + seconds, 0
        while True:
            self.flush()
            due = [when for end in self.ends if (when := end.next_timer()) is not None]
            if not due or min(due) > until:
                break
            rung = rung + 1 if min(due) <= self.now else 0
            assert rung < 10, "an alarm that rings for ever"
            self.now = max(self.now, min(due))
            for end in self.ends:
                if (when := end.next_timer()) is not None and when <= self.now:
                    end.handle_timer(self.now)
        self.now = max(self.now, until)

    def settle(self, seconds: float = 20.0, rtt_s: float = 0.01) -> None:
        """A wire without faults for a while: whatever can arrive, does."""
        until = self.now + seconds
        self.flush()
        while self.now < until:
            self.wait(rtt_s)
            if not self.carry() and not any(end.buffered_bytes for end in self.ends):
                break

    def messages(self, at: int) -> list[Message]:
        """What arrived at an end."""
        return [event for event in self.events[at] if isinstance(event, Message)]

    def closed(self, at: int) -> Closed | None:
        """How an end saw the connection close."""
        found = [event for event in self.events[at] if isinstance(event, Closed)]
        assert len(found) <= 1
        assert not found or self.events[at][-1] is found[0], "an event after Closed"
        return found[0] if found else None

    def established(self, at: int) -> bool:
        """Whether an end ever authenticated the other."""
        return any(isinstance(event, Established) for event in self.events[at])


def fresh_wire(
    client: Identity = IDENTITIES[0],
    server: Identity = IDENTITIES[1],
    *,
    client_expects: bytes | None = IDENTITIES[1].fingerprint,
    server_expects: bytes | None = IDENTITIES[0].fingerprint,
    max_message_bytes: int = 2**20,
) -> Wire:
    """Two ends that have not spoken yet."""
    return Wire(
        (
            QuicConnection.client(client, client_expects, START_S, alpn=ALPN, max_message_bytes=max_message_bytes),
            QuicConnection.server(server, server_expects, START_S, alpn=ALPN, max_message_bytes=max_message_bytes),
        )
    )


def established_wire() -> Wire:
    """Two ends that know each other, with nothing left in the air."""
    wire = fresh_wire()
    wire.settle()
    wire.wait(1.0)
    wire.carry()
    wire.settle()
    assert all(end.established for end in wire.ends)
    return wire
