"""Small tokenizers of the kinds that language models come with."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

UNKNOWN = "<unk>"
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
PLAIN_ADDED = ["<think>", "</think>", "世界"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("ð", "Ł"), ("i", "m")]


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in PLAIN_ADDED])
    return tokenizer


def byte_level() -> Tokenizer:
    """GPT-2's kind: every byte has a letter, so every text can be written."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer)


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """Llama 2's kind: a letter for the space put before the text, and bytes where a character has no token."""
    merges = [("▁", "w"), ("h", "e"), ("▁", "▁"), ("é", "e")]
    letters = [UNKNOWN, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.<|>_/é你"]
    tokens = [*letters, *("".join(pair) for pair in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _with_added(tokenizer)


def unigram() -> Tokenizer:
    """T5's kind: pieces with scores, the special tokens among them."""
    letters = [(letter, -3.0) for letter in "▁abcdefghijklmnopqrstuvwxyz<|>_/s"]
    pieces = [(UNKNOWN, 0.0), *((token, 0.0) for token in SPECIALS), ("▁he", -1.0), *dict(letters).items()]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return _with_added(tokenizer)


def words() -> Tokenizer:
    """No decoder at all: tokens are words."""
    tokenizer = Tokenizer(models.WordLevel({UNKNOWN: 0, "one": 1, "two": 2, "three": 3}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _with_added(tokenizer)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None
    return number
