"""How a weight matrix is stored: plainly, or in few bits with a scale and a bias for every group of its inputs.

Standard library only: the planner reads sizes where no tensor library is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WORD_BITS = 32
"""Codes are packed into words of this many bits."""


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
