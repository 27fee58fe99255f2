"""Sessions and their members, against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kafila.errors import ProtocolError
from kafila.ring import registry
from kafila.ring.control import (
    Create,
    Departure,
    Evict,
    Join,
    Joined,
    MemberJoined,
    MemberLeft,
    Reason,
    Refused,
    Restore,
    Send,
    Signal,
)
from kafila.ring.registry import Caller, Delivery, Registry
from kafila.types import Address, NodeId

HERE = Address("192.0.2.1", 1)


def caller(connection: int, who: int | None = None) -> Caller:
    fingerprint = bytes([connection if who is None else who]) * 32
    return Caller(connection, NodeId(fingerprint[:8]), fingerprint, HERE)


def node(who: int) -> NodeId:
    return NodeId(bytes([who]) * 8)


def test_a_second_certificate_with_a_members_id_is_kept_out() -> None:
    rooms = Registry()
    rooms.register(caller(1), Create("AB3DE", 4, b""))
    impostor = caller(2, who=1)._replace(fingerprint=bytes([1]) * 8 + bytes(24))
    assert rooms.register(impostor, Join("AB3DE")) == [Delivery(2, Refused(Reason.EVICTED))]
    assert rooms.membership(1) is not None


def test_a_host_that_comes_back_changes_seats_and_greeting() -> None:
    rooms = Registry()
    rooms.register(caller(1), Create("AB3DE", 2, b"old"))
    rooms.register(caller(2), Join("AB3DE"))
    said = rooms.register(caller(3, who=1), Create("AB3DE", 3, b"new"))
    assert said == [
        Delivery(1, Refused(Reason.REPLACED)),
        Delivery(3, Joined(node(1), 3, b"new", (node(2),), HERE)),
    ]
    (joined, *_) = rooms.register(caller(4), Join("AB3DE"))
    assert joined == Delivery(4, Joined(node(1), 3, b"new", (node(1), node(2)), HERE))


def test_only_members_may_ask_and_only_the_host_evicts() -> None:
    rooms = Registry()
    with pytest.raises(ProtocolError):
        rooms.send(1, Send(None, b""))
    with pytest.raises(ProtocolError):
        rooms.evict(1, Evict(node(2)))
    rooms.register(caller(1), Create("AB3DE", 4, b""))
    rooms.register(caller(2), Join("AB3DE"))
    with pytest.raises(ProtocolError):
        rooms.evict(2, Evict(node(1)))
    with pytest.raises(ProtocolError):
        rooms.evict(1, Evict(node(1)))
    assert rooms.evict(1, Evict(node(9))) == []
    assert rooms.register(caller(9), Restore("AB3DE", node(1), 4, b"")) == [Delivery(9, Refused(Reason.EVICTED))]
    assert rooms.gone(9, Departure.LOST) == []


def test_the_list_of_the_evicted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_EVICTED", 2)
    rooms = Registry()
    rooms.register(caller(1), Create("AB3DE", 4, b""))
    for who in (2, 3, 4):
        rooms.evict(1, Evict(node(who)))
    assert isinstance(rooms.register(caller(2), Join("AB3DE"))[0].message, Joined)
    assert rooms.register(caller(3), Join("AB3DE")) == [Delivery(3, Refused(Reason.EVICTED))]


people = st.integers(0, 5)
locators = st.sampled_from(["AAAAA", "BBBBB"])


class PlainModel(RuleBasedStateMachine):
    """Six identities, two locators, sessions of two seats: who sits where, in plain dicts; every delivery predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms = Registry()
        self.sitting: dict[str, list[int]] = {}
        self.hosts: dict[str, int] = {}
        self.evicted: dict[str, set[int]] = {}

    def place(self, who: int) -> str | None:
        return next((locator for locator, members in self.sitting.items() if who in members), None)

    def leave(self, who: int) -> list[int]:
        """Take ``who`` away; who is left in that session."""
        locator = self.place(who)
        if locator is None:
            return []
        self.sitting[locator].remove(who)
        others = list(self.sitting[locator])
        if not others:
            del self.sitting[locator], self.hosts[locator], self.evicted[locator]
        return others

    def register(self, who: int, request: Create | Join | Restore, host: int, refused: Reason | None) -> None:
        if self.place(who) is not None:
            with pytest.raises(ProtocolError):
                self.rooms.register(caller(who), request)
            return
        said = self.rooms.register(caller(who), request)
        if refused is not None:
            assert said == [Delivery(who, Refused(refused))]
            return
        host = self.hosts.setdefault(request.locator, host)
        self.evicted.setdefault(request.locator, set())
        others = list(self.sitting.setdefault(request.locator, []))
        self.sitting[request.locator].append(who)
        assert said[0] == Delivery(who, Joined(node(host), 2, b"", tuple(map(node, others)), HERE))
        assert said[1:] == [Delivery(each, MemberJoined(node(who))) for each in others]

    def why_not(self, who: int, locator: str) -> Reason | None:
        if locator not in self.sitting:
            return None
        if who in self.evicted[locator]:
            return Reason.EVICTED
        guests = [each for each in self.sitting[locator] if each != self.hosts[locator]]
        return Reason.FULL if guests and who != self.hosts[locator] else None

    @rule(who=people, locator=locators)
    def create(self, who: int, locator: str) -> None:
        taken = self.hosts.get(locator, who) != who
        self.register(who, Create(locator, 2, b""), who, Reason.LOCATOR_TAKEN if taken else self.why_not(who, locator))

    @rule(who=people, locator=locators)
    def join(self, who: int, locator: str) -> None:
        unknown = locator not in self.sitting
        self.register(who, Join(locator), who, Reason.UNKNOWN_SESSION if unknown else self.why_not(who, locator))

    @rule(who=people, locator=locators, host=people)
    def restore(self, who: int, locator: str, host: int) -> None:
        self.register(who, Restore(locator, node(host), 2, b""), host, self.why_not(who, locator))

    @rule(who=people)
    def gone(self, who: int) -> None:
        said = self.rooms.gone(who, Departure.LEFT)
        assert said == [Delivery(each, MemberLeft(node(who), Departure.LEFT)) for each in self.leave(who)]

    @rule(who=people, to=st.one_of(st.none(), people))
    def send(self, who: int, to: int | None) -> None:
        request = Send(None if to is None else node(to), b"sealed")
        locator = self.place(who)
        if locator is None:
            with pytest.raises(ProtocolError):
                self.rooms.send(who, request)
            return
        heard = [each for each in self.sitting[locator] if (each != who if to is None else each == to)]
        assert self.rooms.send(who, request) == [Delivery(each, Signal(node(who), b"sealed")) for each in heard]

    @rule(who=people, other=people)
    def evict(self, who: int, other: int) -> None:
        locator = self.place(who)
        if locator is None or self.hosts[locator] != who or who == other:
            with pytest.raises(ProtocolError):
                self.rooms.evict(who, Evict(node(other)))
            return
        said = self.rooms.evict(who, Evict(node(other)))
        was_there = other in self.sitting[locator]
        self.evicted[locator].add(other)
        if was_there:
            left = [Delivery(each, MemberLeft(node(other), Departure.EVICTED)) for each in self.leave(other)]
            assert said == [Delivery(other, Refused(Reason.EVICTED)), *left]
        else:
            assert said == []

    @invariant()
    def agrees(self) -> None:
        assert len(self.rooms) == len(self.sitting)
        assert all(len(members) <= 2 for members in self.sitting.values())
        for who in range(6):
            membership = self.rooms.membership(who)
            assert (membership.locator if membership else None) == self.place(who)


TestPlainModel = PlainModel.TestCase
