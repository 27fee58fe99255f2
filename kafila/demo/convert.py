"""The conversion itself: a whole checkpoint folder or none.

The folder is made under a temporary name beside its place and renamed when every byte is on the disk, so a reader never
sees half of it and a killed conversion leaves only a folder that the next one removes. A lock lets two conversions
started together do the work once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kafila.demo import vocabulary, weights
from kafila.demo.source import Source, open_gguf
from kafila.errors import ModelError, UsageError

CONVERSION = "1"
"""Written into the weights file; raise it when the output changes, and folders of an older conversion are made anew."""

WEIGHTS = "model.safetensors"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)

_ROOM_TO_SPARE_BYTES = 16 << 20
"""Beyond the weights: tokenizer.json (4 MB at 49,152 tokens) and the file system's own."""

_MAX_HEADER_BYTES = 64 << 20
"""More than any safetensors header has; a larger length means that the file is something else."""

Report = Callable[[str], None]
"""Takes one line of progress for a person."""


def convert(gguf: Path, folder: Path, report: Report) -> None:
    """Make ``folder`` a checkpoint with the weights of ``gguf``, unless it is one already.

    Raises `ModelError` (not found, incomplete, unsupported, or the disk refused) and `UsageError` where ``folder``
    holds something that is not ours to replace.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock"), report):
            if is_whole(folder):
                report(f"{folder} is ready")
                return
            _convert(gguf, folder, report)
    except OSError as error:
        raise ModelError(f"cannot write the checkpoint {folder}: {error.strerror or error}") from error


def is_whole(folder: Path) -> bool:
    """Whether this version of the conversion made ``folder`` and its weights have their whole length."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    path = folder / WEIGHTS
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            return False
        try:
            table = json.loads(file.read(length))
            version = table.pop("__metadata__")["kafila_conversion"]
            end = max(entry["data_offsets"][1] for entry in table.values())
        except (ValueError, KeyError, TypeError, AttributeError):  # some other program's file
            return False
    return bool(version == CONVERSION and path.stat().st_size == 8 + length + end)


def _convert(gguf: Path, folder: Path, report: Report) -> None:
    _refuse_to_replace_what_is_not_ours(folder)
    source = open_gguf(gguf)
    tensors = weights.plan_tensors(source)
    size_bytes = sum(tensor.size_bytes for tensor in tensors)
    report(f"converting {gguf.name}: {len(tensors)} tensors, {size_bytes / 1e6:.0f} MB at bfloat16")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a conversion that was killed: nobody else holds the lock
    _check_room(folder.parent, size_bytes)
    partial.mkdir()
    try:
        for name, content in _descriptions(source).items():
            with _durable(partial / name) as file:
                file.write(json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n")
        with _durable(partial / WEIGHTS) as file:
            metadata = {"format": "pt", "kafila_conversion": CONVERSION}
            weights.write(tensors, metadata, file, _quarters(size_bytes, report))
        _replace(partial, folder)
    except BaseException:  # Ctrl-C too: a checkpoint's worth of disk is not left behind
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report(f"{folder} is ready")


def _descriptions(source: Source) -> dict[str, dict[str, Any]]:
    """The checkpoint's JSON files, by name."""
    ids = {f"{role}_token_id": number for role, number in vocabulary.special_ids(source).items() if role != "unk"}
    return {
        "config.json": {**_architecture(source), **ids},
        "generation_config.json": ids,
        "tokenizer.json": vocabulary.tokenizer_json(source),
        "tokenizer_config.json": vocabulary.tokenizer_config(source),
    }


def _architecture(source: Source) -> dict[str, Any]:
    """What config.json says of the network, in the keys of transformers' LlamaConfig."""

    def setting(name: str) -> Any:
        return source.need(f"llama.{name}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(setting("embedding_length")),
        "intermediate_size": int(setting("feed_forward_length")),
        "num_hidden_layers": int(setting("block_count")),
        "num_attention_heads": int(setting("attention.head_count")),
        "num_key_value_heads": int(setting("attention.head_count_kv")),
        "head_dim": int(setting("rope.dimension_count")),
        "max_position_embeddings": int(setting("context_length")),
        "rms_norm_eps": _as_written(setting("attention.layer_norm_rms_epsilon")),
        "rope_theta": _as_written(setting("rope.freq_base")),
        "rope_scaling": None,
        "vocab_size": len(source.need("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "attention_bias": "blk.0.attn_q.bias" in source.tensors,
        "mlp_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def _as_written(value: float) -> float:
    """The shortest decimal that is the stored 32-bit number: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _quarters(total_bytes: int, report: Report) -> Callable[[int], None]:
    """A counter that reports each quarter of ``total_bytes`` once."""
    done_bytes = 0

    def wrote(size_bytes: int) -> None:
        nonlocal done_bytes
        before = 4 * done_bytes // total_bytes
        done_bytes += size_bytes
        if (now := 4 * done_bytes // total_bytes) > before:
            report(f"converted {25 * now}%")

    return wrote


def _refuse_to_replace_what_is_not_ours(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or (foreign := sorted({path.name for path in folder.iterdir()} - set(FILES))):
        holds = f"holds {foreign[0]}" if folder.is_dir() else "is a file"
        raise UsageError(f"{folder} {holds}, which the conversion did not write: name an empty folder with --output")


def _check_room(place: Path, size_bytes: int) -> None:
    free_bytes, needed_bytes = shutil.disk_usage(place).free, size_bytes + _ROOM_TO_SPARE_BYTES
    if free_bytes < needed_bytes:
        raise ModelError(
            f"the checkpoint needs {needed_bytes / 1e6:.0f} MB; the disk of {place} has {free_bytes / 1e6:.0f} MB free:"
            " make room, or name a folder elsewhere with --output"
        )


def _replace(partial: Path, folder: Path) -> None:
    if folder.exists():  # older or cut short; `_refuse_to_replace_what_is_not_ours` has looked inside
        shutil.rmtree(folder)
    partial.rename(folder)
    _sync(folder.parent)


@contextmanager
def _durable(path: Path) -> Iterator[BinaryIO]:
    """A new file whose bytes are on the disk when the block ends, so that the later rename cannot overtake them."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold the lock file ``path``; the system lets go of it when the process ends, however it ends."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is converting the model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
