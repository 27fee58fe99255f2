from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from kafila.shard.specials import Specials
from tests.shard.tokenizers_for_tests import SPECIALS, byte_fallback, byte_level, id_of, unigram, words

KINDS: dict[str, Tokenizer] = {make.__name__: make() for make in (byte_level, byte_fallback, unigram, words)}
BY_KIND = {kind: Specials(tokenizer) for kind, tokenizer in KINDS.items()}

JSON = st.recursive(
    st.none() | st.integers() | st.lists(st.sampled_from([*SPECIALS, "one", " ", "<"])).map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
)


def unmarked(value: object, tokens: dict[str, str]) -> object:
    if isinstance(value, str):
        for mark, token in tokens.items():
            value = value.replace(mark, token)
        return value
    if isinstance(value, dict):
        return {key: unmarked(item, tokens) for key, item in value.items()}
    return [unmarked(item, tokens) for item in value] if isinstance(value, list) else value


@given(JSON)
def test_marks_stand_for_what_was_spelled(value: object) -> None:
    quoted = BY_KIND["byte_level"].quote(value)
    assert not any(token in str(quoted.value) for token in SPECIALS)
    assert unmarked(quoted.value, dict(quoted.tokens)) == value


@pytest.mark.parametrize("kind", KINDS)
def test_the_templates_tokens_are_tokens_and_the_persons_are_text(kind: str) -> None:
    tokenizer, specials = KINDS[kind], BY_KIND[kind]
    spelled = specials.quote("one <|im_end|>")
    ids = specials.encode(f"<|im_start|>{spelled.value}<|im_end|>", spelled)
    start, end = id_of(tokenizer, "<|im_start|>"), id_of(tokenizer, "<|im_end|>")
    assert (ids[0], ids[-1]) == (start, end)
    assert not {start, end} & set(ids[1:-1])


@pytest.mark.parametrize("make", [byte_level, byte_fallback, unigram, words])
@pytest.mark.parametrize("text", ["one two", "<|im_start|> one<|im_end|>", "  <s>\ntwo </s> <think>é"])
def test_respelling_changes_no_other_id(make: Callable[[], Tokenizer], text: str) -> None:
    specials = Specials(make())
    mark = specials.quote("<s>")
    whole = specials.encode(text, mark)  # the mark is not in the text: only the respelled tokenizer is tried
    assert whole == specials.encode(text, specials.quote("nothing"))


def test_of_two_special_tokens_the_longer_is_taken() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<s>more", special=True, normalized=False)])
    specials = Specials(tokenizer)
    assert list(specials.quote("<s>more").tokens.values()) == ["<s>more"]
    assert specials.leading("<s>more") == id_of(tokenizer, "<s>more")
    assert specials.leading("<s>mo") == id_of(tokenizer, "<s>")
    assert specials.leading("x<s>") is None


def test_marks_cannot_be_guessed_from_another_session() -> None:
    one, other = (Specials(byte_level()).quote("<s>").value for _ in range(2))
    assert one != other


def test_a_tokenizer_without_special_tokens() -> None:
    specials = Specials(Tokenizer(models.BPE()))
    assert specials.quote("one <s>").tokens == {}
    assert specials.leading("<s>") is None
