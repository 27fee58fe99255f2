"""OpenAI's requests, read into questions (pure).

What cannot be done is refused in words, never ignored where the answer would be another than was asked for: a schema
that would not be enforced, a tool that must be called, pictures, sound.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from kafila.api.common import Asked, check_model, read_message, read_tools, variants
from kafila.api.fields import Fields
from kafila.types import Question, Sampling

MAX_CHOICES = 16
"""Answers in one request: as many as keep a queue from being one person's."""
MAX_ALTERNATIVES = 20


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request that does not say gets: the member's own options. ``new_seed`` gives each request its chance."""

    sampling: Sampling
    max_tokens: int
    new_seed: Callable[[], int]
    rolling: bool = False
    """Whether a conversation that is too long loses its oldest turns."""


def read_chat(fields: Fields, served: str, defaults: Defaults) -> Asked:
    """A request for chat completions."""
    check_model(fields.raw("model"), served)
    _refuse_what_is_not_here(fields)
    messages = tuple(read_message(one) for one in fields.objects("messages"))
    if not messages:
        fields.refuse("messages", "is empty: a conversation needs at least one message")
    tools, names = _offered_tools(fields)
    alternatives = fields.integer("top_logprobs", 0, 0, MAX_ALTERNATIVES)
    logprobs = fields.flag("logprobs")
    question = Question(
        messages=messages,
        sampling=_sampling(fields, defaults, max(alternatives, 1) if logprobs else 0),
        max_tokens=_max_tokens(fields, defaults),
        stop=fields.texts("stop"),
        tools=tools,
        template_options=_template_options(fields),
        rolling=_rolling(fields, defaults),
    )
    return Asked(
        variants(question, _seeds(fields, defaults)),
        fields.flag("stream"),
        names,
        logprobs,
        alternatives if logprobs else 0,
        fields.object("stream_options").flag("include_usage"),
    )


def read_completion(fields: Fields, served: str, defaults: Defaults) -> Asked:
    """A request for completions of a text."""
    check_model(fields.raw("model"), served)
    _refuse_what_is_not_here(fields)
    if fields.raw("suffix"):
        fields.refuse("suffix", "is not possible: text is continued, not filled in")
    if fields.integer("best_of", 1, 1) > fields.integer("n", 1, 1, MAX_CHOICES):
        fields.refuse("best_of", "is larger than n: answers are not compared with one another here")
    alternatives = fields.integer("logprobs", 0, 0, MAX_ALTERNATIVES)
    logprobs = "logprobs" in fields
    echo = fields.flag("echo")
    prompts = _prompts(fields)
    if echo and (logprobs or len(prompts) > 1):
        fields.refuse("echo", "is possible for one prompt without logprobs")
    plain = Question(
        prompt="",
        sampling=_sampling(fields, defaults, max(alternatives, 1) if logprobs else 0),
        max_tokens=_max_tokens(fields, defaults),
        stop=fields.texts("stop"),
    )
    questions = [one for text in prompts for one in variants(replace(plain, prompt=text), _seeds(fields, defaults))]
    if len(questions) > MAX_CHOICES:
        fields.refuse("n", f"asks for {len(questions)} answers in one request; {MAX_CHOICES} are possible")
    usage = fields.object("stream_options").flag("include_usage")
    shown = alternatives if logprobs else 0
    return Asked(
        tuple(questions),
        fields.flag("stream"),
        logprobs=logprobs,
        alternatives=shown,
        include_usage=usage,
        echo=prompts[0] if echo else "",
    )


def _prompts(fields: Fields) -> tuple[str, ...]:
    prompts = fields.texts("prompt") if _is_text(fields.raw("prompt")) else ()
    if not 0 < len(prompts) <= MAX_CHOICES:
        fields.refuse("prompt", f"is not a text or a list of 1 to {MAX_CHOICES} texts (token ids are not taken)")
    if not all(prompts):
        fields.refuse("prompt", "is empty: there is nothing to continue")
    return prompts


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _refuse_what_is_not_here(fields: Fields) -> None:
    kind = fields.object("response_format").text("type", "text")
    if kind != "text":
        fields.refuse(
            "response_format",
            f"is {kind!r}: this server does not constrain what the model writes; ask for the form in words",
        )
    if fields.raw("functions") or fields.raw("function_call"):
        fields.refuse("functions", "is OpenAI's older form: use tools")
    if "audio" in fields or "audio" in (fields.raw("modalities") or ()):
        fields.refuse("modalities", "asks for sound: the session's model writes text alone")


def _offered_tools(fields: Fields) -> tuple[str, frozenset[str]]:
    choice = fields.raw("tool_choice")
    if choice not in (None, "auto", "none"):
        fields.refuse("tool_choice", "can be 'auto' or 'none': the model cannot be made to call a tool here")
    tools, names = read_tools(fields)
    return ("", frozenset()) if choice == "none" else (tools, names)


def _rolling(fields: Fields, defaults: Defaults) -> bool:
    """``truncation``, by the name and in the words of OpenAI's Responses interface."""
    wish = fields.raw("truncation")
    if wish not in (None, "auto", "disabled"):
        fields.refuse(
            "truncation", "can be 'auto' (a conversation that is too long loses its oldest turns) or 'disabled'"
        )
    return defaults.rolling if wish is None else wish == "auto"


def _template_options(fields: Fields) -> str:
    options = fields.object("chat_template_kwargs")
    effort = fields.raw("reasoning_effort")
    if effort not in (None, "none", "minimal", "low", "medium", "high", "xhigh"):
        fields.refuse("reasoning_effort", "is none of none, minimal, low, medium, high, xhigh")
    written = fields.raw("chat_template_kwargs") or {}
    if effort is not None:
        written = {"enable_thinking": effort != "none", "reasoning_effort": effort, **written}
    return options.whole("", json.dumps(written, ensure_ascii=False)) if written else ""


def _sampling(fields: Fields, defaults: Defaults, logprobs: int) -> Sampling:
    usual = defaults.sampling
    return Sampling(
        temperature=fields.number("temperature", usual.temperature),
        top_k=max(fields.integer("top_k", usual.top_k, -1), 0),  # some clients write -1 for no limit
        top_p=fields.number("top_p", usual.top_p),
        min_p=fields.number("min_p", usual.min_p),
        repetition_penalty=fields.number("repetition_penalty", usual.repetition_penalty),
        presence_penalty=fields.number("presence_penalty", usual.presence_penalty),
        frequency_penalty=fields.number("frequency_penalty", usual.frequency_penalty),
        logit_bias=_biases(fields),
        logprobs=logprobs,
    )


def _biases(fields: Fields) -> tuple[tuple[int, float], ...]:
    written = fields.object("logit_bias")
    named = fields.raw("logit_bias") or {}
    if any(not name.isascii() or not name.isdigit() or len(name) > 9 for name in named):
        fields.refuse("logit_bias", "names what is no token id")
    return tuple((int(name), written.number(name, 0.0)) for name in named)


def _max_tokens(fields: Fields, defaults: Defaults) -> int:
    name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    return fields.integer(name, defaults.max_tokens, 1) if name in fields else defaults.max_tokens


def _seeds(fields: Fields, defaults: Defaults) -> list[int]:
    """One for each answer: those that follow the request's own, or new ones."""
    count = fields.integer("n", 1, 1, MAX_CHOICES)
    first = fields.integer("seed", 0, -(2**63), 2**63 - 1 - MAX_CHOICES)
    return [first + at if "seed" in fields else defaults.new_seed() for at in range(count)]
