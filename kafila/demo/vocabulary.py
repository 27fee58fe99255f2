"""tokenizer.json and tokenizer_config.json from the tokenizer that a GGUF file carries in its metadata."""

from __future__ import annotations

from typing import Any

from kafila.demo.source import Source
from kafila.errors import ModelIncomplete, UnsupportedModel

# gguf.TokenType. Both are found whole in text; a control token is left out of decoded text, a user-defined one is kept.
_CONTROL = 3
_USER_DEFINED = 4


def tokenizer_json(source: Source) -> dict[str, Any]:
    """The `tokenizers` description of the file's byte-level BPE. Raises `UnsupportedModel` for any other kind."""
    _check_kind(source)
    tokens: list[str] = list(source.need("tokenizer.ggml.tokens"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(source, tokens),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": _merges(source, set(tokens)),
        },
    }


def tokenizer_config(source: Source) -> dict[str, Any]:
    """What Hugging Face keeps beside the tokenizer: the named special tokens and the chat template."""
    tokens: list[str] = list(source.need("tokenizer.ggml.tokens"))
    named = {
        f"{role}_token": tokens[number] for role, number in special_ids(source).items() if 0 <= number < len(tokens)
    }
    return {
        # The class that takes tokenizer.json as it is; GPT2Tokenizer would put its own pre-tokenizer in its place.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(source.need("llama.context_length")),
        "chat_template": source.need("tokenizer.chat_template"),
        **named,
    }


def special_ids(source: Source) -> dict[str, int]:
    """Hugging Face's role name (``bos``, ``eos``, ``unk``, ``pad``) to token id, for the roles the file fills."""
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {role: source.fields.get(f"tokenizer.ggml.{key}_token_id") for role, key in keys.items()}
    return {role: int(number) for role, number in found.items() if number is not None}


def _check_kind(source: Source) -> None:
    kind = source.need("tokenizer.ggml.model"), source.need("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise UnsupportedModel(
            f"{source.path} has a tokenizer of kind {'/'.join(kind)}; the conversion knows: gpt2/smollm"
        )
    if source.fields.get("tokenizer.ggml.add_bos_token"):
        raise UnsupportedModel(
            f"{source.path} wants a first token before every text, which the conversion does not write"
        )


def _added_tokens(source: Source, tokens: list[str]) -> list[dict[str, Any]]:
    kinds: list[int] = list(source.need("tokenizer.ggml.token_type"))
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _merges(source: Source, tokens: set[str]) -> list[list[str]]:
    """The merges as pairs; one that names a token outside the vocabulary would make the tokenizer refuse to load."""
    merges = []
    for line in source.need("tokenizer.ggml.merges"):
        pair = line.split(" ")
        if len(pair) != 2 or not {*pair, "".join(pair)} <= tokens:
            raise ModelIncomplete(f"{source.path} has a tokenizer merge that does not fit its vocabulary: {line!r}")
        merges.append(pair)
    return merges
