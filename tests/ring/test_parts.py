"""Messages about parts of files: what is written is read, and nothing else is."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import ProtocolError
from kafila.ring.parts import (
    MAX_ETAG_BYTES,
    MAX_NAME_BYTES,
    MAX_PIECE_BYTES,
    Piece,
    Refuse,
    Want,
    decode_parts,
    encode_parts,
    is_parts,
)
from kafila.types import FilePart, FilePiece, Withheld

words = st.text(st.characters(codec="utf-8"), max_size=40)
numbers = st.integers(0, 2**32 - 1)
layouts = st.one_of(st.just(b""), st.binary(min_size=32, max_size=32).filter(any))


@st.composite
def wants(draw: st.DrawFn) -> Want:
    start = draw(st.integers(0, 2**63 - 1))
    end = draw(st.integers(start + 1, 2**63))
    file = draw(words.filter(bool))
    size = draw(st.integers(0, 2**63))
    return Want(draw(numbers), FilePart(file, start, end, size, draw(words), draw(words), draw(layouts)))


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    data, start = draw(st.binary(max_size=200)), draw(st.integers(0, 2**62))
    size = draw(st.integers(start + len(data), 2**63))
    return Piece(draw(numbers), FilePiece(start, size, draw(words), data), sha256(data).digest())


messages = st.one_of(wants(), pieces(), st.builds(Refuse, numbers, st.sampled_from(Withheld)))


@given(messages)
def test_what_is_written_is_read(message: Want | Piece | Refuse) -> None:
    data = encode_parts(message)
    assert is_parts(data)
    assert decode_parts(data) == message


@given(st.one_of(wants(), st.builds(Refuse, numbers, st.sampled_from(Withheld))))
def test_every_truncation_is_refused(message: Want | Refuse) -> None:
    data = encode_parts(message)
    for length in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_parts(data[:length])
    with pytest.raises(ProtocolError):
        decode_parts(data + b"\0")


@given(pieces())
def test_a_piece_that_is_cut_short_is_refused_or_not_whole(piece: Piece) -> None:
    data = encode_parts(piece)
    for length in range(len(data)):
        try:
            read = decode_parts(data[:length])
        except ProtocolError:
            continue
        assert isinstance(read, Piece)
        assert not read.whole


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda tail: b"\3\1" + tail), st.just(b"")))
def test_arbitrary_bytes_are_read_as_written_or_refused(data: bytes) -> None:
    try:
        message = decode_parts(data)
    except ProtocolError:
        return
    assert encode_parts(message) == data


def test_what_is_too_long_is_neither_written_nor_read() -> None:
    part = FilePart("f" * MAX_NAME_BYTES, 0, 1, etag="e" * MAX_ETAG_BYTES)
    assert decode_parts(encode_parts(Want(1, part))) == Want(1, part)
    for bad in (FilePart("f" * (MAX_NAME_BYTES + 1), 0, 1), FilePart("f", 0, 1, etag="e" * (MAX_ETAG_BYTES + 1))):
        with pytest.raises(ProtocolError, match="longer than"):
            encode_parts(Want(1, bad))
    data = bytes(MAX_PIECE_BYTES + 1)
    with pytest.raises(ProtocolError, match="longer than allowed"):
        decode_parts(encode_parts(Piece(1, FilePiece(0, len(data), "", data), sha256(data).digest())))


def test_a_piece_beyond_its_file_and_a_wish_for_nothing_are_refused() -> None:
    for bad in (
        Piece(1, FilePiece(3, 4, "", b"ab"), bytes(32)),
        Want(1, FilePart("f", 4, 4)),
        Want(1, FilePart("", 0, 1)),
    ):
        with pytest.raises(ProtocolError):
            decode_parts(encode_parts(bad))


def test_a_name_that_is_no_text_names_nothing_that_anybody_has() -> None:
    read = decode_parts(encode_parts(Want(1, FilePart("\ud800.safetensors", 0, 1))))
    assert isinstance(read, Want)
    assert read.part.file == "?.safetensors"
