"""The host's and the members' machines, joined by ordered, authentic channels as the rendezvous and sealing give."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.ring.agreement import (
    Assign,
    Hello,
    Measured,
    MemberInfo,
    ModelOffer,
    Over,
    Reachable,
    Ready,
    Refusal,
    RefusalReason,
    Serve,
    SessionMessage,
    Trouble,
    Welcome,
    decode_message,
    encode_message,
)
from kafila.ring.session import WELCOME_TIMEOUT_S, MemberSession
from kafila.ring.session_host import MAX_GUESTS, HostSession
from kafila.ring.session_machine import MAX_MEMBERS, State
from kafila.ring.steps import (
    BuildWanted,
    Dropped,
    Ended,
    Event,
    GuestCame,
    GuestLeft,
    Guests,
    MeasureWanted,
    Moved,
    Outgoing,
    PlanWanted,
    Present,
    Serving,
)
from kafila.types import Address, Capability, ModelManifest, NodeId

OFFER = ModelOffer(
    ModelManifest("tiny", 4, 100, 50, 40, 2, 16, 64), "/models/tiny", '{"a": 1}', "float32", context=32, slots=2
)
CAPABILITY = Capability("cpu", 1000, 1e9, 1e-5, 1e9, 0.1, 2e9, 30, 40, 5, ("it was busy",))


def info(n: int, name: str = "") -> MemberInfo:
    return MemberInfo(
        NodeId(bytes([n] * 8)), name or f"member {n}", bytes([n] * 32), (Address("192.168.1.2", 4000 + n),), b"m"
    )


class Session:
    """A host and members; ``step`` delivers one message and plays the devices' part."""

    def __init__(
        self, members: int, expected: int | None, *, guests: int = 0, left_out: int = 0, head: int = 0
    ) -> None:
        self.left_out = left_out
        self.head = head
        self.host = HostSession(info(0), OFFER, expected)
        self.members = {info(n).node_id: MemberSession(info(n), info(0).node_id, 0.0) for n in range(1, members + 1)}
        for n in range(members + 1, members + guests + 1):
            self.members[info(n).node_id] = MemberSession(info(n), info(0).node_id, 0.0, guest=True)
        self.events: dict[NodeId, list[Event]] = {node: [] for node in [info(0).node_id, *self.members]}
        self.wires: dict[tuple[NodeId, NodeId], deque[SessionMessage]] = {}

    @property
    def machines(self) -> dict[NodeId, HostSession | MemberSession]:
        return {info(0).node_id: self.host, **self.members}

    def collect(self) -> None:
        for node, machine in self.machines.items():
            while (event := machine.next_event()) is not None:
                self.events[node].append(event)
                self.act(machine, event)
            while (outgoing := machine.next_message()) is not None:
                self._post(node, outgoing)

    def _post(self, sender: NodeId, outgoing: Outgoing) -> None:
        message = decode_message(encode_message(outgoing.message))
        assert message == outgoing.message
        if outgoing.to in self.machines:
            self.wires.setdefault((sender, outgoing.to), deque()).append(message)

    def act(self, machine: HostSession | MemberSession, event: Event) -> None:
        match event:
            case MeasureWanted():
                machine.measured(CAPABILITY)
            case PlanWanted(members):
                ring = [member.node_id for member, _ in members][: len(members) - self.left_out]
                turn = self.head % len(ring)
                self.host.assign("the plan", ring[turn:] + ring[:turn])
            case BuildWanted():
                machine.ready()
            case _:
                pass

    def step(self, pick: int = 0) -> bool:
        self.collect()
        busy = [wire for wire in sorted(self.wires) if self.wires[wire]]
        if not busy:
            return False
        sender, target = busy[pick % len(busy)]
        self.machines[target].receive(sender, self.wires[sender, target].popleft())
        return True

    def run(self) -> None:
        while self.step():
            pass


@given(st.integers(1, 5), st.lists(st.integers(0, 50), max_size=60))
def test_everybody_serves_the_same_ring_whatever_the_order_of_messages(members: int, picks: list[int]) -> None:
    session = Session(members, members + 1)
    for pick in picks:
        session.step(pick)
    session.run()
    rings = set()
    for node, machine in session.machines.items():
        assert machine.state is State.SERVING
        assert session.events[node][-1] == Serving()
        rings |= {event.assignment for event in session.events[node] if isinstance(event, BuildWanted)}
    (ring,) = rings
    assert len(ring.ring) == members + 1
    assert ring.plan == "the plan"


