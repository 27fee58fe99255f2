"""Stages and head round an in-memory ring with exact stand-in shards: answers, isolation, faults."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import DeviceError
from kafila.head import Head
from kafila.question import conversation
from kafila.ring.frames import (
    Activation,
    Ask,
    Cancel,
    Stats,
    Text,
    decode_activation,
    encode_activation,
    encode_control,
)
from kafila.serve import BatchDone, Broken, Lately, Place, Said, Send, Stage
from kafila.shard.worker import Failed, Forwarded
from kafila.types import FinishReason, NodeId, Question, Sampling, Segment
from kafila.visit import Visit
from tests.standin import WORDS, Letters, StandInShard, solo_tokens

CONTEXT = 40
SLOTS = 3


def node(n: int) -> NodeId:
    return NodeId(bytes([n + 1] * 8))


class Ring:
    """Members joined by ordered queues. ``step`` makes one thing happen: a job is done or a message arrives.

    ``guests`` are linked with the head, each by a queue either way, and stand behind the members in every list.
    """

    def __init__(
        self, members: int, guests: int = 0, percent: int = 0, vocab: int = 0, *, last_rows: bool = True
    ) -> None:
        ids = tuple(node(n) for n in range(members))
        plain = [Place(me, ids, 1, 1, "float32", SLOTS, CONTEXT) for me in ids]
        places = [replace(place, scored_percent=percent, vocab=vocab, last_rows=last_rows) for place in plain]
        self.stages: list[Stage] = [Head(places[0], Letters(), 0.0), *map(Stage, places[1:])]
        self.head = self.stages[0]
        self.members = members
        self.guests = [node(n) for n in range(members, members + guests)]
        self.shards = [StandInShard(salt, percent) for salt in range(members)]
        self.wires: list[deque[Send]] = [deque() for _ in range(members + 2 * guests)]
        for guest in self.guests:
            assert isinstance(self.head, Head)
            self.head.guest_came(guest)
            self.stages.append(Visit(replace(places[0], me=guest)))
        self.texts: dict[str, list[Text]] = {}
        self.batches: list[BatchDone] = []
        self.stats: list[Stats] = []
        self.broken: list[str] = []
        self.now = 0.0

    def collect(self) -> None:
        for n, stage in enumerate(self.stages):
            while (send := stage.next_send()) is not None:
                self.wires[self._wire(n, send)].append(send)
            while (event := stage.next_event()) is not None:
                match event:
                    case Said(text):
                        assert text.asker == stage.place.me
                        self.texts.setdefault(text.request, []).append(text)
                    case BatchDone():
                        self.batches.append(event)
                    case Lately(stats):
                        self.stats.append(stats)
                    case Broken(text):
                        self.broken.append(text)

    def step(self, pick: int = 0) -> bool:
        self.collect()
        self.now += 0.01
        choices = [(n, job) for n, stage in enumerate(self.stages) if (job := stage.next_job()) is not None]
        assert all(n < self.members for n, _ in choices), "a guest computes nothing"
        if choices:
            # Workers keep the order of their jobs, so each does its own at once; what varies is when messages arrive.
            for n, job in choices:
                self.stages[n].result(self.shards[n].do(job), self.now)
            return True
        busy = [n for n, wire in enumerate(self.wires) if wire]
        if not busy:
            return False
        n = busy[pick % len(busy)]
        send = self.wires[n].popleft()
        if n < len(self.stages):
            self.stages[n].receive(send.bulk, send.data, self.now)
        else:  # from a guest to the head
            assert isinstance(self.head, Head)
            self.head.receive_guest(node(n - len(self.guests)), send.data, self.now)
        return True

    def _wire(self, n: int, send: Send) -> int:
        """To the next member, to a guest, or, behind all those, from a guest to the head."""
        if n >= self.members:
            return n + len(self.guests)
        return (n + 1) % self.members if send.guest is None else self.members + self.guests.index(send.guest)

    def run(self, picks: Sequence[int] = ()) -> None:
        for pick in picks:
            self.step(pick)
        for _ in range(20_000):
            if not self.step():
                return
        raise AssertionError("the ring never came to rest")

    def answer(self, request: str) -> str:
        return "".join(text.delta for text in self.texts.get(request, ()))

    def finish(self, request: str) -> FinishReason | None:
        return self.texts[request][-1].finish


def ask(n: int, asker: int, words: str, **options: object) -> Ask:
    question = Question(conversation(("user", words)), **options)  # type: ignore[arg-type]  # test shorthand
    return Ask(f"{asker}-{n}", node(asker), question)


def solo(words: str, members: int, sampling: Sampling, max_tokens: int) -> str:
    prompt = [WORDS.index(word) for word in words.split()]
    return "".join(WORDS[t] for t in solo_tokens(prompt, range(members), sampling, max_tokens, CONTEXT))


questions = st.tuples(
    st.integers(0, 5),
    st.lists(st.sampled_from(WORDS[1:]), min_size=1, max_size=12).map(" ".join),
    st.builds(
        Sampling,
        st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 5),
        presence_penalty=st.sampled_from([0.0, 1.0]),
        logprobs=st.integers(0, 2),
    ),
    st.integers(0, 9),
)


@given(
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from([0, 10, 50, 75]),
    st.booleans(),
    st.lists(questions, min_size=1, max_size=7),
    st.lists(st.integers(0, 9), max_size=80),
)
def test_every_answer_is_its_solo_answer_whatever_else_is_asked(
    members: int,
    guests: int,
    percent: int,
    last_rows: bool,
    asked: list[tuple[int, str, Sampling, int]],
    picks: list[int],
) -> None:
    ring = Ring(members, guests, percent, last_rows=last_rows)
    for n, (asker, words, sampling, max_tokens) in enumerate(asked):
        who = asker % (members + guests)
        ring.stages[who].ask(ask(n, who, words, sampling=sampling, max_tokens=max_tokens), ring.now)
        for pick in picks[n * 5 : n * 5 + 5]:
            ring.step(pick)
    ring.run(picks)
    assert not ring.broken
    for n, (asker, words, sampling, max_tokens) in enumerate(asked):
        request = f"{asker % (members + guests)}-{n}"
        assert ring.answer(request) == solo(words, members, sampling, max_tokens)
        assert ring.finish(request) is not None
        reported = [logprobs for text in ring.texts[request] for logprobs in text.logprobs]
        assert "".join(one.token.decode() for one in reported) == ring.answer(request) * bool(sampling.logprobs)
        assert all(len(one.top) == sampling.logprobs for one in reported)


@given(st.integers(1, 3), st.integers(0, 60), st.lists(st.integers(0, 9), max_size=60))
def test_a_cancelled_answer_frees_its_place_and_disturbs_nobody(members: int, after: int, picks: list[int]) -> None:
    ring = Ring(members)
    for n in range(SLOTS):
        ring.stages[-1].ask(ask(n, members - 1, "a b c"), ring.now)
    ring.stages[0].ask(ask(9, 0, "d e"), ring.now)
    for step in range(after):
        ring.step(picks[step % len(picks)] if picks else 0)
    for n in range(SLOTS):
        ring.stages[-1].cancel(f"{members - 1}-{n}", ring.now)
    ring.run(picks)
    assert ring.answer("0-9") == solo("d e", members, Sampling(), 0)
    for n in range(SLOTS):
        assert solo("a b c", members, Sampling(), 0).startswith(ring.answer(f"{members - 1}-{n}"))
        assert ring.finish(f"{members - 1}-{n}") is not None


def test_nobody_can_cancel_for_another() -> None:
    ring = Ring(3)
    ring.stages[1].ask(ask(0, 1, "a b c"), 0.0)
    ring.stages[2].cancel("1-0", 0.0)
    ring.run()
    assert ring.answer("1-0") == solo("a b c", 3, Sampling(), 0)


def test_a_stop_string_ends_the_answer_before_it() -> None:
    whole = solo("a b", 2, Sampling(), 0)
    assert len(whole) > 2, "choose other words"
    ring = Ring(2)
    ring.stages[1].ask(ask(0, 1, "a b", stop=(whole[2],)), 0.0)
    ring.run()
    assert ring.answer("1-0") == whole[: whole.index(whole[2])]
    assert ring.finish("1-0") is FinishReason.STOP


def test_what_a_template_opens_belongs_to_the_answer_of_a_conversation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "opening", lambda self, prompt: "<think>")
    monkeypatch.setattr(Letters, "prompt", lambda self, question: [0, 1])
    ring = Ring(2)
    ring.stages[1].ask(ask(0, 1, "a b"), 0.0)
    ring.stages[1].ask(Ask("1-1", node(1), Question((), prompt="a b")), 0.0)
    ring.run()
    assert ring.answer("1-0") == "<think>" + ring.answer("1-1")
    assert ring.answer("1-1") == solo(f"{WORDS[0]} {WORDS[1]}", 2, Sampling(), 0)


def test_a_conversation_longer_than_the_context_is_refused_in_words() -> None:
    ring = Ring(2)
    ring.stages[1].ask(ask(0, 1, "a " * CONTEXT), 0.0)
    ring.run()
    (text,) = ring.texts["1-0"]
    assert text.finish is FinishReason.CONTEXT
    assert "--context" in text.note


def test_what_the_template_refuses_is_told_to_the_asker() -> None:
    ring = Ring(2)
    ring.stages[1].ask(ask(0, 1, ""), 0.0)
    ring.run()
    assert ring.texts["1-0"][0].note == "nothing was asked"


def test_a_waiting_question_is_told_its_place() -> None:
    ring = Ring(1)
    for n in range(SLOTS + 2):
        ring.stages[0].ask(ask(n, 0, "a"), 0.0)
    ring.collect()
    assert [ring.texts[f"0-{n}"][0].note for n in (SLOTS, SLOTS + 1)] == [
        "waiting: 1 in the queue",
        "waiting: 2 in the queue",
    ]
    ring.run()


def test_every_member_hears_what_the_head_measured() -> None:
    ring = Ring(3)
    assert len(solo("c d e", 3, Sampling(), 0)) > 2, "choose other words"
    ring.stages[1].ask(ask(0, 1, "c d e"), 0.0)
    ring.run()
    assert len(ring.stats) >= 3
    assert {stats.stage_s for stats in ring.stats[-3:]} == {(1.1e-3, 1e-3, 1e-3)}
    assert all(len(batch.stage_s) == 3 and batch.circuit_s > 0 for batch in ring.batches)


FRAME = Activation(1, 0, "float32", 1, (Segment(0, 0, 1, True),), bytes(4))


@pytest.mark.parametrize(
    ("bulk", "data"),
    [
        (True, b"nonsense"),
        (False, b"nonsense"),
        (True, encode_activation(Activation(2, 0, "float32", 1, FRAME.segments, bytes(4)))),
        (True, encode_activation(Activation(1, 0, "float16", 1, FRAME.segments, bytes(2)))),
        (True, encode_activation(Activation(1, 0, "float32", 2, FRAME.segments, bytes(8)))),
        (True, encode_activation(Activation(1, 0, "float32", 1, (Segment(SLOTS, 0, 1, True),), bytes(4)))),
        (True, encode_activation(Activation(1, 0, "float32", 1, (Segment(0, CONTEXT, 1, True),), bytes(4)))),
        (False, encode_control(Text("x", NodeId(b"stranger"), "hello"))),
        (False, encode_control(Ask("x", NodeId(b"stranger"), Question()))),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_frame_that_does_not_fit_is_refused_where_it_enters(place: int, bulk: bool, data: bytes) -> None:
    ring = Ring(2)
    ring.stages[place].receive(bulk, data, 0.0)
    ring.collect()
    (blame,) = ring.broken
    assert blame.startswith("the previous member of the ring sent nonsense")
    assert ring.stages[place].next_job() is None


def test_the_head_refuses_batches_it_did_not_send_or_that_missed_a_member() -> None:
    ring = Ring(3)
    ring.stages[0].receive(True, encode_activation(FRAME), 0.0)
    ring.stages[0].ask(ask(0, 0, "a"), 0.0)
    ring.step()
    ring.collect()
    sent = decode_activation(ring.wires[1].popleft().data)
    ring.stages[0].receive(True, encode_activation(sent), 0.0)
    ring.collect()
    assert [("not sent" in text, "instead of all" in text) for text in ring.broken] == [(True, False), (False, True)]


def test_a_device_that_fails_says_so() -> None:
    ring = Ring(2)
    ring.stages[1].result(Failed(0, DeviceError("cpu failed: out of memory")), 0.0)
    ring.collect()
    assert ring.broken == ["cpu failed: out of memory"]


def test_a_result_for_a_batch_nobody_sent_is_a_bug_that_shows() -> None:
    with pytest.raises(KeyError):
        Ring(2).stages[1].result(Forwarded(5, b"", "float32", 0.0), 0.0)


def test_a_member_cannot_ask_in_the_name_of_the_one_it_sends_to() -> None:
    ring = Ring(2)
    ring.stages[1].receive(False, encode_control(Cancel("1-0", node(1))), 0.0)
    ring.collect()
    assert ring.broken


def test_a_guest_speaks_for_itself_alone_and_nonsense_of_its_changes_nothing() -> None:
    ring = Ring(2, guests=1)
    head, guest, member = ring.head, node(2), node(1)
    assert isinstance(head, Head)
    ring.stages[1].ask(ask(0, 1, "a b"), 0.0)
    for data in (
        encode_control(Cancel("1-0", member)),
        encode_control(Cancel("1-0", guest)),
        encode_control(ask(1, 1, "c d")),
        encode_control(Text("1-0", member, "not the head's word")),
        encode_control(Stats(member, (), 0.0)),
        b"",
        b"\x01nonsense",
    ):
        head.receive_guest(guest, data, 0.0)
    head.receive_guest(NodeId(b"stranger"), encode_control(Ask("x", NodeId(b"stranger"), Question())), 0.0)
    ring.run()
    assert not ring.broken
    assert list(ring.texts) == ["1-0"]
    assert ring.answer("1-0") == solo("a b", 2, Sampling(), 0)


@pytest.mark.parametrize(
    "data", [encode_control(Ask("x", node(0), Question())), encode_control(Text("x", node(0), "")), b""]
)
def test_a_guest_takes_nothing_that_is_anothers(data: bytes) -> None:
    ring = Ring(1, guests=1)
    ring.stages[1].receive(False, data, 0.0)
    ring.collect()
    assert ring.broken


@given(st.integers(0, 60), st.lists(st.integers(0, 9), max_size=60))
def test_a_guest_that_leaves_frees_its_slots_at_once(after: int, picks: list[int]) -> None:
    ring = Ring(2, guests=1)
    for n in range(SLOTS + 2):
        ring.stages[2].ask(ask(n, 2, "a b c"), 0.0)
    for step in range(after):
        ring.step(picks[step % len(picks)] if picks else 0)
    assert isinstance(ring.head, Head)
    ring.head.guest_left(node(2), ring.now)
    ring.stages[1].ask(ask(0, 1, "d e"), ring.now)
    ring.run(picks)
    assert not ring.broken
    assert ring.answer("1-0") == solo("d e", 2, Sampling(), 0)
    assert ring.texts["1-0"][-1].queue_s == 0.0, "it waited for somebody who has left"


def test_who_waits_hears_when_the_queue_moves() -> None:
    ring = Ring(1)
    for n in range(SLOTS + 3):
        ring.stages[0].ask(ask(n, 0, "a b", max_tokens=2), 0.0)
    ring.run()
    places = [int(text.note.split()[1]) for text in ring.texts[f"0-{SLOTS + 2}"] if text.note]
    assert places[0] == 3
    assert places == sorted(set(places), reverse=True)
    assert len(places) > 1


def test_a_conversation_that_outgrew_the_context_is_answered_without_its_oldest_turns() -> None:
    ring = Ring(2)
    long = [("user", "a b c d e f g h"), ("assistant", "b c d e f g h a")] * 3
    told = conversation(*long, ("user", "c d e"))
    ring.stages[1].ask(Ask("1-0", node(1), Question(told, max_tokens=3)), 0.0)
    ring.stages[1].ask(Ask("1-1", node(1), Question(told, max_tokens=3, rolling=True)), 0.0)
    ring.run()
    assert ring.finish("1-0") is FinishReason.CONTEXT
    assert ring.texts["1-1"][-1].left_out == 4  # two quarters of 40 tokens have to go, in whole turns of 16
    asked = " ".join(message.content for message in told[4:])
    assert ring.answer("1-1") == solo(asked, 2, Sampling(), 3)
