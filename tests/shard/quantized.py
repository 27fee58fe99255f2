"""MLX-format checkpoints made on the spot, each with a float32 twin of the same numbers for transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kafila.shard.formats import Affine
from kafila.shard.ops import HostTensor, QuantizedTensor
from kafila.shard.quantize import dequantize, quantize
from tests.shard.checkpoints import make_checkpoint

Override = Mapping[str, Any] | bool
SINGLE = "model.safetensors"
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
"""Shapes that are whole groups of 128."""


def mlx_checkpoint(
    folder: Path,
    family: str,
    default: Affine,
    overrides: Mapping[str, Override],
    *,
    tied: bool = False,
    **options: Any,
) -> tuple[Path, Path]:
    """A checkpoint as MLX writes it, and its twin. ``overrides`` by module, as they stand in ``config.json``."""
    twin = make_checkpoint(folder / "twin", family, tied=tied, **WIDE, **options)
    stored = folder / "stored"
    stored.mkdir()
    config = json.loads((twin / "config.json").read_text())
    config["quantization"] = {"bits": default.bits, "group_size": default.group_size, **overrides}
    config["quantization_config"] = config["quantization"]
    (stored / "config.json").write_text(json.dumps(config))
    plain, packed = load_file(twin / SINGLE), {}
    for name, tensor in list(plain.items()):
        form = _form(_stacked(name).removesuffix(".weight"), default, overrides) if tensor.dim() == 2 else None
        if form is None:
            packed[name] = tensor
            continue
        quantized = quantize(HostTensor("F32", tensor.numpy()), form)
        constants = {
            kind: torch.from_numpy(host.data).half()
            for kind, host in (("scales", quantized.scales), ("biases", quantized.biases))
        }
        rounded = {kind: HostTensor("F16", part.numpy()) for kind, part in constants.items()}
        exact = QuantizedTensor(quantized.codes, rounded["scales"], rounded["biases"], form.bits, form.group_size)
        plain[name] = torch.from_numpy(dequantize(exact))
        packed[name] = torch.from_numpy(quantized.codes)
        packed |= {name.replace(".weight", f".{kind}"): part for kind, part in constants.items()}
    save_file(_stack_experts(packed), stored / SINGLE, {"format": "mlx"})
    save_file(plain, twin / SINGLE, {"format": "pt"})
    return stored, twin


def _stacked(name: str) -> str:
    """The tensor in which MLX has an expert's."""
    return re.sub(r"\.experts\.\d+\.", ".switch_mlp.", name)


def _stack_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    groups: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        number = re.search(r"\.experts\.(\d+)\.", name)
        groups.setdefault(_stacked(name), []).append((int(number[1]) if number else 0, tensor))
    return {
        name: torch.stack([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
        if ".switch_mlp." in name
        else parts[0][1]
        for name, parts in groups.items()
    }


def _form(module: str, default: Affine, overrides: Mapping[str, Override]) -> Affine | None:
    override = overrides.get(module, True)
    if isinstance(override, bool):
        return default if override else None
    return Affine(override["bits"], override["group_size"])
