"""Only the rows that tokens may be drawn from come back to the head: what is cut, what is refused, whose tokens are
whose, and rings with a member that does not know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from kafila import members
from kafila.ring.agreement import EDGES, KNOWN, LAST_ROWS, PARTS, SCORES, MemberInfo
from kafila.ring.frames import Activation, decode_activation, encode_activation, is_scores
from kafila.ring.invite import HostPort
from kafila.ring.pace import Pace, Reading
from kafila.serve import Send
from kafila.shard.worker import Forward, Forwarded, Job, Result, Sample, Score
from kafila.types import Sampling, Segment, last_rows
from sims.topology import VirtualNetwork
from tests.meeting import meeting
from tests.party import Guest, Party, answer_of, form_ring
from tests.standin import StandInShard
from tests.test_serve import SLOTS, Ring, ask, solo

LONG = "a b c d e f g h i j k"
SEEDED = Sampling(temperature=1.0, seed=3)


class Tapped(Ring):
    """Remembers every activation, with who sent it, and every job."""

    def __init__(self, members: int, percent: int = 0, *, last_rows: bool = True) -> None:
        super().__init__(members, 0, percent, last_rows=last_rows)
        self.sent: list[tuple[int, Activation]] = []
        self.jobs: list[list[Job]] = [[] for _ in range(members)]
        self.shards = [_Noting(n, percent, self.jobs[n]) for n in range(members)]

    def _wire(self, n: int, send: Send) -> int:
        if send.bulk and not is_scores(send.data):
            self.sent.append((n, decode_activation(send.data)))
        return super()._wire(n, send)

    def forwards(self, n: int) -> list[Forward]:
        return [job for job in self.jobs[n] if isinstance(job, Forward)]

    def draws(self) -> list[Sample]:
        return [job for job in self.jobs[0] if isinstance(job, Sample)]


class _Noting(StandInShard):
    def __init__(self, salt: int, percent: int, jobs: list[Job]) -> None:
        super().__init__(salt, percent)
        self._jobs = jobs

    def do(self, job: Job) -> Result:
        self._jobs.append(job)
        return super().do(job)


def read_by(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Prompts are read in by so many tokens a batch."""
    monkeypatch.setattr(Pace, "reading", lambda self, answers, prompt_tokens, start: Reading(2, room))


# -- what is cut ------------------------------------------------------------------------------------------------------

FRAME = Activation(1, 3, "float32", 1, (Segment(0, 4, 3, False), Segment(1, 7, 1, True)), bytes(16))
CUT = (Segment(0, 6, 1, False), Segment(1, 7, 1, True))


@pytest.mark.parametrize(("place", "agreed", "cuts"), [(2, True, True), (2, False, False), (1, True, False)])
def test_the_last_member_alone_cuts_and_only_where_that_was_agreed(place: int, agreed: bool, cuts: bool) -> None:
    stage = Ring(3, last_rows=agreed).stages[place]
    stage.receive(True, encode_activation(FRAME), 0.0)
    assert stage.next_job() == Forward(3, FRAME.segments, None, bytes(16), "float32", last_only=cuts)
    rows = bytes(8 if cuts else 16)
    stage.result(Forwarded(3, rows, "float32", 1e-3), 0.0)
    send = stage.next_send()
    assert send is not None
    expected = replace(FRAME, segments=CUT if cuts else FRAME.segments, payload=rows, hop_us=(1000,))
    assert decode_activation(send.data) == expected


@pytest.mark.parametrize("agreed", [True, False])
def test_scores_are_of_the_rows_that_were_sent(agreed: bool) -> None:
    last = Ring(2, percent=50, last_rows=agreed).stages[1]
    last.receive(True, encode_activation(replace(FRAME, score=True)), 0.0)
    assert last.next_job() is not None
    rows = bytes(8 if agreed else 16)
    last.result(Forwarded(3, rows, "float32", 1e-3), 0.0)
    assert last.next_send() is not None
    assert last.next_job() == Score(3, CUT if agreed else FRAME.segments, rows, "float32")


