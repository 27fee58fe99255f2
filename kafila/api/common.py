"""What both interfaces read of a request (pure)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kafila.api.fields import Fields
from kafila.api.refusals import Refused
from kafila.types import Message, Question

_ROLES = {"system", "developer", "user", "assistant", "tool"}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for answers. There is one question for each answer; they differ in their seeds or prompts."""

    questions: tuple[Question, ...]
    stream: bool
    tools: frozenset[str] = frozenset()
    """The names of the tools that were offered."""
    logprobs: bool = False
    alternatives: int = 0
    """How many of the likeliest tokens are shown with each."""
    include_usage: bool = False
    """Whether a stream ends with the counts."""
    echo: str = ""
    """What is put before every answer."""


def check_model(asked: object, served: str) -> None:
    """Refuse a model that is not the session's; a request may leave it out."""
    if asked is None:
        return
    if not isinstance(asked, str):
        raise Refused(400, "model is not a string", param="model", code="invalid_value")
    if asked.removesuffix(":latest").lower() != served.lower():
        text = f"no model {asked!r} here: this session serves {served!r}"
        raise Refused(404, text, param="model", code="model_not_found")


def read_message(fields: Fields) -> Message:
    """One turn of a conversation, as OpenAI or Ollama writes it."""
    role = fields.text("role")
    if role not in _ROLES:
        fields.refuse("role", f"is {role!r}; it is one of {', '.join(sorted(_ROLES))}")
    calls = [_tool_call(call) for call in fields.objects("tool_calls")]
    extra: dict[str, Any] = {"tool_calls": calls} if calls else {}
    for name in ("tool_call_id", "name", "reasoning_content"):
        if name in fields:
            extra[name] = fields.text(name)
    for theirs, ours in (("thinking", "reasoning_content"), ("tool_name", "name")):
        if theirs in fields:
            extra.setdefault(ours, fields.text(theirs))
    if fields.raw("images"):
        fields.refuse("images", "cannot be looked at: the session's model reads text alone")
    content = _content(fields, optional=bool(calls))
    # A developer's message is what OpenAI calls a system message since its reasoning models.
    role = "system" if role == "developer" else role
    return Message(role, content, json.dumps(extra, ensure_ascii=False) if extra else "")


def _content(fields: Fields, *, optional: bool) -> str:
    """Text, or a list of text parts."""
    if not isinstance(fields.raw("content"), list):
        return fields.text("content", "" if optional else None)
    for part in fields.objects("content"):
        if part.text("type") not in {"text", "input_text"}:
            fields.refuse("content", f"has a part of type {part.text('type')!r}: the model reads text alone")
    return "".join(part.text("text") for part in fields.objects("content"))


def _tool_call(call: Fields) -> dict[str, Any]:
    """A call of an earlier turn, with its arguments as the object that templates expect."""
    function = call.object("function")
    arguments = function.raw("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = function.text("arguments")
    written: dict[str, Any] = {
        "type": "function",
        "function": {"name": function.text("name"), "arguments": {} if arguments is None else arguments},
    }
    return {"id": call.text("id"), **written} if "id" in call else written


def read_tools(fields: Fields) -> tuple[str, frozenset[str]]:
    """The tools as JSON for the template, and their names."""
    tools = fields.objects("tools")
    for tool in tools:
        if tool.text("type", "function") != "function":
            tool.refuse("type", "is not 'function', the one kind of tool there is here")
    names = frozenset(tool.object("function").text("name") for tool in tools)
    return (fields.json("tools"), names) if tools else ("", names)


def variants(question: Question, seeds: Sequence[int]) -> tuple[Question, ...]:
    """Questions that differ in their seeds alone."""
    return tuple(replace(question, sampling=replace(question.sampling, seed=seed)) for seed in seeds)
