from __future__ import annotations

import math
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.errors import UsageError
from kafila.question import MAX_LOGPROBS, MAX_STOPS, check, conversation
from kafila.types import Message, Question, Sampling

HELLO = conversation(("user", "hello"))


@pytest.mark.parametrize(
    "question",
    [
        Question(HELLO),
        Question(prompt=""),
        Question(prompt="once upon"),
        Question((Message("assistant", "", '{"tool_calls": []}'), *HELLO), tools="[]", template_options="{}"),
        Question(HELLO, stop=("a",) * MAX_STOPS, max_tokens=10),
        Question(HELLO, sampling=Sampling(2.0, 40, 0.9, 0.05, -5, 1.1, -2.0, 2.0, ((3, -100.0),), MAX_LOGPROBS)),
        Question(HELLO, sampling=Sampling(seed=2**64 - 1)),
    ],
)
def test_what_can_be_meant_passes(question: Question) -> None:
    check(question)


@pytest.mark.parametrize(
    ("question", "named"),
    [
        (Question(), "conversation"),
        (Question(HELLO, prompt="x"), "conversation"),
        (Question(HELLO, max_tokens=-1), "max_tokens"),
        (Question(prompt="\ud800"), "half a character"),
        (Question((*HELLO, Message("user", "a\udc00b"))), "half a character"),
        (Question(HELLO, stop=("\udfff",)), "half a character"),
        (Question(HELLO, stop=("",)), "stop"),
        (Question(HELLO, stop=("a",) * (MAX_STOPS + 1)), "stop"),
        (Question(HELLO, tools="{}"), "tools"),
        (Question(HELLO, tools="["), "tools"),
        (Question(HELLO, template_options="[" * 100_000), "template_options"),
        (Question((Message("user", "x", "[]"),)), "extra"),
        (Question(HELLO, sampling=Sampling(temperature=-1)), "temperature"),
        (Question(HELLO, sampling=Sampling(temperature=math.nan)), "temperature"),
        (Question(HELLO, sampling=Sampling(temperature=math.inf)), "temperature"),
        (Question(HELLO, sampling=Sampling(top_k=-1)), "top_k"),
        (Question(HELLO, sampling=Sampling(top_p=1.5)), "top_p"),
        (Question(HELLO, sampling=Sampling(min_p=-0.1)), "min_p"),
        (Question(HELLO, sampling=Sampling(seed=2**64)), "seed"),
        (Question(HELLO, sampling=Sampling(repetition_penalty=0)), "repetition_penalty"),
        (Question(HELLO, sampling=Sampling(presence_penalty=math.nan)), "presence_penalty"),
        (Question(HELLO, sampling=Sampling(frequency_penalty=-math.inf)), "frequency_penalty"),
        (Question(HELLO, sampling=Sampling(logit_bias=((1, math.inf),))), "logit_bias"),
        (Question(HELLO, sampling=Sampling(logprobs=MAX_LOGPROBS + 1)), "logprobs"),
    ],
)
def test_what_cannot_be_meant_is_named(question: Question, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check(question)


wild = st.sampled_from([math.nan, math.inf, -math.inf]) | st.floats()


@given(st.builds(Sampling, wild, st.integers(), wild, wild, st.integers(), wild, wild, wild))
def test_whatever_passes_is_finite(sampling: Sampling) -> None:
    try:
        check(Question(HELLO, sampling=sampling))
    except UsageError:
        return
    assert all(math.isfinite(number) for number in astuple(sampling)[:8])