def test_a_host_alone_serves_alone() -> None:
    session = Session(0, 1)
    session.run()
    assert session.host.state is State.SERVING


def test_one_too_many_is_refused_in_words_that_say_what_to_do() -> None:
    session = Session(2, 2)
    session.run()
    ends = [event for events in session.events.values() for event in events if isinstance(event, Ended)]
    assert [end.refusal for end in ends] == [RefusalReason.STARTED]
    late = HostSession(info(0), OFFER, 2)
    late.receive(info(1).node_id, Hello(info(1)))
    late.receive(info(2).node_id, Hello(info(2)))
    messages = []
    while (outgoing := late.next_message()) is not None:
        messages.append(outgoing.message)
    assert "--members 3" in str(messages[-1])


def test_a_host_that_does_not_say_how_many_starts_when_told() -> None:
    session = Session(2, None)
    session.run()
    assert session.host.state is State.GATHERING
    session.host.start()
    session.run()
    assert {machine.state for machine in session.machines.values()} == {State.SERVING}


def test_another_protocol_version_is_refused_by_name() -> None:
    host = HostSession(info(0), OFFER, 2)
    host.receive(info(1).node_id, Hello(replace(info(1), version=99)))
    outgoing = host.next_message()
    assert outgoing is not None
    assert "protocol 1, you run 99" in str(outgoing.message)


def test_two_members_of_one_name_get_different_names() -> None:
    host = HostSession(info(0, "ada"), OFFER, 3)
    host.receive(info(1).node_id, Hello(info(1, "ada")))
    host.receive(info(2).node_id, Hello(info(2, "ada")))
    assert host.names == ("ada", "ada-2", "ada-3")


def test_a_member_that_cannot_take_part_frees_its_place() -> None:
    host = HostSession(info(0), OFFER, 2)
    host.receive(info(1).node_id, Hello(info(1)))
    host.receive(info(1).node_id, Trouble("no such folder"))
    events = []
    while (event := host.next_event()) is not None:
        events.append(event)
    assert Dropped("member 1", "no such folder") in events
    assert events[-1] == Present(("member 0",), 2)
    assert host.state is State.GATHERING


@given(st.integers(1, 3), st.integers(0, 40), st.integers(0, 3))
def test_whenever_somebody_leaves_the_others_end_or_form_without_them(members: int, steps: int, leaver: int) -> None:
    session = Session(members, members + 1)
    for _ in range(steps):
        session.step()
    session.collect()
    gone = info(min(leaver, members)).node_id
    session.wires = {wire: queue for wire, queue in session.wires.items() if gone not in wire}
    host_was_gathering = session.host.state is State.GATHERING
    for node, machine in session.machines.items():
        if node != gone:
            machine.gone(gone)
    session.members.pop(gone, None)
    session.run()
    if gone == info(0).node_id:
        assert {member.state for member in session.members.values()} <= {State.OVER}
    elif host_was_gathering:
        assert session.host.state is State.GATHERING
    else:
        assert {machine.state for machine in session.machines.values()} == {State.OVER}
        assert all("left" in str(events[-1]) for node, events in session.events.items() if node != gone)


def test_a_member_that_was_given_up_while_it_stood_still_is_not_told_of_itself_as_of_another() -> None:
    session = Session(2, 3)
    session.run()
    session.host.gone(info(1).node_id)
    session.run()
    ends = {node: [e.text for e in events if isinstance(e, Ended)] for node, events in session.events.items()}
    for other in (0, 2):
        assert ends[info(other).node_id] == ["member 1 left the session"]
    (text,) = ends[info(1).node_id]
    assert "went on without this machine" in text


def test_a_silent_host_is_given_up_after_a_while() -> None:
    member = MemberSession(info(1), info(0).node_id, now=5.0)
    assert member.next_timer() == 5.0 + WELCOME_TIMEOUT_S
    member.handle_timer(5.0 + WELCOME_TIMEOUT_S)
    assert member.state is State.OVER
    assert member.next_timer() is None


