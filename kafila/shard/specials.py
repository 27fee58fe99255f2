"""Special tokens in a prompt: those a template writes are tokens, those a person writes are text.

A tokenizer finds special tokens anywhere in the text it is given. So, when a person's text spells one, it is replaced
by a mark before the template runs. In the rendered text, the special tokens left are the template's. They are
respelled, the marks become what the person wrote, and the whole is encoded by a copy of the tokenizer that knows its
special tokens by the other spelling alone. Marks and spellings hold a random number, so no text can forge them.

What this does not see is a special token that a template puts together from several pieces of a person's text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from kafila.errors import ModelError


@dataclass(frozen=True)
class Quoted:
    """JSON in which marks stand for the special tokens that it spelled."""

    value: Any
    tokens: Mapping[str, str]
    """Mark to token; empty where nothing was spelled."""


class Specials:
    """The special tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: number for number, token in added.items() if token.special}
        # Longest first: where one special token begins another, the tokenizer takes the longer.
        longest_first = sorted(self._ids, key=lambda token: (-len(token), token))
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        key = secrets.randbits(64)
        # Private-use characters keep a template's trimming and its tests away from the number.
        self._marks = {token: f"\ue000{key}.{number}\ue001" for token, number in self._ids.items()}
        self._spellings = {token: f"\ue002{key}.{number}\ue003" for token, number in self._ids.items()}

    def leading(self, text: str) -> int | None:
        """The id of the special token that ``text`` begins with, if it does."""
        match = self._pattern.match(text)
        return None if match is None else self._ids[match[0]]

    def quote(self, value: Any) -> Quoted:
        """``value`` (JSON) with a mark for each special token in its strings. Keys are the program's and stay."""
        tokens: dict[str, str] = {}

        def mark(match: re.Match[str]) -> str:
            found = self._marks[match[0]]
            tokens[found] = match[0]
            return found

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(mark, value)
            if isinstance(value, Mapping):
                return {key: walk(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [walk(item) for item in value]
            return value

        return Quoted(walk(value), tokens)

    def encode(self, text: str, quoted: Quoted) -> list[int]:
        """The ids of ``text``, rendered from ``quoted``. Raises `ModelError` where a token was spelled and the
        tokenizer cannot be kept from reading it as one."""
        # Escaped in a program's JSON, half a character may come as far as here; the tokenizer takes whole ones.
        text = text.encode(errors="replace").decode()
        if not quoted.tokens:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        text = self._pattern.sub(lambda match: self._spellings[match[0]], text)
        for mark, token in quoted.tokens.items():
            text = text.replace(mark, token)
        return self._respelled.encode(text, add_special_tokens=False).ids

    @cached_property
    def _respelled(self) -> Tokenizer:
        """The tokenizer with its special tokens spelled otherwise and everything else, their ids too, the same."""
        content = json.loads(self._tokenizer.to_str())
        model, spellings = content["model"], self._spellings
        merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model.get("merges") or ()]
        ordinary = {token for merge in merges for token in (*merge, "".join(merge))} & spellings.keys()
        if ordinary:
            raise _unquotable(min(ordinary))
        for token in content["added_tokens"]:
            token["content"] = spellings.get(token["content"], token["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {spellings.get(token, token): number for token, number in model["vocab"].items()}
        else:  # Unigram: pairs of token and score, the place being the id
            model["vocab"] = [[spellings.get(token, token), score] for token, score in model["vocab"]]
        if model.get("unk_token") in spellings:
            model["unk_token"] = spellings[model["unk_token"]]
        # It names special tokens by their old spelling, to add them where that is asked for, which is not here.
        content["post_processor"] = None
        respelled = Tokenizer.from_str(json.dumps(content))
        for token, number in self._ids.items():
            if respelled.token_to_id(spellings[token]) != number:
                raise _unquotable(token)
        return respelled


def _unquotable(token: str) -> ModelError:
    return ModelError(f"the conversation spells special tokens, and this tokenizer cannot take {token} for text")
