"""Text from token ids, one at a time, in whole characters.

A token adds bytes, not characters: an emoji may take four. So what is kept between tokens is the unfinished end of the
UTF-8 text, three bytes at most, and the work for a token does not grow with the answer.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer

from kafila.errors import UnsupportedModel

_SUPPORTED = "ByteLevel, or a sequence of Replace, ByteFallback, Fuse and Strip"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How a tokenizer with byte fallback spells a byte for which it has no token."""


class Pieces:
    """What each token of a tokenizer adds to a text, and what the beginning of a text loses.

    Serves any number of texts at once. Raises `UnsupportedModel` where the tokenizer's decoder is of a kind whose
    tokens cannot be decoded apart.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._skipped = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        steps = _steps(json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None)
        self._bytes_of, self.trimmed, self.trimmed_count = _interpret(steps)
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The bytes that ``token_id`` adds: none for a special token, nor for an id beyond the vocabulary (a model's
        embedding may be padded beyond it)."""
        piece = self._known.get(token_id)
        if piece is None:
            token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
            piece = self._known[token_id] = self._bytes_of(token) if token is not None else b""
        return piece

    def decode(self, token_ids: Iterable[int]) -> str:
        """The whole text of ``token_ids``: the concatenation of what a `Detokenizer` returns for them."""
        stream = Detokenizer(self)
        return "".join([*map(stream.feed, token_ids), stream.finish()])


class Detokenizer:
    """One answer's text as its tokens arrive.

    The concatenation of all that is returned is what the `tokenizers` library decodes, special tokens skipped, with one
    difference: where byte-fallback tokens in a row are not UTF-8 it replaces every byte of the row, and we, who have
    already shown the characters that were whole, only what is broken.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._to_trim = pieces.trimmed_count

    def feed(self, token_id: int) -> str:
        """The characters that ``token_id`` completes; empty while a character lacks bytes."""
        return self._trim(self._utf8.decode(self._pieces.of(token_id)))

    def finish(self) -> str:
        """What is left when no token follows: a replacement character where the text stops within a character."""
        return self._trim(self._utf8.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        while self._to_trim and text:
            if not text.startswith(self._pieces.trimmed):
                self._to_trim = 0
                break
            text = text[1:]
            self._to_trim -= 1
        return text


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoder of a tokenizer.json as a flat list of steps."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _interpret(steps: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], str, int]:
    """How one token becomes bytes, and the character that the text loses at its beginning, up to how many times."""
    kinds = [step["type"] for step in steps]
    if not steps:  # tokens are words, and the library puts a space between any two
        return (lambda token: f" {token}".encode()), " ", 1
    if kinds == ["ByteLevel"]:
        return _byte_level, "", 0
    trimmed, count = "", 0
    # Order matters: joined text is trimmed as one, and a replacement in joined text would reach across tokens.
    if not re.fullmatch("(Replace )*(ByteFallback )?(Fuse (Strip )?)?", "".join(f"{kind} " for kind in kinds)):
        raise _unsupported(kinds)
    if kinds[-1] == "Strip":
        trimmed, count = steps[-1]["content"], steps[-1]["start"]
        if steps[-1]["stop"]:
            raise _unsupported(["Strip at the end of the text"])
    replacements = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
    if any(pattern is None for pattern, _ in replacements):
        raise _unsupported(["Replace by a regular expression"])
    return _replacing(replacements, fallback="ByteFallback" in kinds), trimmed, count


def _unsupported(kinds: list[str]) -> UnsupportedModel:
    return UnsupportedModel(f"the tokenizer decodes by {', '.join(kinds)}; supported: {_SUPPORTED}")


def _replacing(replacements: list[tuple[str, str]], *, fallback: bool) -> Callable[[str], bytes]:
    """SentencePiece's kind of token: text with a letter for the space, or the name of a byte."""

    def bytes_of(token: str) -> bytes:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        if fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.encode()

    return bytes_of


def _letters() -> dict[str, int]:
    """Byte-level BPE's letter for each byte (GPT-2): the byte's own Latin-1 character where that is printable, and
    for the rest, in order, the characters from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_LETTERS = _letters()


def _byte_level(token: str) -> bytes:
    """An added token need not be spelled in letters for bytes; then it is plain text."""
    try:
        return bytes(_LETTERS[letter] for letter in token)
    except KeyError:
        return token.encode()
