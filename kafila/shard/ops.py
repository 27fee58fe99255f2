"""What the decoder asks of a tensor library: a dozen operations, written once per backend.

``T`` is the backend's own tensor, opaque everywhere else. Activations are rows of shape (rows, width). Operations may
reuse the storage of the activations they are given, so a caller uses only what they return.

Rotary embeddings turn *neighbouring* pairs (2i, 2i+1) of a head. Checkpoints pair i with i + head_dim/2; the loader
reorders the rows of q and k once, because a pair side by side is one complex number and RoPE one multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kafila.shard.formats import WORD_BITS, Affine
from kafila.types import Segment

T = TypeVar("T")

PROMPT_ROWS = 32
"""From how many rows on a block is run as `Ops.prompt_block`, where there is one. At 16 torch's packed matrices are
quicker than bfloat16 ones on a processor with AVX-512's arithmetic for it, at 64 they take half as long again."""

Matrix = Callable[[T], T]
"""A weight ready to be applied: (rows, inputs) to (rows, outputs), bias included. How it is stored (packed, half,
quantized) is the backend's business."""


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in main memory as a checkpoint stores it. numpy has no bfloat16: BF16 is held as its bits (uint16)."""

    dtype: str
    """The safetensors name: ``F32``, ``BF16``, ``F16``."""
    data: npt.NDArray[Any]
    """Of the tensor's shape; writable, or in memory mapped copy-on-write (those of a `StoredBlock`: read-only)."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix (outputs, inputs) in few bits, in main memory: w = scale * code + bias, a scale and a bias a group."""

    codes: npt.NDArray[np.uint32]
    """(outputs, inputs * bits / 32): an output's codes as one little-endian stream of bits, the first lowest."""
    scales: HostTensor
    """(outputs, inputs / group size)."""
    biases: HostTensor
    """Likewise."""
    bits: int
    """2, 3, 4, 5, 6 or 8."""
    group_size: int
    """32, 64 or 128 as checkpoints have it; or all inputs (which we make: a backend without that kernel repeats scales
    and biases for smaller groups)."""

    @property
    def outputs(self) -> int:
        """Rows."""
        return int(self.codes.shape[0])

    @property
    def inputs(self) -> int:
        """Columns, unpacked."""
        return int(self.codes.shape[1]) * WORD_BITS // self.bits

    def rows(self, index: Any) -> QuantizedTensor:
        """Some outputs, by whatever numpy takes as an index; they share memory where numpy lets them."""
        scales, biases = (HostTensor(part.dtype, part.data[index]) for part in (self.scales, self.biases))
        return QuantizedTensor(self.codes[index], scales, biases, self.bits, self.group_size)


HostMatrix = HostTensor | QuantizedTensor
"""A matrix in main memory, (outputs, inputs)."""

Table: TypeAlias = Any
"""An embedding as its backend holds it: a tensor, or codes with their scales. Opaque everywhere else."""


@dataclass(frozen=True, slots=True)
class Norm(Generic[T]):
    """An RMSNorm's constants as the backend wants them."""

    weight: T
    epsilon: T


@dataclass(frozen=True, slots=True)
class Mlp(Generic[T]):
    """A block's gated MLP."""

    up_gate: Matrix[T]
    """(rows, hidden) to (rows, 2 intermediate): up, then gate."""
    down: Matrix[T]
    activation: str = "silu"
    """Of the gate, as `Ops.gated` names them."""


Bank: TypeAlias = Any
"""A block's experts as their backend holds them. Opaque everywhere else."""


@dataclass(frozen=True, slots=True)
class Experts(Generic[T]):
    """A block's mixture of experts, in the place of its `Mlp`."""

    router: Matrix[T]
    """(rows, hidden) to (rows, experts)."""
    bank: Bank
    active: int
    """How many experts a row goes through."""
    normalised: bool
    """Their weights add up to 1."""


@dataclass(frozen=True, slots=True)
class BlockWeights(Generic[T]):
    """One decoder block. Matrices that read the same rows are fused, so each row is read once."""

    attention_norm: Norm[T]
    qkv: Matrix[T]
    """(rows, hidden) to (rows, (heads + 2 kv_heads) * head_dim): q, k, v beside each other, q and k in pair order."""
    qk_norm: Norm[T] | None
    """Weight of shape (heads + kv_heads, head_dim), in pair order."""
    o: Matrix[T]
    mlp_norm: Norm[T]
    mlp: Mlp[T] | Experts[T]
    attended_norm: Norm[T] | None = None
    """Of what attention gives, before it is added."""
    mlp_out_norm: Norm[T] | None = None
    """Likewise, the MLP."""
    stored: StoredBlock | None = None
    """The same matrices in their file, where `Ops.prompt_block` is to take them."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block's plain matrices as their checkpoint stores them, each (outputs, inputs), all of one dtype: qkv as in
    `BlockWeights`, in memory of its own, and those of o, up, gate and down in memory mapped from the file, not
    writable."""

    weights: tuple[HostTensor, ...]
    biases: tuple[HostTensor | None, ...]
    """Of each, (outputs,)."""


@dataclass(frozen=True, slots=True)
class ScoredRows(Generic[T]):
    """Some of the vocabulary's rows, and what comes before them."""

    norm: Norm[T]
    unembedding: Matrix[T]
    """(rows, hidden) to (rows, some tokens)."""
    first: int
    """The lowest id among the tokens."""


@dataclass(frozen=True, slots=True)
class HeadWeights(Generic[T]):
    """What the head holds besides its blocks."""

    table: Table
    """The embedding, (vocab, hidden)."""
    norm: Norm[T]
    unembedding: Matrix[T]
    own: ScoredRows[T] | None = None
    """The first rows of the unembedding, in the same memory, where the last member can score the others."""


class Divided(NamedTuple, Generic[T]):
    """A matrix, and its first outputs as one of their own: the same numbers, held once."""

    whole: Matrix[T]
    own: Matrix[T]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one block's attention, and what becomes of their scores."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    """The most positions a token sees, itself included; 0: no limit."""
    scale: float | None = None
    """Of scores; None: one over the root of ``head_dim``."""
    cap: float = 0.0
    """Scaled scores s become cap * tanh(s / cap); 0: they are as they are."""


@dataclass(slots=True)
class Placement(Generic[T]):
    """Where a ragged batch's rows lie, made once a forward pass and used by every block."""

    spans: list[int]
    """``slot, start, length`` of each segment, flattened: compiled kernels take plain lists."""
    rope: T
    """The rotation of each row's position, in the backend's form."""
    masks: dict[int, list[T]] = field(default_factory=dict)
    """By window: one mask a segment; filled as needed by the backend."""
    last_only: bool = False
    """After attention only each segment's last row goes on: nothing else is wanted of the model's last block."""

    def last_rows(self) -> list[int]:
        """Each segment's last row."""
        return [end - 1 for end in accumulate(self.spans[2::3])]


