"""Ollama's interface as its clients see it."""

from __future__ import annotations

from typing import Any

import pytest

from kafila.types import FinishReason, Message
from tests.api.world import ScriptedEngine, interface, part, said

ASK: dict[str, Any] = {"model": "Camel-7B:latest", "messages": [{"role": "user", "content": "Hi"}]}


async def test_chat_streams_unless_told_otherwise() -> None:
    engine = ScriptedEngine()
    async with interface(engine) as client:
        streamed = await client.post("/api/chat", ASK)
        whole = await client.post("/api/chat", {**ASK, "stream": False})
    assert streamed.headers["content-type"] == "application/x-ndjson"
    *parts, last = streamed.lines
    assert [one["message"]["content"] for one in parts] == ["Hel", "lo"]
    assert not any(one["done"] for one in parts)
    assert last == {
        "model": "Camel-7B:latest",
        "created_at": "2023-11-14T22:13:20Z",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "stop",
        "total_duration": 600_000_000,
        "load_duration": 0,
        "prompt_eval_count": 5,
        "prompt_eval_duration": 0,
        "eval_count": 2,
        "eval_duration": 500_000_000,
    }
    assert whole.json == {**last, "message": {"role": "assistant", "content": "Hello"}}


async def test_generate() -> None:
    engine = ScriptedEngine()
    async with interface(engine) as client:
        streamed = await client.post("/api/generate", {"model": "camel-7b", "prompt": "Hi", "system": "Be brief"})
        raw = await client.post("/api/generate", {"prompt": "Once", "raw": True, "stream": False})
    assert "".join(one["response"] for one in streamed.lines) == "Hello"
    assert raw.json["response"] == "Hello"
    assert engine.questions[0].messages == (Message("system", "Be brief"), Message("user", "Hi"))
    assert engine.questions[1].prompt == "Once"


async def test_options() -> None:
    engine = ScriptedEngine()
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "seed": 3, "num_predict": 9}
    more = {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.75, "stop": ["END"]}
    async with interface(engine) as client:
        await client.post("/api/chat", {**ASK, "options": {**options, **more, "num_ctx": 4096}, "think": False})
        await client.post("/api/chat", {**ASK, "options": {"num_predict": -1}})
    first, second = engine.questions
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.5, 0.25)
    assert (sampling.seed, first.max_tokens, first.stop) == (3, 9, ("END",))
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, 0.75)
    assert first.template_options == '{"enable_thinking": false}'
    assert (second.max_tokens, second.sampling.seed) == (0, 1000)


async def test_thinking_and_tool_calls() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    engine = ScriptedEngine(said("<think>hm</think>", '{"name": "weather", "parameters"', ': {"city": "Oslo"}}'))
    async with interface(engine) as client:
        streamed = await client.post("/api/chat", {**ASK, "tools": tools})
        whole = await client.post("/api/chat", {**ASK, "tools": tools, "stream": False})
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert whole.json["message"] == {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]}
    assert [one["message"].get("tool_calls") for one in streamed.lines] == [None, [call], None]
    assert streamed.lines[0]["message"]["thinking"] == "hm"


async def test_a_tools_result_goes_back() -> None:
    engine = ScriptedEngine()
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [*ASK["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    async with interface(engine) as client:
        reply = await client.post(
            "/api/chat", {**ASK, "messages": [*messages, {"role": "tool", "tool_name": "weather", "content": "rain"}]}
        )
    assert reply.status == 200
    assert engine.questions[0].messages[2] == Message("tool", "rain", '{"name": "weather"}')


async def test_loading() -> None:
    engine = ScriptedEngine()
    async with interface(engine) as client:
        for path in ("/api/chat", "/api/generate"):
            reply = await client.post(path, {"model": "Camel-7B"})
            assert (reply.json["done"], reply.json["done_reason"]) == (True, "load")
    assert not engine.questions


async def test_what_is_listed() -> None:
    async with interface(ScriptedEngine()) as client:
        (model,) = (await client.get("/api/tags")).json["models"]
        assert (model["name"], model["size"]) == ("Camel-7B:latest", 7_000_000)
        assert (await client.get("/api/ps")).json["models"] == [model]
        shown = (await client.post("/api/show", {"model": model["name"]})).json
        assert shown["model_info"]["llama.context_length"] == 1000
        assert "version" in (await client.get("/api/version")).json


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "other"}, 404),
        ({"format": "json"}, 400),
        ({"options": {"temperature": "x"}}, 400),
        ({"options": []}, 400),
        ({"messages": [{"role": "user", "content": "x", "images": ["..."]}]}, 400),
        ({"think": 3}, 400),
    ],
)
async def test_refusals_are_ollamas(change: dict[str, Any], status: int) -> None:
    async with interface(ScriptedEngine()) as client:
        reply = await client.post("/api/chat", {**ASK, **change})
    assert reply.status == status
    assert isinstance(reply.json["error"], str)


async def test_an_answer_that_breaks_off() -> None:
    engine = ScriptedEngine([part("Hel"), part("", FinishReason.MEMBER_LEFT, note="bob left")])
    async with interface(engine) as client:
        reply = await client.post("/api/chat", ASK)
    assert reply.lines[-1] == {"error": "bob left"}


async def test_nothing_else_is_there() -> None:
    async with interface(ScriptedEngine()) as client:
        assert (await client.post("/api/pull", {"model": "x"})).status == 404
        assert isinstance((await client.post("/api/pull", {})).json["error"], str)
        assert (await client.get("/api/chat")).status == 405
