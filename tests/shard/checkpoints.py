"""Tiny random checkpoints, written by transformers, and what transformers says they answer.

Weights are scaled so that activations keep their size and greedy answers wander: with the usual initial weights a
tiny model repeats one token, and almost any mistake goes unseen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)  # models this small only wait for a second thread, very long on a busy machine

CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma3 that sees": ("Gemma3Config", "Gemma3ForConditionalGeneration"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
}
VOCAB = 131


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    blocks: int = 4,
    tied: bool = False,
    sharded: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    **config: Any,
) -> Path:
    """A random model of ``family`` (a key of `CLASSES`) in ``folder``; ``config`` overrides its configuration's keys.

    By default hidden 48, 6 heads over 2 key/value heads of 16 (so head_dim is not hidden / heads), vocabulary `VOCAB`.
    """
    keys: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": blocks,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": [2, 3],
        "rms_norm_eps": 1e-5,
    }
    if family != "qwen2":  # whose heads are hidden / heads wide by definition
        keys["head_dim"] = 16
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[family])
    keys |= config
    model = model_class(config_class(**(keys if family != "gemma3 that sees" else _beside_vision(keys))))
    randomize(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="40KB" if sharded else "1GB")
    return folder


def _beside_vision(keys: dict[str, Any]) -> dict[str, Any]:
    """``keys`` as the text part of a model that also takes images, of the smallest kind there is."""
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vision = {**dict.fromkeys(sizes, 2), "num_attention_heads": 1, "image_size": 4, "patch_size": 2}
    return {
        "text_config": keys,
        "vision_config": vision,
        "tie_word_embeddings": keys["tie_word_embeddings"],
        "mm_tokens_per_image": 4,
    }


def randomize(model: Any, seed: int) -> None:
    """Weights of about unit gain, norms about 1, biases that matter."""
    gemma = model.config.model_type.startswith("gemma")
    norm = 0.0 if gemma else 1.0  # it adds the 1, and scales what it embeds
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(norm + 0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.5 * noise)
            else:
                gain = 1.5 / parameter.size(-1) ** 0.5
                parameter.copy_(noise * (gain * gain if gemma and "embed" in name else gain))
        model.tie_weights()


@cache
def reference(folder: Path, dtype: str = "float32") -> Any:
    """transformers' model of a checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.eval()


def reference_answer(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """``count`` greedy tokens after ``prompt`` by transformers in float32, whatever ids they are."""
    model = reference(folder)
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return [int(token) for token in out[0, len(prompt) :]]


def reference_logits(folder: Path, tokens: Sequence[int], dtype: str = "float32") -> torch.Tensor:
    """(tokens, vocab) float32 logits by transformers computing in ``dtype``."""
    with torch.no_grad():
        logits: torch.Tensor = reference(folder, dtype)(torch.tensor([list(tokens)])).logits[0].float()
    return logits


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of ``config.json``; None removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for key, value in changes.items():
        values.pop(key, None)
        if value is not None:
            values[key] = value
    path.write_text(json.dumps(values))