class Ops(Protocol[T]):
    """A device and its arithmetic. Not safe for more than one thread."""

    @property
    def device(self) -> str:
        """For people: ``cpu (2 threads)``."""
        ...

    @property
    def dtype(self) -> str:
        """What weights and caches are held in: ``float32``, ``bfloat16``, ``float16``."""
        ...

    def scope(self) -> AbstractContextManager[object]:
        """Entered around every use of the operations below."""
        ...

    def memory_bytes(self) -> int | None:
        """Free bytes of the memory that will hold the weights, where that is not main memory."""
        ...

    def matrix_bytes(self, outputs: int, inputs: int, stored: Affine | None = None) -> int:
        """What a matrix of that shape takes once it is placed, padding included; ``stored`` None: held in ``dtype``."""
        ...

    def table_bytes(self, vocab: int, hidden: int) -> int:
        """What an embedding takes once it is placed; 0 where it stays in its file, of which a token reads one row."""
        ...

    # Weights.

    def norm(self, weight: HostTensor, epsilon: float) -> Norm[T]:
        """RMSNorm over the last axis, whose length is that of ``weight``."""
        ...

    def matrix(self, parts: Sequence[HostMatrix], biases: Sequence[HostTensor] | None) -> Matrix[T]:
        """``parts`` (each (outputs, inputs)) stacked by their outputs into one matrix, and their biases likewise.

        Parts may be plain and quantized, and quantized in several ways; the backend may keep such parts apart and
        lay their outputs beside each other.
        """
        ...

    def expert_bank(self, experts: Iterable[tuple[Sequence[HostMatrix], HostMatrix]], count: int) -> Bank:
        """``count`` experts alike, each its up and gate (parts of one matrix) and its down; taken one after another, so
        that only one need be in main memory."""
        ...

    def table(self, weight: HostMatrix) -> Table:
        """An embedding, (vocab, hidden)."""
        ...

    def tied_matrix(self, table: Table) -> Matrix[T]:
        """The unembedding that shares ``table``'s weights."""
        ...

    def divided_matrix(self, weight: HostMatrix, first: int) -> Divided[T]:
        """`matrix` of one part without biases, and its outputs before ``first``, a multiple of 64."""
        ...

    def divided_tied_matrix(self, table: Table, first: int) -> Divided[T]:
        """`tied_matrix`, likewise."""
        ...

    def rope(self, frequencies: Sequence[float], context: int) -> T:
        """Rotations of positions 0 to ``context``, by radians a position; one frequency a pair."""
        ...

    def kv_storage(self, slots: int, context: int, kv_heads: int, head_dim: int, dtype: str = "") -> T:
        """Room for the keys and values of one block, in ``dtype`` (empty: that of the weights), taken from the device
        now."""
        ...

    # Arithmetic.

    def place(self, segments: Sequence[Segment], rope: T) -> Placement[T]:
        """Prepare a batch."""
        ...

    def embed(self, table: Table, tokens: Sequence[int]) -> T:
        """The rows of ``tokens``, (rows, hidden)."""
        ...

    def add(self, x: T, y: T) -> T:
        """x + y."""
        ...

    def scaled(self, x: T, factor: float) -> T:
        """x * factor, the factor rounded to ``dtype`` first."""
        ...

    def capped(self, x: T, cap: float) -> T:
        """cap * tanh(x / cap), in float32."""
        ...

    def rms_norm(self, x: T, norm: Norm[T]) -> T:
        """x / sqrt(mean(x^2) + epsilon) * weight, along the last axis, leaving ``x`` as it is."""
        ...

    def attention(self, qkv: T, shape: AttentionShape, qk_norm: Norm[T] | None, kv: T, placement: Placement[T]) -> T:
        """Normalise and rotate q and k, write k and v to ``kv`` at their positions, attend causally.

        Segments are done in order, so two of one slot may follow each other in a batch. Returns (rows, heads *
        head_dim), of each segment's last row alone where the placement says so.
        """
        ...

    def gated(self, up_gate: T, activation: str) -> T:
        """up * f(gate): (rows, 2n) to (rows, n). ``silu``: f is x * sigmoid(x); ``gelu_pytorch_tanh``: GELU by its
        approximation with tanh."""
        ...

    def mixture(self, x: T, experts: Experts[T]) -> T:
        """Each row through the experts that the router finds most probable (a softmax in float32), their outputs added
        up by those probabilities: (rows, hidden) to (rows, hidden)."""
        ...

    def take_rows(self, x: T, rows: Sequence[int]) -> T:
        """Some rows, in that order."""
        ...

    def fused_block(self, weights: BlockWeights[T], shape: AttentionShape) -> Callable[[T, T, Placement[T]], T] | None:
        """`kafila.shard.decoder.block` as one call (x, kv, placement), where the backend has that; the same numbers."""
        ...

    def takes_stored(self, dtype: str) -> bool:
        """Whether a prompt goes faster through matrices of this dtype (as safetensors names it) as they are stored than
        through those that `matrix` makes."""
        ...

    def prompt_block(self, weights: BlockWeights[T], shape: AttentionShape) -> Callable[[T, T, Placement[T]], T] | None:
        """`fused_block` through ``weights.stored``, for `PROMPT_ROWS` or more; None where nothing is stored."""
        ...

    # In and out.

    def from_bytes(self, data: bytes, dtype: str, width: int) -> T:
        """Row-major rows of ``width`` items of ``dtype``, as activations."""
        ...

    def to_bytes(self, x: T, dtype: str) -> bytes:
        """The reverse, rounded to ``dtype``; waits for the device."""
        ...

    def to_numpy(self, x: T) -> npt.NDArray[np.float32]:
        """Float32 in main memory; waits for the device."""
        ...
