"""What rings of real processes have to answer: transformers, greedily, in float32 and one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from kafila.demo import default_folder
from kafila.demo.convert import is_whole

PROMPTS = (
    "What is the capital of France, and why is it famous?",
    "Name three rivers.",
    "Write a haiku about the desert.",
    "What is 17 + 25?",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for flat bread.",
    "Who was Ibn Battuta?",
    "Count from one to ten.",
    "Schreibe einen Satz über Kamele.",
)


@dataclass(frozen=True)
class Reference:
    """An answer, with the ids of its prompt and its own."""

    prompt: list[int]
    answer: list[int]
    text: str


def references(folder: Path, prompts: Sequence[str], count: int) -> list[Reference]:
    """The first ``count`` tokens of each answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**ids, max_new_tokens=count, do_sample=False, pad_token_id=0)[0].tolist()
        length = ids["input_ids"].shape[1]
        text = tokenizer.decode(made[length:], skip_special_tokens=True)
        found.append(Reference(made[:length], made[length:], text))
    return found


def answers(folder: Path, prompts: Sequence[str], count: int) -> list[str]:
    """The same as text."""
    return [reference.text for reference in references(folder, prompts, count)]


def demonstration_model() -> Path:
    """SmolLM2's folder; skips the test where it is not there."""
    folder = default_folder()
    if not is_whole(folder):
        pytest.skip("the demonstration model is not there: make demo-model")
    return folder
