"""What is left of a conversation that has outgrown the context."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kafila.question import conversation
from kafila.rolling import STEPS, rolled
from kafila.types import Message, Question

CONTEXT = 40


def read(question: Question) -> list[int]:
    """A token a character, and one that begins each message."""
    return [number for message in question.messages for number in (0, *map(ord, message.content))]


talk = st.lists(
    st.tuples(st.sampled_from(["user", "user", "assistant", "tool", "system"]), st.text("abc", max_size=25)),
    max_size=30,
).map(lambda turns: conversation(*turns, ("user", "why?")))


@given(talk, st.integers(0, CONTEXT))
def test_the_newest_turns_are_kept_and_all_that_the_system_says(messages: tuple[Message, ...], most: int) -> None:
    question = Question(messages, max_tokens=most, rolling=True)
    fitted = rolled(question, read, CONTEXT)
    kept = fitted.question.messages
    assert fitted.prompt == tuple(read(fitted.question))
    assert fitted.question == replace(question, messages=kept)
    assert fitted.left_out == len(messages) - len(kept)
    spoken = [one for one in messages if one.role != "system"]
    assert [one for one in kept if one.role != "system"] == spoken[fitted.left_out :]
    assert [one for one in kept if one.role == "system"] == [one for one in messages if one.role == "system"]
    if fitted.left_out:
        assert spoken[fitted.left_out].role == "user"
        room = min(most or CONTEXT, CONTEXT // STEPS)
        only_the_question = sum(one.role == "user" for one in kept) == 1
        assert len(fitted.prompt) + room <= CONTEXT or only_the_question
    else:
        assert fitted.prompt == tuple(read(question))


@given(talk)
def test_nothing_is_left_out_unasked_or_of_what_fits(messages: tuple[Message, ...]) -> None:
    question = Question(messages)
    assert rolled(question, read, CONTEXT).question == question
    asked = replace(question, rolling=True)
    assert rolled(asked, read, len(read(asked)) * 2).question == asked


def test_the_same_turns_are_left_out_until_the_next_step() -> None:
    """So that a cache holds what the next question begins with."""
    messages: tuple[Message, ...] = ()
    begins = []
    for n in range(40):
        messages = (*messages, Message("user", f"q{n:02}"), Message("assistant", f"a{n:02}"))
        asked = Question((*messages, Message("user", "now")), rolling=True)
        begins.append(rolled(asked, read, 100).left_out)
    assert begins == sorted(begins)
    changes = sum(one != other for one, other in pairwise(begins))
    assert changes <= 40 * 8 // (100 // STEPS) + 1
