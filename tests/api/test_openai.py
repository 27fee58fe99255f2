"""OpenAI's interface as its clients see it."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.lowlevel

from kafila.types import FinishReason, Message, SpelledLogprobs
from tests.api.world import ScriptedEngine, interface, part, said
from tests.patience import PATIENCE_S

ASK: dict[str, Any] = {"model": "Camel-7B", "messages": [{"role": "user", "content": "Hi"}]}


async def test_whole_answer() -> None:
    engine = ScriptedEngine()
    async with interface(engine) as client:
        reply = await client.post("/v1/chat/completions", ASK)
    assert reply.status == 200
    assert reply.json["object"] == "chat.completion"
    assert reply.json["model"] == "Camel-7B"
    assert reply.json["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert reply.json["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert engine.questions[0].messages == (Message("user", "Hi"),)
    assert engine.cancelled == 0


async def test_stream() -> None:
    async with interface(ScriptedEngine()) as client:
        reply = await client.post(
            "/v1/chat/completions", {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        )
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, last = reply.events
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7


async def test_stream_says_the_place_in_the_queue_as_a_comment() -> None:
    engine = ScriptedEngine([part("", note="waiting: 3 in the queue"), *said("a")])
    async with interface(engine) as client:
        reply = await client.post("/v1/chat/completions", {**ASK, "stream": True})
    assert b": waiting: 3 in the queue\n\n" in reply.body
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply.events) == "a"


async def test_several_answers() -> None:
    engine = ScriptedEngine()
    async with interface(engine) as client:
        reply = await client.post("/v1/chat/completions", {**ASK, "n": 3, "seed": 7, "temperature": 1})
        streamed = await client.post("/v1/chat/completions", {**ASK, "n": 2, "stream": True})
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2]
    assert {question.sampling.seed for question in engine.questions[:3]} == {7, 8, 9}
    assert {question.sampling.seed for question in engine.questions[3:]} == {1000, 1001}
    assert reply.json["usage"]["completion_tokens"] == 6
    for number in (0, 1):
        mine = [one["choices"][0] for one in streamed.events if one["choices"][0]["index"] == number]
        assert "".join(one["delta"].get("content", "") for one in mine) == "Hello"


async def test_options_reach_the_question() -> None:
    engine = ScriptedEngine()
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.125,
        "logit_bias": {"12": -100},
        "max_completion_tokens": 9,
        "stop": "END",
        "chat_template_kwargs": {"enable_thinking": False},
        "user": "somebody",
    }
    async with interface(engine) as client:
        await client.post("/v1/chat/completions", {**ASK, **options})
    question = engine.questions[0]
    sampling = question.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (3, 0.25, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias, sampling.logprobs) == (1.125, ((12, -100.0),), 0)
    assert (question.max_tokens, question.stop) == (9, ("END",))
    assert question.template_options == '{"enable_thinking": false}'


async def test_content_in_parts_and_a_developers_message() -> None:
    engine = ScriptedEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with interface(engine) as client:
        messages = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]
        await client.post("/v1/chat/completions", {"messages": messages})
    assert engine.questions[0].messages == (Message("system", "Be brief"), Message("user", "ab"))


async def test_logprobs() -> None:
    logprobs = (SpelledLogprobs(b"\xf0\x9f", -0.5, ((b"\xf0\x9f", -0.5), (b"x", float("-inf")))),)
    engine = ScriptedEngine([part("", logprobs=logprobs), *said("a")])
    async with interface(engine) as client:
        reply = await client.post("/v1/chat/completions", {**ASK, "logprobs": True, "top_logprobs": 2})
        streamed = await client.post("/v1/chat/completions", {**ASK, "logprobs": True, "stream": True})
        completed = await client.post("/v1/completions", {"prompt": "x", "logprobs": 1})
    assert reply.json["choices"][0]["logprobs"]["content"] == [
        {
            "token": "\ufffd",
            "logprob": -0.5,
            "bytes": [240, 159],
            "top_logprobs": [
                {"token": "\ufffd", "logprob": -0.5, "bytes": [240, 159]},
                {"token": "x", "logprob": -9999.0, "bytes": [120]},
            ],
        }
    ]
    heard = [one for event in streamed.events for one in event["choices"][0]["logprobs"]["content"]]
    assert [one["top_logprobs"] for one in heard] == [[]]
    assert completed.json["choices"][0]["logprobs"] == {
        "tokens": ["\ufffd"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"\ufffd": -0.5}],
        "text_offset": [0],
    }
    assert [question.sampling.logprobs for question in engine.questions] == [2, 1, 1]


async def test_thinking_is_told_apart() -> None:
    engine = ScriptedEngine(said("<thi", "nk>\nI mu", "se.\n</th", "ink>\n\nYes"))
    async with interface(engine) as client:
        reply = await client.post("/v1/chat/completions", ASK)
        streamed = await client.post("/v1/chat/completions", {**ASK, "stream": True})
    message = reply.json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I muse.", "Yes")
    deltas = [event["choices"][0]["delta"] for event in streamed.events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I muse."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes"


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def test_tool_calls() -> None:
    engine = ScriptedEngine(
        said("Let me see.\n<tool", '_call>{"name": "weather", "argum', 'ents": {"city": "Oslo"}}</tool_call>')
    )
    async with interface(engine) as client:
        reply = await client.post("/v1/chat/completions", {**ASK, "tools": TOOLS})
        streamed = await client.post("/v1/chat/completions", {**ASK, "tools": TOOLS, "stream": True})
    (choice,) = reply.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    deltas = [event["choices"][0]["delta"] for event in streamed.events]
    (called,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert called == [{"index": 0, **call}]
    assert streamed.events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert "weather" in engine.questions[0].tools


async def test_a_call_and_its_result_go_back_to_the_template() -> None:
    engine = ScriptedEngine()
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    async with interface(engine) as client:
        reply = await client.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
    assert reply.status == 200
    _, asked, result = engine.questions[0].messages
    assert asked.extra == (
        '{"tool_calls": [{"id": "c1", "type": "function", '
        '"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}'
    )
    assert (result.role, result.content, result.extra) == ("tool", "rain", '{"tool_call_id": "c1"}')


async def test_completions() -> None:
    engine = ScriptedEngine()
    async with interface(engine) as client:
        reply = await client.post("/v1/completions", {"prompt": ["Once", "Twice"], "n": 2})
        echoed = await client.post("/v1/completions", {"prompt": "Once", "echo": True, "stream": True})
    assert [choice["text"] for choice in reply.json["choices"]] == ["Hello"] * 4
    assert sorted(str(question.prompt) for question in engine.questions) == ["Once"] * 3 + ["Twice"] * 2
    assert "".join(event["choices"][0]["text"] for event in echoed.events) == "OnceHello"
    assert echoed.events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_models() -> None:
    async with interface(ScriptedEngine()) as client:
        assert [one["id"] for one in (await client.get("/v1/models")).json["data"]] == ["Camel-7B"]
        assert (await client.get("/v1/models/Camel-7B")).json["id"] == "Camel-7B"
        assert (await client.get("/v1/models/Other")).status == 404


WRONG: list[tuple[dict[str, Any], int, str | None]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": "Hi"}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "poet", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "\ud83d"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
    ({"model": "gpt-4"}, 404, "model"),
    ({"model": 7}, 400, "model"),
    ({"temperature": -1}, 400, None),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": 10**400}, 400, "temperature"),
    ({"top_p": 2}, 400, None),
    ({"n": 0}, 400, "n"),
    ({"n": 1000}, 400, "n"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"seed": 2**80}, 400, "seed"),
    ({"stop": [""]}, 400, None),
    ({"stop": [1]}, 400, "stop"),
    ({"stop": ["x"] * 100}, 400, None),
    ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"stream": "yes"}, 400, "stream"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format"),
    ({"tools": TOOLS, "tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].function.name"),
    ({"functions": [{}]}, 400, "functions"),
    ({"truncation": "some"}, 400, "truncation"),
]


@pytest.mark.parametrize(("change", "status", "param"), WRONG, ids=lambda value: str(value)[:40])
async def test_what_cannot_be_meant_is_refused(change: dict[str, Any], status: int, param: str | None) -> None:
    engine = ScriptedEngine()
    async with interface(engine) as client:
        reply = await client.post("/v1/chat/completions", {**ASK, **change})
    assert reply.status == status
    assert reply.json["error"]["param"] == param
    assert reply.json["error"]["message"]
    assert not engine.questions


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"\xff", b'{"temperature": NaN}', b"[" * 100_000, b'{"n": 1' + b"0" * 5000 + b"}"],
)
async def test_malformed_json(body: bytes) -> None:
    async with interface(ScriptedEngine()) as client:
        reply = await client.request("POST", "/v1/chat/completions", body)
    assert reply.status == 400
    assert reply.json["error"]["code"] == "invalid_json"


ENDINGS = [
    (part("", FinishReason.BUSY, note="64 wait"), 429),
    (part("", FinishReason.CONTEXT, note="too long"), 400),
    (part("", FinishReason.ERROR, note="the template refuses"), 400),
    (part("", FinishReason.MEMBER_LEFT, note="bob left"), 503),
]


@pytest.mark.parametrize(("ending", "status"), ENDINGS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 2])
async def test_an_answer_that_does_not_begin(ending: Any, status: int, stream: bool, count: int) -> None:
    async with interface(ScriptedEngine([ending])) as client:
        reply = await client.post("/v1/chat/completions", {**ASK, "stream": stream, "n": count})
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"
    assert reply.json["error"]["message"] == ending.note


async def test_a_member_leaves_within_an_answer() -> None:
    engine = ScriptedEngine([part("Hel"), part("", FinishReason.MEMBER_LEFT, note="bob left", prompt_tokens=3)])
    async with interface(engine) as client:
        streamed = await client.post("/v1/chat/completions", {**ASK, "stream": True})
        whole = await client.post("/v1/chat/completions", ASK)
    assert streamed.events[-1]["error"]["message"] == "bob left"
    assert whole.status == 503


async def test_a_full_context_is_a_length() -> None:
    engine = ScriptedEngine(said("a", finish=FinishReason.CONTEXT))
    async with interface(engine) as client:
        reply = await client.post("/v1/chat/completions", ASK)
    assert reply.json["choices"][0]["finish_reason"] == "length"


async def test_the_oldest_turns_are_left_out_where_that_is_wished() -> None:
    engine = ScriptedEngine([part("a"), part("", FinishReason.STOP, prompt_tokens=5, answer_tokens=1, left_out=4)])
    async with interface(engine) as client:
        reply = await client.post("/v1/chat/completions", {**ASK, "truncation": "auto"})
        await client.post("/v1/chat/completions", {**ASK, "truncation": "disabled"})
        await client.post("/v1/chat/completions", ASK)
        told = await client.post("/api/chat", {"messages": ASK["messages"], "truncate": True, "stream": False})
    assert [question.rolling for question in engine.questions] == [True, False, False, True]
    assert reply.json["usage"]["left_out_messages"] == told.json["left_out_messages"] == 4


async def test_before_the_session_serves() -> None:
    async with interface(ScriptedEngine(facts=None)) as client:
        for reply in (
            await client.post("/v1/chat/completions", ASK),
            await client.get("/v1/models"),
            await client.get("/health"),
        ):
            assert reply.status == 503
        assert (await client.get("/ring")).json["status"] == "forming"
        assert (await client.get("/")).status == 200
        assert b"kafila_serving 0.0" in (await client.get("/metrics")).body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 3])
async def test_hanging_up_takes_the_question_back(stream: bool, count: int) -> None:
    engine = ScriptedEngine([part("a"), None])
    async with interface(engine) as client:
        stream_in = await client.connect()
        body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "stream": {str(stream).lower()}, "n": {count}}}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        await stream_in.send_all((head + body).encode())
        if stream:
            assert b"200" in await stream_in.receive_some()
        while engine.running < count:
            await trio.lowlevel.checkpoint()
        await stream_in.aclose()
        with trio.fail_after(PATIENCE_S):
            while engine.running:
                await engine.left.wait()
                await trio.lowlevel.checkpoint()
    assert engine.cancelled == count
