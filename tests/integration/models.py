"""Tiny checkpoints that can be talked to: random weights, a byte-level tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.shard.checkpoints import make_checkpoint
from tests.shard.tokenizers_for_tests import byte_level, id_of

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


ENDLESS_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def talking_checkpoint(folder: Path, family: str = "llama", *, endless: bool = False, **options: Any) -> Path:
    """A random model whose every token is text or the end of a turn; an ``endless`` one cannot draw the latter."""
    tokenizer = byte_level()
    end = id_of(tokenizer, "<|im_end|>")
    # The added tokens have the highest ids.
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=not endless)
    make_checkpoint(folder, family, vocab_size=vocabulary, eos_token_id=None if endless else end, **options)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "chat_template": ENDLESS_TEMPLATE if endless else TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder
