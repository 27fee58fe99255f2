"""From a conversation to the token ids that a checkpoint was trained to answer, and back to text.

Token ids are those of transformers' `apply_chat_template`, but for one thing: where a person's text spells a special
token ("<|im_end|>"), it is encoded as the text it is, so nobody can end a turn or begin another from within a message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

from tokenizers import Tokenizer

from kafila.errors import ModelError, ModelIncomplete, UsageError
from kafila.shard.detokenize import Detokenizer, Pieces
from kafila.shard.specials import Specials
from kafila.shard.stops import StopMatcher
from kafila.shard.template import ChatTemplate
from kafila.types import THINKING_TAGS, Question

Message = Mapping[str, Any]
"""JSON: ``role``, ``content``, and whatever else the checkpoint's template reads (tool calls, reasoning)."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that a template may use by name."""

_OPENING_TOKENS = 8
"""A thinking tag in pieces, and line breaks after it."""

_PROBE = "kafila"
"""The answer whose end of turn is looked for in the template's own writing: any word that no template contains."""


class AnswerStream:
    """One answer's text as its tokens arrive: whole characters, up to a stop string."""

    def __init__(self, pieces: Pieces, stops: Sequence[str]) -> None:
        self._characters = Detokenizer(pieces)
        self._stops = StopMatcher(stops)

    def feed(self, token: int) -> str:
        """Text that is now certain."""
        return self._stops.feed(self._characters.feed(token))

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        return self._stops.feed(self._characters.finish()) + self._stops.finish()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been met; nothing more comes."""
        return self._stops.matched is not None


class ChatFormat:
    """The text side of a checkpoint: tokenizer, chat template, and the ids that end a turn."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, ChatTemplate],
        named: Mapping[str, str],
        eos: set[int],
        tokens: int | None = None,
    ) -> None:
        """``tokens``: how many the model has; None: not known."""
        self.tokenizer = tokenizer
        self._tokens = tokens
        self.pieces = Pieces(tokenizer)
        self._templates = templates
        self._named = named
        ending = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
        self._specials = Specials(tokenizer)
        found = (*eos, ending, self._turn_end())
        self.stop_ids = frozenset(number for number in found if number is not None)
        """All ids that end an answer: those the checkpoint's files name, and the one its template ends a turn with."""

    @classmethod
    def load(cls, folder: Path, clock: Callable[[], datetime]) -> ChatFormat:
        """Read a checkpoint folder; ``clock`` gives the date that some templates write into the prompt.

        Raises `ModelIncomplete` on a file that is missing or unreadable, `ModelError` on a template that is not one,
        `UnsupportedModel` on a tokenizer whose tokens cannot be decoded one by one.
        """
        config = _read_json(folder / "tokenizer_config.json")
        templates = {
            name: ChatTemplate(source, f"the chat template {name!r} of {folder}", clock)
            for name, source in _template_sources(folder, config).items()
        }
        model = _read_json(folder / "config.json")
        ends = [each.get("eos_token_id") for each in (_read_json(folder / "generation_config.json"), model)]
        eos = {number for end in ends for number in (end if isinstance(end, list) else [end]) if _is_number(number)}
        named = {**_named_tokens(_read_json(folder / "special_tokens_map.json")), **_named_tokens(config)}
        vocabulary = model.get("vocab_size")
        tokens = vocabulary if _is_number(vocabulary) else None
        return cls(_load_tokenizer(folder / "tokenizer.json"), templates, named, eos, tokens)

    def prompt(self, question: Question) -> list[int]:
        """What a question's answer follows: its conversation as `encode` renders it, or its text as it is.

        Raises what `encode` raises, and `ModelError` on a token that the model does not have.
        """
        if question.prompt is not None:
            # With what the tokenizer puts before every text; special tokens that are spelled out are meant here.
            return self._known(self.tokenizer.encode(question.prompt).ids)
        ids = self.encode(
            [
                {"role": message.role, "content": message.content, **json.loads(message.extra or "{}")}
                for message in question.messages
            ],
            tools=json.loads(question.tools or "null"),
            variables=json.loads(question.template_options or "{}"),
        )
        return self._known(ids)

    def _known(self, ids: Sequence[int]) -> list[int]:
        """The ids, if the model has them all."""
        if self._tokens is not None and max(ids, default=0) >= self._tokens:
            raise ModelError(
                f"the tokenizer makes token {max(ids)} of this, and the model has {self._tokens} tokens: "
                "tokenizer.json is another model's"
            )
        return list(ids)

    def opening(self, prompt: Sequence[int]) -> str:
        """The thinking tag that a rendered conversation ends with, and what follows it, or nothing.

        Some templates write it themselves (DeepSeek-R1's, for one), so that the model never does; whoever
        reads the answer needs it all the same.
        """
        end = self.tokenizer.decode(list(prompt[-_OPENING_TOKENS:]), skip_special_tokens=False)
        at, tag = max((end.rfind(tag), tag) for tag in THINKING_TAGS)
        return end[at:] if at >= 0 and not end[at + len(tag) :].strip() else ""

    def spell(self, token: int) -> bytes:
        """The bytes that a token adds to a text; a special token, which adds none, is spelled by its name."""
        return self.pieces.of(token) or (self.tokenizer.id_to_token(token) or "").encode()

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The conversation as token ids, ending, if ``answer``, where the assistant's next turn begins.

        ``variables`` go to the template (``enable_thinking`` and the like). Raises `UsageError` on an empty
        conversation, `ModelError` where there is no template, or it refuses or fails.
        """
        if not messages:
            raise UsageError("a conversation needs at least one message")
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        inputs = {"messages": present, "tools": list(tools) if tools else None, **(variables or {})}
        quoted = self._specials.quote(inputs)
        return self._specials.encode(self._render(quoted.value, answer=answer), quoted)

    def stream(self, stop: Sequence[str] = ()) -> AnswerStream:
        """A fresh stream for one answer that ends at any of ``stop``. Raises `UsageError` on an empty one."""
        return AnswerStream(self.pieces, stop)

    def _render(self, inputs: Mapping[str, Any], *, answer: bool) -> str:
        with_tools = inputs.get("tools") is not None and "tool_use" in self._templates
        template = self._templates.get("tool_use" if with_tools else "default")
        if template is None:
            raise ModelError("the checkpoint has no chat template: it continues text, and cannot hold a conversation")
        fixed = {"documents": None, "add_generation_prompt": answer, **self._named}
        return template.render({**fixed, **inputs})

    def _turn_end(self) -> int | None:
        """The special token that the template puts after an answer, if it does. Checkpoints that were trained for
        conversation after their files were written name only the end of a document."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self._render({"messages": turns, "tools": None}, answer=False)
        except ModelError:  # no template, or one that wants more of a conversation than this
            return None
        _, found, rest = text.rpartition(_PROBE)
        return self._specials.leading(rest.lstrip()) if found else None


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ModelIncomplete(f"the checkpoint has no {path}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        if type(error) is not Exception:  # the library raises Exception itself, whatever is wrong with the file
            raise
        raise ModelIncomplete(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()  # some files carry the settings of their training; a prompt is never cut or filled up
    tokenizer.no_padding()
    return tokenizer


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name to source. The template's own files come before tokenizer_config.json, which holds one or a named list."""
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        files["default"] = path
    if files:
        return {name: _read_text(path) for name, path in files.items()}
    written = config.get("chat_template") or {}
    try:
        if isinstance(written, list):
            written = {entry["name"]: entry["template"] for entry in written}
        found = {"default": written} if isinstance(written, str) else dict(written)
    except (KeyError, TypeError, ValueError):
        found = {"": None}
    if not all(isinstance(text, str) for pair in found.items() for text in pair):
        path = folder / "tokenizer_config.json"
        raise ModelIncomplete(
            f"{path}: its chat_template is neither a text nor named ones: download the checkpoint again"
        )
    return found


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by name; each is written as its text, or as an object that holds it."""
    found = {name: config[name] for name in _NAMED_TOKENS if config.get(name)}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelIncomplete(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file that may be absent."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelIncomplete(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelIncomplete(f"{path} does not hold what it should")
    return content
