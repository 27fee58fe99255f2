"""A rendezvous that turns on its members: it does all that DESIGN section 4 says it cannot gain by.

It is the real service with its two exits bent: what it says to members, and what it relays. So it reaches all that a
rendezvous reaches, and a whole node can be put before it as well as a bare client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random

from kafila.ring import control
from kafila.ring.control import Joined, MemberJoined, Signal, ToMember
from kafila.ring.identity import Identity
from kafila.ring.registry import Delivery
from kafila.ring.relay import Relay
from kafila.ring.rendezvous import RendezvousServer
from kafila.types import Address, NodeId, Transmit
from kafila.wire import unwrap_relay, wrap_relay


@dataclass(frozen=True)
class Mischief:
    """How likely, from 0 to 1, each thing is done to each message or datagram."""

    drop: float = 0.0
    alter: float = 0.0
    """One byte changed, or the end cut off, or something added."""
    replay: float = 0.0
    """Something older is delivered as well, to whoever is there."""
    reorder: float = 0.0
    """Held back until the next one for the same member."""
    redirect: float = 0.0
    """Delivered to another member, or as if another had sent it."""
    invent: float = 0.0
    """A member that does not exist joins and speaks."""
    swap: float = 0.0
    """Every fingerprint and id of a member in it is replaced by the rendezvous's own."""
    greeting: float = 0.0
    """The greeting is altered, or another host is named."""


class HostileRendezvous(RendezvousServer):
    """``done`` counts what was done, ``seen`` holds every byte that it could read."""

    def __init__(
        self, identity: Identity, randbytes: Callable[[int], bytes], random: Random, mischief: Mischief
    ) -> None:
        super().__init__(identity, randbytes)
        self.done: Counter[str] = Counter()
        self.seen: list[bytes] = []
        self.tampered = 0
        """Messages that a member was given and that no member had meant for it, in that form, at that time."""
        self.random = random
        self.mischief = mischief
        self._own = identity
        self._relay = _HostileRelay(self)
        self._history: list[Signal] = []
        self._withheld: dict[int, ToMember] = {}

    def receive(self, data: bytes, source: Address, now: float) -> None:
        """As the service, taking notes."""
        self.seen.append(data)
        super().receive(data, source, now)

    def fires(self, what: str) -> bool:
        """Whether to do ``what`` this time."""
        if self.random.random() >= getattr(self.mischief, what):
            return False
        self.done[what] += 1
        return True

    def altered(self, data: bytes) -> bytes:
        """``data``, changed somehow."""
        how = self.random.randrange(4)
        if how == 0:
            return data[: self.random.randrange(len(data))] if data else b"\0"
        if how == 1:
            return data + self.random.randbytes(1 + self.random.randrange(20))
        if how == 2 and data:
            return self.random.randbytes(len(data))
        at = self.random.randrange(max(len(data), 1))
        return data[:at] + bytes((data[at] ^ (1 + self.random.randrange(255)) if data else 1,)) + data[at + 1 :]

    def swapped(self, data: bytes) -> bytes:
        """``data`` with every fingerprint and id of a member, as bytes or as hex, replaced by the rendezvous's own."""
        for connection in self._connections.values():
            theirs, ours = connection.fingerprint, self._own.fingerprint
            for one, other in ((theirs, ours), (theirs[:8], ours[:8])):
                if one:
                    data = data.replace(one, other).replace(one.hex().encode(), other.hex().encode())
        return data

    def _deliver(self, deliveries: Iterable[Delivery], now: float) -> None:
        bent: list[Delivery] = []
        for delivery in deliveries:
            message = delivery.message
            if isinstance(message, Signal):
                self.seen.append(message.sealed)
                bent += self._bend_signal(delivery.connection, message)
                self._history.append(message)
            elif isinstance(message, Joined):
                self.seen.append(message.greeting)
                bent.append(Delivery(delivery.connection, self._bend_joined(message)))
            else:
                bent.append(delivery)
            if self.fires("invent"):
                bent += self._invent(delivery.connection)
        super()._deliver([each for each in bent if each.connection in self._connections], now)

    def _bend_signal(self, connection: int, signal: Signal) -> list[Delivery]:
        said: list[Delivery] = []
        if self._history and self.fires("replay"):
            self.tampered += 1
            said.append(Delivery(connection, self.random.choice(self._history)))
        if self.fires("drop"):
            return said
        if self.fires("alter"):
            self.tampered += 1
            signal = replace(signal, sealed=self.altered(signal.sealed))
        if self.fires("swap"):
            swapped = self.swapped(signal.sealed)
            self.tampered += swapped != signal.sealed
            signal = replace(signal, sealed=swapped)
        if self.fires("redirect"):
            others = [other for other in self._connections if other != connection]
            if others and self.random.random() < 0.5:
                # A broadcast is meant for the other too: to it this is at worst a replay.
                self.tampered += signal.sealed[:2] != b"\x01\x00"
                connection = self.random.choice(others)
            else:
                self.tampered += 1
                signal = replace(signal, sender=NodeId(self.random.randbytes(8)))
        withheld = self._withheld.pop(connection, None)
        if withheld is None and self.fires("reorder"):
            self._withheld[connection] = signal
            return said
        said.append(Delivery(connection, signal))
        return said if withheld is None else [*said, Delivery(connection, withheld)]

    def _bend_joined(self, joined: Joined) -> Joined:
        if not self.fires("greeting"):
            return joined
        if self.random.random() < 0.5:
            return replace(joined, greeting=self.altered(joined.greeting)[: control.MAX_GREETING_BYTES])
        return replace(joined, host=NodeId(self.random.randbytes(8)))

    def _invent(self, connection: int) -> list[Delivery]:
        nobody = NodeId(self.random.randbytes(8))
        self.tampered += 1
        sealed = self.random.choice(self._history).sealed if self._history else self.random.randbytes(100)
        return [Delivery(connection, MemberJoined(nobody)), Delivery(connection, Signal(nobody, sealed))]


class _HostileRelay(Relay):
    """The relay, bent in the same ways."""

    def __init__(self, owner: HostileRendezvous) -> None:
        super().__init__(owner.counters)
        self._owner = owner
        self._passed: list[Transmit] = []

    def _pass(self, transmit: Transmit) -> None:
        owner = self._owner
        sender, datagram = unwrap_relay(transmit.data)
        if self._passed and owner.fires("replay"):
            super()._pass(owner.random.choice(self._passed))
        self._passed = [*self._passed[-255:], transmit]
        if owner.fires("drop"):
            return
        if owner.fires("alter"):
            transmit = Transmit(wrap_relay(sender, owner.altered(datagram)), transmit.to)
        if owner.fires("swap"):
            transmit = Transmit(wrap_relay(sender, owner.swapped(datagram)), transmit.to)
        if owner.fires("redirect"):
            transmit = Transmit(transmit.data, owner.random.choice(list(self._by_address)))
        super()._pass(transmit)


def found_in(seen: Iterable[bytes], secrets: Iterable[bytes]) -> list[bytes]:
    """Which of ``secrets`` stand, as bytes or as hex, anywhere in what was ``seen``."""
    everything = b"\xff\x00".join(seen)
    return [secret for secret in secrets if secret in everything or secret.hex().encode() in everything]
