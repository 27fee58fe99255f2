from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders

from kafila.errors import UnsupportedModel
from kafila.shard.detokenize import Detokenizer, Pieces
from tests.shard.tokenizers_for_tests import byte_fallback, byte_level, id_of, words

BYTE_LEVEL, BYTE_FALLBACK, UNSTRIPPED, WORDS = byte_level(), byte_fallback(), byte_fallback(strip=False), words()
PIECES = {id(tokenizer): Pieces(tokenizer) for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK, UNSTRIPPED, WORDS)}

TEXTS = st.lists(
    st.sampled_from(
        [
            "hello",
            " ",
            "  ",
            "w",
            "🎉",
            "👩‍👩‍👧",
            "你好",
            "e\u0301",
            "é",
            "\n",
            "世界",
            "<think>",
            "<s>",
            "\ufffd",
            "\x00",
        ]
    )
    | st.text(max_size=4)
).map("".join)


def ids_of(tokenizer: Tokenizer, beyond: int = 3) -> st.SearchStrategy[list[int]]:
    """Any ids at all, also some that no token has."""
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1 + beyond), max_size=40)


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = Detokenizer(PIECES[id(tokenizer)])
    return [*map(stream.feed, ids), stream.finish()]


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, UNSTRIPPED], ids=["level", "fallback", "unstripped"])
@given(text=TEXTS)
def test_a_text_comes_back_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    parts = deltas(tokenizer, ids)
    whole = decoded(tokenizer, ids)
    assert "".join(parts) == whole
    assert sum(part.count("\ufffd") for part in parts) == whole.count("\ufffd") == text.count("\ufffd")
    assert parts[-1] == ""


@given(ids_of(BYTE_LEVEL))
def test_byte_level_is_the_whole_decode_of_any_ids(ids: list[int]) -> None:
    assert "".join(deltas(BYTE_LEVEL, ids)) == decoded(BYTE_LEVEL, ids)


@given(ids_of(WORDS))
def test_words_are_the_whole_decode_of_any_ids(ids: list[int]) -> None:
    assert "".join(deltas(WORDS, ids)) == decoded(WORDS, ids)


@pytest.mark.parametrize("tokenizer", [BYTE_FALLBACK, UNSTRIPPED], ids=["stripped", "unstripped"])
@given(data=st.data())
def test_byte_fallback_is_the_whole_decode_where_its_bytes_are_utf8(tokenizer: Tokenizer, data: st.DataObject) -> None:
    as_bytes = st.characters(exclude_categories=["Cs"]).map(
        lambda letter: [id_of(tokenizer, f"<0x{byte:02X}>") for byte in letter.encode()]
    )
    byte_ids = range(1, 257)
    other = st.integers(0, tokenizer.get_vocab_size() + 2).filter(lambda number: number not in byte_ids)
    ids = [number for part in data.draw(st.lists(as_bytes | other.map(lambda n: [n]))) for number in part]
    assert "".join(deltas(tokenizer, ids)) == decoded(tokenizer, ids)


@given(st.lists(st.integers(0, 255), max_size=12))
def test_a_row_of_bytes_is_decoded_as_utf8_with_replacements(row: list[int]) -> None:
    ids = [id_of(BYTE_FALLBACK, f"<0x{byte:02X}>") for byte in row]
    end = id_of(BYTE_FALLBACK, "a")
    assert "".join(deltas(UNSTRIPPED, [*ids, end])) == bytes(row).decode(errors="replace") + "a"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@pytest.mark.parametrize("text", ["🎉", "👩‍👩‍👧", "好", "e\u0301", "한국어"])
def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > len(text) or text == "e\u0301"
    shown = ""
    for part in deltas(tokenizer, ids):
        shown += part
        assert text.startswith(shown)
    assert shown == text


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
def test_a_text_cut_within_a_character_ends_in_a_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🎉", add_special_tokens=False).ids
    parts = deltas(tokenizer, ids[:-1])
    assert "".join(parts[:-1]) == "a"
    assert parts[-1] == "\ufffd"


def test_only_the_first_space_of_the_text_is_dropped() -> None:
    space, word = id_of(BYTE_FALLBACK, "▁"), id_of(BYTE_FALLBACK, "▁w")
    special = id_of(BYTE_FALLBACK, "<s>")
    assert deltas(BYTE_FALLBACK, [special, word, word]) == ["", "w", " w", ""]
    assert deltas(BYTE_FALLBACK, [space, space, word]) == ["", " ", " w", ""]
    assert deltas(BYTE_FALLBACK, [id_of(BYTE_FALLBACK, "a"), word]) == ["a", " w", ""]
    assert deltas(UNSTRIPPED, [word]) == [" w", ""]


def test_special_tokens_do_not_show_and_do_not_cut_characters() -> None:
    first, *rest = BYTE_LEVEL.encode("🎉", add_special_tokens=False).ids
    ids = [first, id_of(BYTE_LEVEL, "<|im_end|>"), *rest]
    assert "".join(deltas(BYTE_LEVEL, ids)) == "🎉"
    assert deltas(BYTE_LEVEL, [id_of(BYTE_LEVEL, "<think>")]) == ["<think>", ""]


def test_texts_do_not_mix() -> None:
    pieces = PIECES[id(BYTE_LEVEL)]
    one, other = Detokenizer(pieces), Detokenizer(pieces)
    ids, other_ids = (BYTE_LEVEL.encode(text, add_special_tokens=False).ids for text in ("🎉", "🦊"))
    parts = [(one.feed(a), other.feed(b)) for a, b in zip(ids, other_ids, strict=True)]
    assert ["".join(column) for column in zip(*parts, strict=True)] == ["🎉", "🦊"]


def test_the_work_does_not_grow_with_the_text() -> None:
    asked = []

    class Counting:
        decoder = BYTE_LEVEL.decoder
        get_added_tokens_decoder: Callable[[], object] = staticmethod(BYTE_LEVEL.get_added_tokens_decoder)

        def id_to_token(self, token_id: int) -> str | None:
            asked.append(token_id)
            token: str | None = BYTE_LEVEL.id_to_token(token_id)
            return token

    stream = Detokenizer(Pieces(Counting()))  # type: ignore[arg-type]  # stands in for a Tokenizer
    ids = BYTE_LEVEL.encode("hello 🎉 " * 50, add_special_tokens=False).ids
    assert "".join(map(stream.feed, ids)) == "hello 🎉 " * 50
    assert sorted(asked) == sorted(set(ids))


def test_decode_is_the_concatenation() -> None:
    ids = BYTE_LEVEL.encode("hello 🎉", add_special_tokens=False).ids
    assert PIECES[id(BYTE_LEVEL)].decode(ids) == "hello 🎉"
    assert PIECES[id(BYTE_LEVEL)].decode(ids[:-1]) == "hello \ufffd"


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]), "Fuse, Replace"),
        (decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()]), "regular expression"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip at the end"),
        (decoders.Sequence([decoders.Strip(" ", 1, 0)]), "Strip"),
    ],
)
def test_decoders_that_tokens_cannot_be_decoded_apart_by_are_declined(decoder: decoders.Decoder, named: str) -> None:
    tokenizer = words()
    tokenizer.decoder = decoder
    with pytest.raises(UnsupportedModel, match=named):
        Pieces(tokenizer)
