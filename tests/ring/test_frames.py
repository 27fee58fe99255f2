from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import ProtocolError
from kafila.ring.frames import (
    ITEM_BYTES,
    MAX_SEGMENTS,
    Activation,
    Ask,
    Cancel,
    Control,
    Edge,
    Scores,
    Stats,
    Text,
    decode_activation,
    decode_control,
    decode_scores,
    encode_activation,
    encode_control,
    encode_scores,
    is_scores,
)
from kafila.types import Best, FinishReason, Message, NodeId, PathKind, Question, Sampling, Segment, SpelledLogprobs

node_ids = st.binary(min_size=8, max_size=8).map(NodeId)
counts = st.integers(0, 2**31)
seconds = st.floats(0, 1e6)
segments = st.builds(Segment, st.integers(0, 65535), st.integers(0, 2**32 - 1), st.integers(1, 6), st.booleans())
samplings = st.builds(
    Sampling,
    seconds,
    counts,
    seconds,
    seconds,
    counts,
    seconds,
    seconds,
    seconds,
    st.lists(st.tuples(counts, seconds), max_size=3).map(tuple),
    counts,
)
questions = st.builds(
    Question,
    st.lists(st.builds(Message, st.text(), st.text(), st.text()), max_size=3).map(tuple),
    st.none() | st.text(),
    samplings,
    counts,
    st.lists(st.text(), max_size=3).map(tuple),
    st.text(),
    st.text(),
    st.booleans(),
)
tops = st.lists(st.tuples(st.binary(max_size=4), seconds), max_size=3).map(tuple)
logprobs = st.lists(st.builds(SpelledLogprobs, st.binary(max_size=4), seconds, tops), max_size=3).map(tuple)


@st.composite
def activations(draw: st.DrawFn) -> Activation:
    parts = tuple(draw(st.lists(segments, min_size=1, max_size=4)))
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    hidden = draw(st.integers(1, 8))
    size = sum(part.length for part in parts) * hidden * ITEM_BYTES[dtype]
    return Activation(
        epoch=draw(st.integers(0, 2**32 - 1)),
        batch=draw(st.integers(0, 2**32 - 1)),
        dtype=dtype,
        hidden=hidden,
        segments=parts,
        payload=draw(st.binary(min_size=size, max_size=size)),
        hop_us=tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=5))),
        score=draw(st.booleans()),
    )


bests = st.builds(Best, st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 2**32 - 1))
scores = st.builds(
    Scores,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.lists(bests, min_size=1, max_size=4).map(tuple),
)


controls: st.SearchStrategy[Control] = st.one_of(
    st.builds(
        Ask,
        st.text(),
        node_ids,
        questions,
    ),
    st.builds(
        Text,
        st.text(),
        node_ids,
        st.text(),
        st.none() | st.sampled_from(FinishReason),
        st.text(),
        counts,
        counts,
        counts,
        seconds,
        seconds,
        seconds,
        logprobs,
        counts,
    ),
    st.builds(Cancel, st.text(), node_ids),
    st.builds(Stats, node_ids, st.lists(seconds).map(tuple), seconds),
    st.builds(Edge, node_ids, st.sampled_from(PathKind), st.none() | seconds),
)


@given(activations())
def test_an_activation_survives_the_wire(frame: Activation) -> None:
    assert decode_activation(encode_activation(frame)) == frame


@given(activations())
def test_no_truncated_activation_is_taken_for_whole(frame: Activation) -> None:
    data = encode_activation(frame)
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_activation(data[:length])
    with pytest.raises(ProtocolError):
        decode_activation(data + b"\0")


def test_who_does_not_know_scores_reads_every_activation_that_asks_for_none() -> None:
    frame = Activation(1, 2, "float32", 1, (Segment(0, 0, 1, True),), bytes(4), (7,))
    plain, asking = encode_activation(frame), encode_activation(replace(frame, score=True))
    assert (plain[0], asking[0]) == (0x01, 0x04)
    assert plain[1:] == asking[1:]


@given(scores)
def test_scores_survive_the_wire_and_are_told_from_all_else(frame: Scores) -> None:
    data = encode_scores(frame)
    assert is_scores(data)
    assert decode_scores(data) == frame
    for decode in (decode_activation, decode_control):
        with pytest.raises(ProtocolError):
            decode(data)


@given(scores)
def test_no_truncated_scores_are_taken_for_whole(frame: Scores) -> None:
    data = encode_scores(frame)
    for wrong in [*(data[:length] for length in range(len(data))), data + b"\0", data + bytes(8)]:
        with pytest.raises(ProtocolError):
            decode_scores(wrong)


@pytest.mark.parametrize("logit", [math.inf, -math.inf, math.nan])
def test_a_score_is_a_number(logit: float) -> None:
    with pytest.raises(ProtocolError):
        decode_scores(encode_scores(Scores(0, 0, (Best(1.0, 2), Best(logit, 3)))))


def test_scores_are_of_a_batch_that_can_be() -> None:
    for count in (0, MAX_SEGMENTS + 1):
        with pytest.raises(ProtocolError):
            decode_scores(encode_scores(Scores(0, 0, (Best(1.0, 2),) * count)))
    assert len(decode_scores(encode_scores(Scores(0, 0, (Best(1.0, 2),) * MAX_SEGMENTS))).best) == MAX_SEGMENTS


@given(
    st.binary(max_size=200)
    | st.binary(max_size=200).map(lambda tail: b"\x01\x00\x00\x01" + tail)
    | st.binary(max_size=200).map(lambda tail: b"\x05\x00\x00\x00\x01\x00\x01" + tail)
)
def test_arbitrary_bytes_are_a_frame_or_a_protocol_error(data: bytes) -> None:
    assert not is_scores(b"")
    for decode in (decode_activation, decode_control, decode_scores):
        with contextlib.suppress(ProtocolError):
            decode(data)


@given(controls)
def test_a_control_message_survives_the_wire(message: Control) -> None:
    assert decode_control(encode_control(message)) == message


@given(controls)
def test_no_truncated_control_message_is_taken_for_whole(message: Control) -> None:
    data = encode_control(message)
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_control(data[:length])


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"kind":"cancel"}',
        '{"kind":"cancel","request":7,"asker":"00"}',
        '{"kind":"cancel","request":"a","asker":"zz"}',
        '{"kind":"nonsense"}',
        '{"kind":"edge","origin":"00","path":"by pigeon"}',
        '{"kind":"edge","origin":"00","path":"direct","rtt_s":"1"}',
        "[" * 100_000,
    ],
)
def test_json_of_the_wrong_shape_is_a_protocol_error(text: str) -> None:
    with pytest.raises(ProtocolError):
        decode_control(b"\x02" + text.encode())
