"""Asking neighbours for parts of files and giving them: nothing damaged is taken, nobody is asked too much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from kafila.ring.exchange import (
    ASKED_AT_ONCE,
    BESIDE_ANSWERS_BYTES,
    BESIDE_ANSWERS_EVERY_S,
    QUIET_S,
    SILENCE_S,
    Asker,
    Given,
    Giver,
    NotGiven,
)
from kafila.ring.parts import MAX_PIECE_BYTES, Piece, Refuse, Want
from kafila.types import FilePart, FilePiece, NodeId, Withheld

ADA, BEN = NodeId(b"ada-----"), NodeId(b"ben-----")
FILE = bytes(range(256)) * 8
PART = FilePart("model.safetensors", 100, 200, size=len(FILE))


def asker(*linked: NodeId) -> Asker:
    machine = Asker({ADA: "ada", BEN: "ben"})
    for peer in linked:
        machine.link_up(peer, 0.0)
    return machine


def piece(want: Want, data: bytes | None = None) -> Piece:
    data = FILE[want.part.start : want.part.end] if data is None else data
    return Piece(want.number, FilePiece(want.part.start, len(FILE), "", data), sha256(data).digest())


def sent(machine: Asker) -> list[tuple[NodeId, Want]]:
    found = []
    while (send := machine.next_send()) is not None:
        found.append(send)
    return found


def test_a_part_is_asked_of_one_neighbour_and_given() -> None:
    machine = asker(ADA, BEN)
    machine.ask(1, PART, 0.0)
    ((peer, want),) = sent(machine)
    machine.receive(peer, piece(want), 1.0)
    assert machine.next_event() == Given(1, peer, FilePiece(100, len(FILE), "", FILE[100:200]))
    assert machine.next_timer() is None


def test_damage_and_what_was_not_asked_for_are_noticed_and_another_is_asked() -> None:
    damaged: dict[str, Callable[[Want], Piece]] = {
        "damaged": lambda want: replace(piece(want), digest=bytes(32)),
        "another part": lambda want: piece(Want(want.number, replace(want.part, start=99))),
        "of another": lambda want: Piece(want.number, FilePiece(100, 999, "", b"a"), sha256(b"a").digest()),
        "nothing": lambda want: piece(want, b""),
    }
    for fault, make in damaged.items():
        machine = asker(ADA, BEN)
        machine.ask(1, PART, 0.0)
        ((first, want),) = sent(machine)
        machine.receive(first, make(want), 1.0)
        ((second, again),) = sent(machine)
        assert {first, second} == {ADA, BEN}
        machine.receive(second, piece(again), 2.0)
        assert isinstance(machine.next_event(), Given)
        alone = asker(ADA)
        alone.link_down(BEN, 0.0)
        alone.ask(1, PART, 0.0)
        alone.receive(ADA, make(sent(alone)[0][1]), 1.0)
        event = alone.next_event()
        assert isinstance(event, NotGiven)
        assert "ada sent" in event.text
        assert fault in event.text
        assert "ben has left" in event.text


def test_who_leaves_owes_nothing() -> None:
    machine = asker(ADA, BEN)
    for number in range(ASKED_AT_ONCE):
        machine.ask(number, PART, 0.0)
    before = sent(machine)
    machine.link_down(ADA, 1.0)
    moved = sent(machine)
    assert len(moved) == sum(peer == ADA for peer, _ in before) > 0
    assert {peer for peer, _ in moved} == {BEN}
    machine.link_down(BEN, 2.0)
    events = [machine.next_event() for _ in range(ASKED_AT_ONCE)]
    assert {event.text for event in events if isinstance(event, NotGiven)} == {"ada has left, ben has left"}


def test_a_link_that_is_not_up_yet_is_waited_for() -> None:
    machine = asker()
    machine.ask(1, PART, 0.0)
    assert not sent(machine)
    assert machine.next_event() is None
    machine.link_up(BEN, 5.0)
    assert [peer for peer, _ in sent(machine)] == [BEN]


def test_who_says_nothing_for_long_is_not_waited_for() -> None:
    machine = asker(ADA, BEN)
    machine.ask(1, PART, 0.0)
    ((first, want),) = sent(machine)
    assert machine.next_timer() == SILENCE_S
    machine.handle_timer(SILENCE_S)
    ((second, _),) = sent(machine)
    machine.receive(first, piece(want), SILENCE_S + 1)  # too late: it is another's by now
    assert machine.next_event() is None
    machine.handle_timer(2 * SILENCE_S)
    event = machine.next_event()
    assert second != first
    assert isinstance(event, NotGiven)
    assert event.text.count("did not answer") == 2


def test_refusals_are_told_by_name_and_who_does_not_share_is_not_asked_again() -> None:
    machine = asker(ADA, BEN)
    machine.ask(1, PART, 0.0)
    for _ in range(2):
        ((peer, want),) = sent(machine)
        machine.receive(peer, Refuse(want.number, Withheld.NOT_SHARING if peer == ADA else Withheld.ABSENT), 0.0)
    assert machine.next_event() == NotGiven(
        1, "ada does not share what it has (--share-weights), ben has no such file", absent=True
    )
    machine.ask(2, PART, 0.0)
    assert [peer for peer, _ in sent(machine)] == [BEN]


def test_who_gave_last_is_asked_before_who_refused() -> None:
    machine = asker(ADA, BEN)
    for number in range(6):
        machine.ask(number, PART, 0.0)
        for peer, want in sent(machine):
            if peer == BEN:
                machine.receive(peer, piece(want), 0.0)
            else:
                assert number == 0
                machine.receive(peer, Refuse(want.number, Withheld.NOT_HELD), 0.0)
                ((_, again),) = sent(machine)
                machine.receive(BEN, piece(again), 0.0)


def test_without_neighbours_nobody_gives() -> None:
    machine = Asker({})
    machine.ask(1, PART, 0.0)
    assert machine.next_event() == NotGiven(1, "this member has no neighbours")


def test_a_neighbour_that_talks_nonsense_is_left_alone() -> None:
    machine = asker(ADA, BEN)
    machine.nonsense(ADA, "garbage", 0.0)
    machine.ask(1, PART, 0.0)
    ((peer, want),) = sent(machine)
    assert peer == BEN
    machine.receive(BEN, Refuse(want.number, Withheld.NOT_HELD), 0.0)
    event = machine.next_event()
    assert isinstance(event, NotGiven)
    assert "ada sent nonsense (garbage)" in event.text


steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "give", "damage", "refuse", "stray", "down", "up", "wait"]),
        st.sampled_from([ADA, BEN]),
    ),
    max_size=60,
)


class Play:
    """An asker, and what its two neighbours owe it."""

    def __init__(self) -> None:
        self.machine = asker(ADA)
        self.now = 0.0
        self.asked = 0
        self.owed: dict[NodeId, list[Want]] = {ADA: [], BEN: []}
        self.ended: list[int] = []

    def step(self, what: str, peer: NodeId) -> None:
        self.now += 1.0
        match what:
            case "ask":
                self.asked += 1
                self.machine.ask(self.asked, PART, self.now)
            case "up":
                self.machine.link_up(peer, self.now)
            case "down":
                self.owed[peer].clear()
                self.machine.link_down(peer, self.now)
            case "wait":
                self.now += SILENCE_S
                self.owed = {ADA: [], BEN: []}
                self.machine.handle_timer(self.now)
            case "stray":
                self.machine.receive(peer, Refuse(10**6, Withheld.NOT_HELD), self.now)
            case _ if self.owed[peer]:
                self._answer(what, peer, self.owed[peer].pop(0))
        self._collect()

    def _answer(self, what: str, peer: NodeId, want: Want) -> None:
        answers = {"give": piece(want), "damage": replace(piece(want), digest=bytes(32))}
        self.machine.receive(peer, answers.get(what, Refuse(want.number, Withheld.NOT_HELD)), self.now)

    def _collect(self) -> None:
        for peer, want in sent(self.machine):
            self.owed[peer].append(want)
            assert len(self.owed[peer]) <= ASKED_AT_ONCE
        while (event := self.machine.next_event()) is not None:
            self.ended.append(event.number)
            assert not isinstance(event, Given) or event.piece.data == FILE[100:200]


@given(steps)
def test_every_wish_ends_once_and_nobody_is_asked_for_too_much(history: list[tuple[str, NodeId]]) -> None:
    play = Play()
    for what, peer in history:
        play.step(what, peer)
    for peer in (ADA, BEN):
        play.step("down", peer)
    assert sorted(play.ended) == list(range(1, play.asked + 1))
    assert play.machine.next_timer() is None


# -- giving ------------------------------------------------------------------------------------------------------------


def want(number: int) -> Want:
    return Want(number, FilePart("model.safetensors", 0, 10 * MAX_PIECE_BYTES))


def always(_peer: NodeId) -> bool:
    return True


def test_who_does_not_share_says_so() -> None:
    giver = Giver(willing=False)
    assert giver.receive(ADA, want(1)) == Refuse(1, Withheld.NOT_SHARING)
    assert not giver.waited_for


def test_neighbours_have_turns_and_a_bounded_queue() -> None:
    giver = Giver(willing=True)
    for number in range(ASKED_AT_ONCE):
        assert giver.receive(ADA, want(number)) is None
    assert giver.receive(ADA, want(9)) == Refuse(9, Withheld.BUSY)
    giver.receive(BEN, want(10))
    order = []
    while (job := giver.next_job(always, 0.0)) is not None:
        order.append(job[0])
        assert job[1].part.end == MAX_PIECE_BYTES
    assert order == [ADA, BEN, ADA, ADA, ADA]


def test_a_link_without_room_is_passed_over() -> None:
    giver = Giver(willing=True)
    giver.receive(ADA, want(1))
    giver.receive(BEN, want(2))
    job = giver.next_job(lambda peer: peer == BEN, 0.0)
    assert job is not None
    assert job[0] == BEN
    assert giver.next_job(lambda peer: peer == BEN, 0.0) is None
    assert giver.waited_for
    giver.link_down(ADA)
    assert not giver.waited_for


def test_while_answers_go_round_pieces_are_small_and_seldom() -> None:
    giver = Giver(willing=True)
    for number in range(3):
        giver.receive(ADA, want(number))
    giver.batch_passed(10.0)
    job = giver.next_job(always, 10.1)
    assert job is not None
    assert job[1].part.end == BESIDE_ANSWERS_BYTES
    assert giver.next_job(always, 10.2) is None
    assert giver.not_before == 10.1 + BESIDE_ANSWERS_EVERY_S
    job = giver.next_job(always, giver.not_before)
    assert job is not None
    assert job[1].part.end == BESIDE_ANSWERS_BYTES
    job = giver.next_job(always, 10.0 + QUIET_S)
    assert job is not None
    assert job[1].part.end == MAX_PIECE_BYTES
