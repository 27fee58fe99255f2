from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import ProtocolError
from kafila.ring import messages
from kafila.ring.messages import MAX_MESSAGE_BYTES, MessageReader, frame_message


@given(st.lists(st.binary(max_size=300)), st.data())
def test_messages_come_back_whole_and_in_order_however_they_are_cut(sent: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame_message, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    reader, received = MessageReader(), list[bytes]()
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += reader.feed(stream[start:stop])
    assert received == sent


@given(st.binary(max_size=40))
def test_every_truncation_waits_for_the_rest(message: bytes) -> None:
    framed = frame_message(message)
    for size in range(len(framed)):
        reader = MessageReader()
        assert reader.feed(framed[:size]) == []
        assert reader.feed(framed[size:]) == [message]


@given(st.lists(st.binary(max_size=50)))
def test_arbitrary_bytes_are_messages_or_a_protocol_error(pieces: list[bytes]) -> None:
    reader = MessageReader(1000)
    with suppress(ProtocolError):
        for piece in pieces:
            assert all(len(message) <= 1000 for message in reader.feed(piece))


def test_a_length_over_the_limit_is_refused_when_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="101"):
        MessageReader(100).feed(struct.pack(">I", 101))
    assert MessageReader(100).feed(frame_message(bytes(100))) == [bytes(100)]


def test_a_message_over_the_limit_is_not_framed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_MESSAGE_BYTES == 64 * 2**20
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 10)
    assert frame_message(bytes(10))
    with pytest.raises(ProtocolError, match="11 bytes"):
        frame_message(bytes(11))
