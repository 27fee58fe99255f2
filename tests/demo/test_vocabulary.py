from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from kafila.demo.convert import convert
from kafila.errors import ModelIncomplete
from tests.demo import small
from tests.demo.small import gguf_tensors, silent, write_gguf


def test_the_tokenizer(tmp_path: Path, small_gguf: Path) -> None:
    convert(small_gguf, tmp_path / "out", silent)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("<|im_start|>hello w12<tool>")["input_ids"]
    # Digits are cut apart before merging, so the merge of "1" and "2" never happens.
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "hello", "Ġw", "1", "2", "<tool>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello w12<tool>"
    text = " naïve 你好 🎉 e\u0301\r\n\t<|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert turn == "<|im_start|>user\nhello<|im_end|>\n"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def test_a_merge_outside_the_vocabulary_is_refused(
    tmp_path: Path, model: transformers.LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "MERGES", [("h", "hello there")])
    with pytest.raises(ModelIncomplete, match="hello there"):
        convert(write_gguf(tmp_path / "x.gguf", gguf_tensors(model)), tmp_path / "out", silent)
