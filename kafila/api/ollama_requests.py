"""Ollama's requests, read into questions (pure)."""

from __future__ import annotations

import json
from dataclasses import replace

from kafila.api.common import Asked, check_model, read_message, read_tools, variants
from kafila.api.fields import Fields
from kafila.api.openai_requests import Defaults
from kafila.types import Message, Question


def read_chat(fields: Fields, served: str, defaults: Defaults) -> Asked | None:
    """A request to /api/chat. None where it has no messages: then the model is only to be loaded, and it is."""
    _check(fields, served)
    messages = tuple(read_message(one) for one in fields.objects("messages"))
    tools, names = read_tools(fields)
    if not messages:
        return None
    question = _question(fields, defaults, Question(messages=messages, tools=tools))
    return Asked((question,), fields.flag("stream", default=True), names)


def read_generate(fields: Fields, served: str, defaults: Defaults) -> Asked | None:
    """A request to /api/generate: a prompt becomes one turn of a conversation, unless it is ``raw``."""
    _check(fields, served)
    if fields.raw("suffix"):
        fields.refuse("suffix", "is not possible: text is continued, not filled in")
    for name in ("template", "context"):
        if fields.raw(name):
            fields.refuse(name, "is not possible: use /api/chat, which takes the whole conversation")
    prompt, system = fields.text("prompt", ""), fields.text("system", "")
    if not prompt:
        return None
    if fields.flag("raw"):
        question = Question(prompt=prompt)
    else:
        before = (Message("system", system),) if system else ()
        question = Question(messages=(*before, Message("user", prompt)))
    return Asked((_question(fields, defaults, question),), fields.flag("stream", default=True))


def _check(fields: Fields, served: str) -> None:
    check_model(fields.raw("model"), served)
    if fields.raw("images"):
        fields.refuse("images", "cannot be looked at: the session's model reads text alone")
    if fields.raw("format"):
        fields.refuse("format", "cannot be enforced: this server does not constrain what the model writes")


def _question(fields: Fields, defaults: Defaults, question: Question) -> Question:
    options, usual = fields.object("options"), defaults.sampling
    limit = options.integer("num_predict", defaults.max_tokens, -2)
    think = fields.raw("think")
    if think is not None and not isinstance(think, bool | str):
        fields.refuse("think", "is neither true nor false nor a level")
    asked = replace(
        question,
        sampling=replace(
            usual,
            temperature=options.number("temperature", usual.temperature),
            top_k=max(options.integer("top_k", usual.top_k, -1), 0),
            top_p=options.number("top_p", usual.top_p),
            min_p=options.number("min_p", usual.min_p),
            repetition_penalty=options.number("repeat_penalty", usual.repetition_penalty),
            presence_penalty=options.number("presence_penalty", usual.presence_penalty),
            frequency_penalty=options.number("frequency_penalty", usual.frequency_penalty),
        ),
        max_tokens=max(limit, 0),  # -1 and -2 are Ollama's ways to say no limit
        stop=options.texts("stop"),
        rolling=fields.flag("truncate", default=defaults.rolling),
        template_options="" if think is None else json.dumps({"enable_thinking": bool(think)}),
    )
    seed = options.integer("seed", 0, -(2**63)) if "seed" in options else defaults.new_seed()
    return variants(asked, [seed])[0]