@pytest.mark.parametrize(
    "message", [Welcome("x", OFFER), Over("bye"), Assign(1, "evil", (info(2),)), Serve(1), Trouble("x"), Ready(1)]
)
def test_only_the_host_speaks_for_the_host(message: SessionMessage) -> None:
    session = Session(1, 3)
    session.run()
    member = session.members[info(1).node_id]
    before = member.state
    member.receive(info(2).node_id, message)
    session.host.receive(info(2).node_id, message)
    assert member.state is before
    assert member.next_event() is None


def test_a_stranger_cannot_measure_or_speak_as_another() -> None:
    host = HostSession(info(0), OFFER, 2)
    host.receive(info(2).node_id, Hello(info(1)))
    host.receive(info(2).node_id, Measured(CAPABILITY))
    assert host.names == ("member 0",)


HERE = Reachable((Address("198.51.100.7", 4100), Address("10.0.0.2", 4100)), ("reflexive", "host"), '{"a": 1}', 0.02)
THERE = Reachable((Address("198.51.100.8", 4200),), ("reflexive",))


def moved(session: Session, node: NodeId) -> list[MemberInfo]:
    return [event.member for event in session.events[node] if isinstance(event, Moved)]


def test_what_a_member_says_of_its_network_before_it_measured_reaches_the_plan_and_the_ring() -> None:
    session = Session(2, 3)
    guest, host = info(1).node_id, info(0).node_id
    session.members[guest].reachable(HERE)
    session.host.reachable(THERE)
    session.run()
    (wanted,) = [event for event in session.events[host] if isinstance(event, PlanWanted)]
    known = {member.node_id: member for member, _ in wanted.members}
    assert known[guest] == info(1).moved(HERE)
    assert known[host] == info(0).moved(THERE)
    (build,) = [event for event in session.events[info(2).node_id] if isinstance(event, BuildWanted)]
    assert {member.node_id: member for member in build.assignment.ring} == known
    assert not any(moved(session, node) for node in session.machines)


def test_a_member_that_moves_tells_its_ring_neighbours_and_nobody_else() -> None:
    session = Session(4, 5)
    session.run()
    mover = info(2).node_id
    session.members[mover].reachable(HERE)
    session.members[mover].reachable(HERE)  # no news
    session.run()
    for n in (1, 3):
        assert [member.addresses for member in moved(session, info(n).node_id)] == [HERE.addresses]
    assert not moved(session, info(0).node_id)
    assert not moved(session, info(4).node_id)
    session.host.reachable(THERE)
    session.run()
    assert [member.addresses for member in moved(session, info(1).node_id)] == [HERE.addresses, THERE.addresses]
    assert [member.addresses for member in moved(session, info(4).node_id)] == [THERE.addresses]


@given(st.lists(st.integers(0, 50), max_size=80), st.integers(0, 40))
def test_wherever_a_move_falls_the_neighbours_end_up_with_the_newest_address(picks: list[int], when: int) -> None:
    session = Session(3, 4)
    for number, pick in enumerate(picks):
        if number == when:
            session.members[info(1).node_id].reachable(HERE)
        session.step(pick)
    if when >= len(picks):
        session.members[info(1).node_id].reachable(HERE)
    session.run()
    ring = [member.node_id for member in session.host._ring]
    place = ring.index(info(1).node_id)
    for node in {ring[place - 1], ring[(place + 1) % 4]}:
        (build,) = [event for event in session.events[node] if isinstance(event, BuildWanted)]
        at_first = next(member for member in build.assignment.ring if member.node_id == info(1).node_id)
        assert [at_first, *moved(session, node)][-1].addresses == HERE.addresses


def test_strangers_cannot_make_a_member_remember_without_end() -> None:
    member = MemberSession(info(1), info(0).node_id, 0.0)
    for n in range(MAX_MEMBERS + 10):
        member.receive(NodeId(n.to_bytes(8, "big")), HERE)
    assert len(member._early) == MAX_MEMBERS


def test_an_older_members_introduction_reads_as_interfaces() -> None:
    older = encode_message(Hello(info(1))).replace(b',"kinds":[]', b"")
    assert b"kinds" not in older
    assert decode_message(older) == Hello(info(1))


