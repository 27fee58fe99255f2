"""The official clients of OpenAI and Ollama, and curl, at a ring of real processes."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ollama
import openai
import pytest
import trio

from tests.integration.models import talking_checkpoint
from tests.integration.processes import Process, machine

T = TypeVar("T")
KEY = "sesame"
HELLO: list[Any] = [
    {"role": "user", "content": "Hallo, wie geht es dir? \U0001f42a \u0928\u092e\u0938\u094d\u0924\u0947"}
]


async def elsewhere(work: Callable[[], T]) -> T:
    """The official clients block."""
    with trio.fail_after(60):
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True)


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}v1", api_key=KEY, max_retries=0, timeout=50)


@asynccontextmanager
async def ring(folder: Path, *options: str, endless: bool = False) -> AsyncIterator[tuple[list[Process], list[str]]]:
    """Two members that serve, and the addresses of their interfaces."""
    model = talking_checkpoint(folder / "model", endless=endless)
    async with machine() as here:
        members = await here.ring(
            model, 2, "--context", "200", "--dtype", "float32", "--serve", *options, friend_options=["--serve"]
        )
        yield members, [(await member.until("local API and page: ")).partition(" ")[0] for member in members]


async def test_official_clients(tmp_path: Path) -> None:
    # The host's interface asks for the key; the friend's, on loopback, does not.
    async with ring(tmp_path, "--concurrency", "3", "--api-key", KEY) as (_, urls):
        assert urls[0] != urls[1]
        if shutil.which("curl") is not None:
            await _curl(urls, tmp_path / "large")
        whole = await elsewhere(partial(_openai, urls[0]))
        assert whole == await elsewhere(partial(_openai, urls[1]))
        assert whole == await elsewhere(partial(_ollama, urls[1]))
        await elsewhere(partial(_errors, urls[1]))
        answers: list[str] = []

        async def one(number: int) -> None:
            answers.append(await elsewhere(partial(_streamed, urls[number % 2])))

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(one, number)
        assert answers == [whole] * 8


def _openai(url: str) -> str:
    with client_of(url) as client:
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id).id == model.id
        asked: dict[str, Any] = {"model": model.id, "messages": HELLO, "max_tokens": 40, "temperature": 0}
        whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        text = whole.choices[0].message.content
        assert text is not None
        assert whole.usage is not None
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.content is not None
        spelled = b"".join(bytes(one.bytes or []) for one in whole.choices[0].logprobs.content)
        assert spelled.decode(errors="replace") == text
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        assert _streamed(url) == text
        two = client.chat.completions.create(**{**asked, "temperature": 1}, n=2, seed=5)
        again = client.chat.completions.create(**{**asked, "temperature": 1}, n=2, seed=5)
        assert [one.message.content for one in two.choices] == [one.message.content for one in again.choices]
        assert two.choices[0].message.content != two.choices[1].message.content
        raw = client.completions.create(model=model.id, prompt="Once", max_tokens=5, stop=["\n"])
        assert raw.usage is not None
        assert raw.object == "text_completion"
        return str(text)


def _streamed(url: str) -> str:
    with client_of(url) as client:
        stream = client.chat.completions.create(
            model="model", messages=HELLO, max_tokens=40, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        assert chunks[-1].usage is not None
        assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} <= {None, "length", "stop"}
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])


def _ollama(url: str) -> str:
    with ollama.Client(host=url) as client:
        return _ollamas(client)


def _ollamas(client: ollama.Client) -> str:
    (model,) = client.list().models
    assert model.model is not None
    assert client.show(model.model).modelinfo is not None
    options = {"num_predict": 40, "temperature": 0}
    whole = client.chat(model=model.model, messages=HELLO, options=options)
    parts = list(client.chat(model=model.model, messages=HELLO, options=options, stream=True))
    assert "".join(one.message.content or "" for one in parts) == whole.message.content
    assert parts[-1].eval_count == whole.eval_count
    assert whole.eval_count is not None
    assert whole.eval_count <= 40
    assert client.generate(model=model.model, prompt="Hallo", options={"num_predict": 3}).done
    with pytest.raises(ollama.ResponseError, match="no model") as error:
        client.chat(model="other", messages=HELLO)
    assert error.value.status_code == 404
    assert whole.message.content is not None
    return whole.message.content


def _errors(url: str) -> None:
    with client_of(url) as client:
        with pytest.raises(openai.NotFoundError, match="no model"):
            client.chat.completions.create(model="gpt-4", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model="model", messages=HELLO, temperature=-3)
        with pytest.raises(openai.BadRequestError, match="the session holds 200") as error:
            client.chat.completions.create(
                model="model", messages=[{"role": "user", "content": "x" * 900}], stream=True
            )
        assert error.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="does not constrain"):
            client.chat.completions.create(model="model", messages=HELLO, response_format={"type": "json_object"})


async def test_hanging_up_frees_the_slot_and_a_departure_is_told(tmp_path: Path) -> None:
    async with ring(tmp_path, "--concurrency", "1", endless=True) as (members, urls):
        for _ in range(3):
            # There is one slot: an answer that went on would keep the next one waiting to its end.
            await elsewhere(partial(_hang_up, urls[1]))
        await elsewhere(partial(_await_departure, urls[0], members[1]))


def _hang_up(url: str) -> None:
    with client_of(url) as client:
        stream = client.chat.completions.create(model="model", messages=HELLO, stream=True)
        for number, _ in enumerate(stream):
            if number == 3:
                break
        stream.close()


def _await_departure(url: str, member: Process) -> None:
    with client_of(url) as client:
        stream = client.chat.completions.create(model="model", messages=HELLO, stream=True, max_tokens=100_000)
        for _ in range(4):
            next(stream)
        member.signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match=r"m1|session"):
            list(stream)


async def _curl(urls: Sequence[str], large: Path) -> None:
    large.write_bytes(b" " * 10_000_000)  # noqa: ASYNC240  - nothing else runs here
    key = ("-H", f"Authorization: Bearer {KEY}")
    chat = f"{urls[0]}v1/chat/completions"
    ask = json.dumps({"messages": HELLO, "max_tokens": 5, "stream": True})
    assert (await curl(f"{urls[0]}v1/models"))[0] == 401
    assert (await curl(f"{urls[0]}v1/models", *key))[0] == 200
    status, body = await curl(chat, *key, "-d", ask)
    assert (status, body.endswith("data: [DONE]\n\n")) == (200, True)
    for header in ("Host: evil.example", "Origin: http://evil.example"):
        assert (await curl(f"{urls[0]}v1/models", *key, "-H", header))[0] == 403
    assert (await curl(chat, *key, "--data-binary", f"@{large}"))[0] == 413
    assert (await curl(chat, *key, "-d", "{"))[0] == 400
    assert (await curl("--http2", f"{urls[0]}v1/models", *key))[0] == 200
    facts = json.loads((await curl(f"{urls[1]}ring"))[1])
    # Which of them holds the head, their speeds decide, and other tests run beside these processes.
    assert {member["name"] for member in facts["members"]} == {"m0", "m1"}
    assert [edge["kind"] for edge in facts["edges"]] == ["direct", "direct"]
    assert all(edge["measured"] for edge in facts["edges"])
    assert facts["tokens"] == 5


async def curl(*arguments: str) -> tuple[int, str]:
    """The status and the body of a response."""
    command = ["curl", "-sS", "-N", "-w", "\n%{http_code}", *arguments]
    done = await trio.run_process(command, capture_stdout=True)
    body, _, status = done.stdout.decode().rpartition("\n")
    return int(status), body


async def test_what_others_could_reach_needs_a_key() -> None:
    async with machine() as here:
        process = await here.node("--host", "--model", "x", "--members", "1", "--api", "0.0.0.0:11435")
        await process.until("add --api-key KEY")
        assert await process.wait() == 1
