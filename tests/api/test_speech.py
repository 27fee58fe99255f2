"""Thinking, words and tool calls, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.api.speech import Speaker
from kafila.api.toolcalls import ToolCall

WEATHER = ToolCall("weather", '{"city": "Oslo"}')
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


def told(pieces: Iterable[str], tools: Sequence[str] = ()) -> tuple[str, str, list[ToolCall]]:
    speaker = Speaker(tools)
    speeches = [*map(speaker.feed, pieces), speaker.finish()]
    return (
        "".join(speech.thinking for speech in speeches),
        "".join(speech.words for speech in speeches),
        [call for speech in speeches for call in speech.calls],
    )


def cut(text: str, at: Iterable[int]) -> list[str]:
    points = [0, *sorted({point % (len(text) + 1) for point in at}), len(text)]
    return [text[start:end] for start, end in pairwise(points)]


CASES: list[tuple[str, str, str]] = [
    ("<think>\nI muse.\n</think>\n\nYes", "I muse.", "Yes"),
    ("  \n<think>a b</think>c", "a b", "c"),
    ("<think></think>\nx", "", "x"),
    ("<think>\n\n</think>\n\nx  ", "", "x  "),
    ("<think>never ends  ", "never ends", ""),
    ("[THINK]a[/THINK]b", "a", "b"),
    ("<thinking>a</think>b</thinking>c", "a</think>b", "c"),
    ("<thin", "", "<thin"),
    ("  x <think>y</think>", "", "  x <think>y</think>"),
    ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ("", "", ""),
    (" \n", "", " \n"),
    ("<b>x</b>", "", "<b>x</b>"),
    ("<think>1 < 2 </thin </think>\U0001f42a", "1 < 2 </thin", "\U0001f42a"),
]


@pytest.mark.parametrize(("text", "thinking", "words"), CASES)
def test_thinking(text: str, thinking: str, words: str) -> None:
    assert told([text]) == told(text) == (thinking, words, [])


@given(st.text(), st.lists(st.integers(0, 200)))
def test_text_without_tags_is_untouched(text: str, at: list[int]) -> None:
    if not text.lstrip().startswith(("<", "[")):
        assert told(cut(text, at)) == ("", text, [])


NO_CALLS = ['{"name": "rm", "arguments": {}}', '{"name": ["x"]}', '{"name": "weather", "arguments": 5}', "[]", "5"]

TOOL_CASES: list[tuple[str, str, list[ToolCall]]] = [
    (f"<tool_call>\n{CALL}\n</tool_call>", "", [WEATHER]),
    (f"Look.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n", "Look.", [WEATHER, WEATHER]),
    (f"<tool_call>{CALL}", "", [WEATHER]),
    (f"<tool_call>{CALL}</tool_call> done", " done", [WEATHER]),
    ("<tool_call>{oops</tool_call>x", "<tool_call>{oops</tool_call>x", []),
    ("<tool_call>{oops", "<tool_call>{oops", []),
    *[(f"<tool_call>{none}</tool_call>", f"<tool_call>{none}</tool_call>", []) for none in NO_CALLS],
    ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>', "", [WEATHER]),
    ('{"name": "weather", "parameters": {"city": "Oslo"}}', "", [WEATHER]),
    (f'<|python_tag|>{CALL}; {CALL}', "", [WEATHER, WEATHER]),
    ('{"name": "weather", "parameters": "oops"}', '{"name": "weather", "parameters": "oops"}', []),
    ('{"answer": 42}', '{"answer": 42}', []),
    (f"{CALL} and more", f"{CALL} and more", []),
    ('{"name": "weather"}', "", [ToolCall("weather", "{}")]),
    ("  plain <tool words ", "  plain <tool words ", []),
    ("<", "<", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "calls"), TOOL_CASES)
def test_tool_calls(text: str, words: str, calls: list[ToolCall]) -> None:
    assert told([text], ["weather"]) == told(text, ["weather"]) == ("", words, calls)


WRITTEN = st.sampled_from([case[0] for case in (*CASES, *TOOL_CASES)]) | st.text(alphabet='<tool_cal>{}"/ ax\n')


@given(st.lists(WRITTEN, max_size=3).map("".join), st.lists(st.integers(0, 400)))
def test_how_it_is_cut_changes_nothing(text: str, at: list[int]) -> None:
    assert told(cut(text, at), ["weather"]) == told([text], ["weather"])


@given(
    st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists)), st.lists(st.integers())
)
def test_arguments_come_back(arguments: dict[str, object], at: list[int]) -> None:
    text = f"<tool_call>{json.dumps({'name': 'a', 'arguments': arguments})}</tool_call>"
    if "</tool_call>" in json.dumps(arguments):
        return
    _, words, (call,) = told(cut(text, at), ["a"])
    assert (words, json.loads(call.arguments)) == ("", arguments)


def test_without_tools_everything_is_words() -> None:
    assert told([f"<tool_call>{CALL}</tool_call>"]) == ("", f"<tool_call>{CALL}</tool_call>", [])