@pytest.mark.parametrize("percent", [0, 50])
def test_batches_of_answers_are_the_same_bytes_and_prompts_come_back_shorter(percent: int) -> None:
    rings = [Tapped(3, percent, last_rows=agreed) for agreed in (True, False)]
    for ring in rings:
        ring.stages[1].ask(ask(0, 1, LONG), 0.0)
        ring.run()
        assert ring.answer("1-0") == solo(LONG, 3, Sampling(), 0)
    pairs = list(zip(rings[0].sent, rings[1].sent, strict=True))
    assert len(pairs) > 3, "choose other words"
    for (sender, cut), (same, whole) in pairs:
        assert sender == same
        if sender < 2 or len(cut.payload) == len(whole.payload):
            assert encode_activation(cut) == encode_activation(whole)
        else:
            assert cut == replace(whole, segments=last_rows(whole.segments), payload=whole.payload[-4:])
    back = [(batch.rows, batch.rows_back) for ring in rings for batch in ring.batches if not batch.decode]
    assert back == [(11, 1), (11, 11)]
    assert all(batch.rows == batch.rows_back for ring in rings for batch in ring.batches if batch.decode)


def test_a_ring_of_one_computes_no_other_rows_either() -> None:
    for agreed in (True, False):
        ring = Tapped(1, last_rows=agreed)
        for n, sampling in enumerate((Sampling(), SEEDED)):
            ring.stages[0].ask(ask(n, 0, LONG, sampling=sampling), 0.0)
        ring.run()
        assert [ring.answer(f"0-{n}") for n in range(2)] == [solo(LONG, 1, how, 0) for how in (Sampling(), SEEDED)]
        assert all(job.last_only for job in ring.forwards(0))
        assert any(segment.length > 1 for job in ring.forwards(0) for segment in job.segments)
        assert all(segment.length == 1 for job in ring.draws() for segment in job.segments)


def test_of_several_only_the_last_computes_less() -> None:
    ring = Tapped(3)
    ring.stages[1].ask(ask(0, 1, LONG), 0.0)
    ring.run()
    assert [{job.last_only for job in ring.forwards(n)} for n in range(3)] == [{False}, {False}, {True}]


# -- what is refused --------------------------------------------------------------------------------------------------


def returned(ring: Tapped) -> Activation:
    """A prompt's rows as the last member sends them, which the head has not got yet."""
    ring.stages[1].ask(ask(0, 1, LONG), 0.0)
    while not (back := [frame for sender, frame in ring.sent if sender == 1]):
        ring.step()
        ring.collect()
    return back[0]


@pytest.mark.parametrize("agreed", [True, False])
def test_the_head_takes_what_was_agreed_and_nothing_else(agreed: bool) -> None:
    ring = Tapped(2, last_rows=agreed)
    frame = returned(ring)
    (whole,) = ring.forwards(0)
    cut = last_rows(whole.segments)
    others = [whole.segments if agreed else cut, *(tuple(replace(one, start=one.start - 1) for one in cut),) * agreed]
    for segments in others:
        rows = sum(segment.length for segment in segments)
        ring.head.receive(True, encode_activation(replace(frame, segments=segments, payload=bytes(4 * rows))), 0.0)
        ring.collect()
        assert "not as it was sent" in ring.broken.pop()
    assert frame.segments == (cut if agreed else whole.segments)
    ring.run()
    assert not ring.broken
    assert ring.answer("1-0") == solo(LONG, 2, Sampling(), 0)


# -- whose tokens are whose -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_rows", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_a_prompts_last_chunk_rides_with_another_prompts_first_and_an_answer(
    monkeypatch: pytest.MonkeyPatch, count: int, last_rows: bool
) -> None:
    read_by(monkeypatch, 5)
    ring = Tapped(count, last_rows=last_rows)
    asked = [("a e a", Sampling()), ("a b f g h i j k", SEEDED), (LONG, Sampling(presence_penalty=1.0))]
    for n, (words, sampling) in enumerate(asked):
        ring.head.ask(ask(n, 0, words, sampling=sampling), ring.now)
        while not ring.answer("0-0"):
            ring.step()
    ring.run()
    for n, (words, sampling) in enumerate(asked):
        assert ring.answer(f"0-{n}") == solo(words, count, sampling, 0)
    kinds = [{(one.length > 1, one.sample) for one in job.segments} for job in ring.forwards(0)]
    assert {(True, True), (True, False), (False, True)} in kinds, "choose other words"


