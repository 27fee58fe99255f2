"""How a weight matrix is stored: plainly, or in few bits with a scale and a bias for every group of its inputs.

Standard library only: the planner reads sizes where no tensor library is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kafila.errors import ModelIncomplete, UnsupportedModel

WORD_BITS = 32
"""Codes are packed into words of this many bits."""
SUPPORTED_BITS = (2, 3, 4, 5, 6, 8)
SUPPORTED_GROUPS = (32, 64, 128)
_KEY = "config.json, quantization"


@dataclass(frozen=True, slots=True)
class Affine:
    """w = scale * code + bias, one scale and bias a group of ``group_size`` neighbouring inputs of an output (MLX's
    ``affine`` mode: https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html).
    """

    bits: int
    group_size: int
    """0: an output's inputs are one group."""

    def group(self, inputs: int) -> int:
        """Inputs that share a scale in a matrix of so many."""
        return self.group_size or inputs

    def words(self, inputs: int) -> int:
        """32-bit words an output's codes take."""
        return inputs * self.bits // WORD_BITS

    def fits(self, inputs: int) -> bool:
        """Whole groups and whole words."""
        return inputs % self.group(inputs) == 0 and inputs * self.bits % WORD_BITS == 0

    def bytes(self, outputs: int, inputs: int, constant_bytes: int = 2) -> int:
        """Codes, scales and biases of a matrix; ``constant_bytes`` is what one scale or bias takes."""
        return outputs * (4 * self.words(inputs) + 2 * constant_bytes * (inputs // self.group(inputs)))


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which matrices of a model are quantized, and how."""

    default: Affine
    overrides: Mapping[str, Affine | None] = field(default_factory=dict)
    """By module (``model.layers.3.mlp.down_proj``); None: held plainly."""
    stored: bool = True
    """The checkpoint's files hold it so; else members quantize while they load."""

    def of(self, module: str) -> Affine | None:
        """How a module's weight is held; None: plainly."""
        return self.overrides.get(module, self.default)


def parse_quantization(values: object) -> Quantization | None:
    """What MLX writes under ``quantization`` in ``config.json``: ``bits`` and ``group_size``, and by module (``false``,
    ``true``, or an object of its own) whatever is held otherwise.

    Raises UnsupportedModel for what we cannot read, ModelIncomplete for what makes no sense.
    """
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ModelIncomplete(f"{_KEY} is not a JSON object")
    default = _affine(_KEY, values, None)
    overrides: dict[str, Affine | None] = {}
    for module, value in values.items():
        if isinstance(value, dict):
            overrides[module] = _affine(f"{_KEY}, {module}", value, default)
        elif value is False:
            overrides[module] = None
    return Quantization(default, overrides)


def _affine(where: str, values: dict[str, object], default: Affine | None) -> Affine:
    bits = values.get("bits", default.bits if default else None)
    group_size = values.get("group_size", default.group_size if default else None)
    if (mode := values.get("mode", "affine")) != "affine":
        raise UnsupportedModel(f"{where}: the mode {mode!r} is not supported; supported is: affine")
    if bits not in SUPPORTED_BITS or group_size not in SUPPORTED_GROUPS:
        raise UnsupportedModel(
            f"{where}: {bits!r} bits in groups of {group_size!r} are not supported; supported are: "
            f"{_listed(SUPPORTED_BITS)} bits in groups of {_listed(SUPPORTED_GROUPS)}"
        )
    return Affine(int(bits), int(group_size))


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
