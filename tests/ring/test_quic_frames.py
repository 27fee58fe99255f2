"""The two frames of ordinary packets, against the QUIC library's own reading of them."""

from __future__ import annotations

import itertools
import struct

import pytest
from aioquic.buffer import Buffer  # type: ignore[attr-defined]  # its home; re-exported without saying so
from aioquic.quic.packet import pull_ack_frame, push_ack_frame
from aioquic.quic.rangeset import RangeSet
from hypothesis import given
from hypothesis import strategies as st

from kafila.ring import quic_frames as codec

MOST = (1 << 62) - 1
NUMBERS = st.integers(0, MOST).flatmap(lambda start: st.integers(start, MOST).map(lambda last: range(start, last + 1)))


def by_the_library(payload: bytes) -> tuple[RangeSet, int, int]:
    buffer = Buffer(data=payload)
    buffer.seek(1)
    acknowledged, delay = pull_ack_frame(buffer)
    return acknowledged, delay, buffer.tell()


@given(NUMBERS, st.integers(0, (1 << 30) - 1), st.binary(max_size=30))
def test_an_acknowledgement_is_read_as_it_was_written_here_and_by_the_library(
    numbers: range, delay: int, rest: bytes
) -> None:
    frame = codec.ack_frame(numbers, delay)
    assert len(frame) == codec.ACK_BYTES
    assert codec.read_ack(frame + rest) == by_the_library(frame + rest) == (RangeSet([numbers]), delay, codec.ACK_BYTES)


@pytest.mark.parametrize(("delay", "told"), [(-1, 0), (1 << 30, (1 << 30) - 1), (1 << 70, (1 << 30) - 1)])
def test_a_delay_that_cannot_be_told_is_cut(delay: int, told: int) -> None:
    assert codec.read_ack(codec.ack_frame(range(5), delay))[1] == told


@given(
    st.lists(st.integers(0, 5000), min_size=2, max_size=12, unique=True), st.integers(0, 9000), st.binary(max_size=30)
)
def test_acknowledgements_of_any_other_shape_are_read_as_well(edges: list[int], delay: int, rest: bytes) -> None:
    edges.sort()
    ranges = RangeSet([range(*pair) for pair in zip(edges[::2], edges[1::2], strict=False)])
    buffer = Buffer(capacity=200)
    buffer.push_uint_var(codec.ACK)
    push_ack_frame(buffer, ranges, delay, capacity=200)
    assert codec.read_ack(buffer.data + rest) == (ranges, delay, buffer.tell())


@pytest.mark.parametrize("widths", list(itertools.product((1, 2, 4, 8), repeat=4)))
def test_integers_of_an_acknowledgement_may_have_any_length(widths: tuple[int, ...]) -> None:
    def integer(value: int, width: int) -> bytes:
        return (value | (width.bit_length() - 1) << 8 * width - 2).to_bytes(width, "big")

    values = (47, 9, 0, 6)  # largest, delay, further ranges, first range
    payload = bytes((codec.ACK,)) + b"".join(map(integer, values, widths))
    expected = (RangeSet([range(41, 48)]), 9, len(payload))
    assert codec.read_ack(payload + bytes(20)) == by_the_library(payload + bytes(20)) == expected


@given(st.binary(max_size=40))
def test_whatever_begins_like_an_acknowledgement_is_read_as_the_library_reads_it(rest: bytes) -> None:
    _assert_read_alike(bytes((codec.ACK,)) + rest)


@pytest.mark.parametrize("at", [1, 9, 13, 14])
@pytest.mark.parametrize("top_bits", range(4))
def test_a_length_that_is_another_than_ours_is_read_as_such(at: int, top_bits: int) -> None:
    """Where each integer's length is told, any other in its place."""
    frame = bytearray(codec.ack_frame(range(3, 9), 7))
    frame[at] = frame[at] & 0x3F | top_bits << 6
    _assert_read_alike(bytes(frame) + bytes(20))


def _assert_read_alike(payload: bytes) -> None:
    try:
        expected = by_the_library(payload)
    except ValueError:
        with pytest.raises(ValueError):  # noqa: PT011  - the library's words are its own
            codec.read_ack(payload)
    else:
        assert codec.read_ack(payload) == expected


def test_an_acknowledgement_that_is_cut_short_is_damaged() -> None:
    frame = codec.ack_frame(range(3, 9), 7)
    for size in range(1, len(frame)):
        with pytest.raises(ValueError):  # noqa: PT011  - as above
            codec.read_ack(frame[:size])


@given(st.integers(0, 63), st.integers(0, MOST), st.integers(0, (1 << 14) - 1), st.binary(max_size=9))
def test_a_stream_header_is_read_as_it_was_written(stream_id: int, offset: int, size: int, before: bytes) -> None:
    header = codec.stream_header(stream_id, offset, size)
    assert len(header) == codec.STREAM_HEADER_BYTES
    assert codec.read_stream_header(before + header + b"data", len(before)) == (stream_id, offset, size)
    buffer = Buffer(data=header)
    assert [buffer.pull_uint_var() for _ in range(4)] == [0x0E, stream_id, offset, size]


def test_a_stream_frame_of_another_shape_is_none_of_ours() -> None:
    header = codec.stream_header(4, 1000, 20)
    for at, bits in ((0, 0x01), (0, 0x10), (2, 0x80), (2, 0x40), (10, 0x80), (10, 0x40)):
        changed = bytearray(header)
        changed[at] ^= bits
        assert codec.read_stream_header(bytes(changed), 0) is None
    for size in range(len(header)):
        with pytest.raises(struct.error):
            codec.read_stream_header(header[:size], 0)