def test_an_older_members_measurement_says_less_of_its_head_and_memory() -> None:
    plain = json.loads(encode_message(Measured(CAPABILITY)))
    names = ("head_bytes_per_s", "block_memory_bytes", "head_memory_bytes", "workspace_bytes", "remarks")
    for name in names:
        del plain["capability"][name]
    older = decode_message(json.dumps(plain).encode())
    assert older == Measured(Capability("cpu", 1000, 1e9, 1e-5, 1e9, 0.1))


def ring_of(session: Session) -> list[NodeId]:
    """The head first."""
    (build,) = (event for event in session.events[info(0).node_id] if isinstance(event, BuildWanted))
    return [member.node_id for member in build.assignment.ring]


def linked_guests(session: Session) -> set[NodeId]:
    """Whom the head was told of and not told to be gone, by its own events."""
    (head,) = {
        event.assignment.ring[0].node_id for event in session.events[info(0).node_id] if isinstance(event, BuildWanted)
    }
    linked: set[NodeId] = set()
    for event in session.events[head]:
        if isinstance(event, GuestCame):
            linked.add(event.member.node_id)
        elif isinstance(event, GuestLeft):
            linked.remove(event.member)
    others = [node for node in session.events if node != head]
    assert not any(isinstance(event, GuestCame) for node in others for event in session.events[node])
    return linked


@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 2),
    st.lists(st.integers(0, 50), max_size=60),
)
def test_guests_and_members_left_out_serve_beside_the_ring_linked_with_its_head(
    members: int, guests: int, left_out: int, head: int, picks: list[int]
) -> None:
    left_out = min(left_out, members)
    session = Session(members, members + 1, guests=guests, left_out=left_out, head=head)
    for pick in picks:
        session.step(pick)
    session.run()
    assert {machine.state for machine in session.machines.values()} == {State.SERVING}
    ring = ring_of(session)
    assert linked_guests(session) == set(session.machines) - set(ring)
    for node, machine in session.machines.items():
        assert session.events[node][-1] == Serving() or node in ring
        if node not in ring:
            assert not any(isinstance(event, MeasureWanted) for event in session.events[node]) or left_out
            machine.reachable(Reachable((Address("203.0.113.9", 9),)))
    session.run()
    moved = {event.member.node_id for event in session.events[ring[0]] if isinstance(event, Moved)}
    assert moved >= linked_guests(session)


@given(st.integers(0, 2), st.integers(0, 60))
def test_a_guest_that_goes_ends_nothing(head: int, steps: int) -> None:
    session = Session(2, 3, guests=2, head=head)
    for _ in range(steps):
        session.step()
    session.collect()
    gone = info(3).node_id
    session.wires = {wire: queue for wire, queue in session.wires.items() if gone not in wire}
    known = any(isinstance(event, Guests) and "member 3" in event.names for event in session.events[info(0).node_id])
    session.members.pop(gone)
    for machine in session.machines.values():
        machine.gone(gone)
    session.run()
    assert {machine.state for machine in session.machines.values()} == {State.SERVING}
    assert linked_guests(session) == {info(4).node_id}
    told = [event.names for event in session.events[info(0).node_id] if isinstance(event, Guests)]
    assert "member 3" not in told[-1] or not known


def test_a_guest_comes_late_and_the_session_ends_for_it_too() -> None:
    session = Session(1, 2)
    session.run()
    late = info(7)
    session.members[late.node_id] = MemberSession(late, info(0).node_id, 0.0, guest=True)
    session.events[late.node_id] = []
    session.run()
    assert session.members[late.node_id].state is State.SERVING
    assert linked_guests(session) == {late.node_id}
    session.host.gone(info(1).node_id)
    session.run()
    assert session.members[late.node_id].state is State.OVER
    assert "member 1 left" in str(session.events[late.node_id][-1])


def test_guests_have_a_limit_of_their_own_and_say_so() -> None:
    host = HostSession(info(0), OFFER, 1)
    for n in range(1, MAX_GUESTS + 2):
        host.receive(info(n).node_id, Hello(info(n), guest=True))
    assert host.names == ("member 0",)
    messages = []
    while (outgoing := host.next_message()) is not None:
        messages.append(outgoing.message)
    assert isinstance(messages[-1], Refusal)
    assert f"{MAX_GUESTS} guests" in messages[-1].text