prompts = st.lists(st.sampled_from(LONG.split()), min_size=1, max_size=20).map(" ".join)
ways = st.builds(
    Sampling,
    st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 5),
    presence_penalty=st.sampled_from([0.0, 1.0]),
)


@given(
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0, 50]),
    st.integers(1, 7),
    st.lists(st.tuples(prompts, ways, st.integers(0, 12)), min_size=2, max_size=SLOTS + 1),
    st.lists(st.integers(0, 9), max_size=40),
)
def test_however_prompts_are_cut_into_chunks_everybody_gets_their_own_tokens(
    count: int, agreed: bool, percent: int, room: int, asked: list[tuple[str, Sampling, int]], picks: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        read_by(patch, room)
        ring = Ring(count, percent=percent, last_rows=agreed)
        for n, (words, sampling, later) in enumerate(asked):
            for _ in range(later):
                ring.step()
            ring.head.ask(ask(n, 0, words, sampling=sampling, max_tokens=6), ring.now)
        ring.run(picks)
    assert not ring.broken
    for n, (words, sampling, _) in enumerate(asked):
        assert ring.answer(f"0-{n}") == solo(words, count, sampling, 6)


def test_where_the_vocabulary_is_divided_a_prompts_last_chunk_is_the_heads_to_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_by(monkeypatch, 4)
    ring = Tapped(3, 50)
    ring.stages[2].ask(ask(0, 2, LONG), 0.0)
    ring.run()
    assert ring.answer("2-0") == solo(LONG, 3, Sampling(), 0)
    chunks = [[segment.length for segment in job.segments] for job in ring.forwards(0)]
    assert chunks[:3] == [[4], [4], [3]]
    assert [(job.partial, job.segments[0].sample) for job in ring.draws()[:4]] == [
        (False, False),
        (False, False),
        (False, True),
        (True, True),
    ]
    assert all(len(job.hidden) == 4 for job in ring.draws())
    assert any(isinstance(job, Score) for job in ring.jobs[2])


# -- deployed nodes ---------------------------------------------------------------------------------------------------


class World:
    def __init__(self, net: VirtualNetwork, party: Party, where: HostPort) -> None:
        self.party = party
        self.where = where
        self.guests = [party.member(name, net.nat().machine(name)) for name in ("host", "a", "b")]

    async def form(self, monkeypatch: pytest.MonkeyPatch, knowing: Mapping[str, tuple[str, ...]]) -> None:
        introduce = members.member_info

        def info(*of: Any) -> MemberInfo:
            whole = introduce(*of)
            return replace(whole, knows=knowing.get(whole.name, KNOWN))

        with monkeypatch.context() as patch:
            patch.setattr("kafila.node.member_info", info)
            await form_ring(self.party, self.guests, self.where)

    def batches(self, phase: str) -> list[tuple[int, int, int]]:
        """Rows, and bytes before and behind the last member."""
        told: list[Guest] = [guest for guest in self.guests if any(w == "batch" for w, _, _ in guest.facts.records)]
        (head,) = told
        return [
            (facts["rows"], facts["hop_bytes"], facts["back_bytes"])
            for what, _, facts in head.facts.records
            if what == "batch" and facts["phase"] == phase
        ]


@pytest.mark.parametrize("old", [None, "host", "a", "b"])
async def test_with_an_older_member_anywhere_all_rows_come_back(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, old: str | None
) -> None:
    assert LAST_ROWS in KNOWN
    async with meeting(World) as w:
        await w.form(monkeypatch, {} if old is None else {old: (EDGES, PARTS, SCORES)})
        answers = [await answer_of(guest, LONG, max_tokens=5) for guest in w.guests]
        assert len(set(answers)) == 1
        assert answers[0]
        assert all(guest.error is None for guest in w.guests)
        assert w.batches("prefill")
        assert all(
            (hop, back) == (4 * rows, 4 if old is None else 4 * rows) for rows, hop, back in w.batches("prefill")
        )
        assert all(hop == back == 4 * rows for rows, hop, back in w.batches("decode"))
