"""Values that more than one room speaks of: frozen, without behaviour, standard library only.

A room (``nat``, ``ring``, ``plan``, ``shard``) never imports another; what they must agree on stands here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

NodeId = NewType("NodeId", bytes)
"""Eight bytes: the first eight of the SHA-256 of the node's certificate (DER), so an id cannot be claimed
without the certificate whose fingerprint it abbreviates. Compared as bytes it fixes QUIC roles."""

NODE_ID_BYTES = 8


THINKING_TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<reasoning>": "</reasoning>",
    "[THINK]": "[/THINK]",
}
"""How checkpoints mark what they think before they answer, opening tag to closing tag."""


class Address(NamedTuple):
    """An IP literal (v4 or v6, no zone) and a UDP port."""

    host: str
    port: int


class Transmit(NamedTuple):
    """One datagram a machine wants sent."""

    data: bytes
    to: Address


class NatClass(Enum):
    """The paper's three behaviour classes (Section V-B)."""

    PERMISSIVE = "permissive"
    ORDINARY = "ordinary"
    RESTRICTIVE = "restrictive"


class PathKind(Enum):
    """How an edge's datagrams travel."""

    DIRECT = "direct"
    RELAYED = "relayed"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint: where its bytes lie.

    ``dtype`` is the safetensors name (``BF16``, ``F32`` ...); ``start`` and ``end`` are byte offsets in ``file``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ExpertBytes:
    """What is read of blocks with experts, of which a token goes through some: means over the model's blocks, so that a
    model of which some blocks have none is described too."""

    count: int
    """Experts in a block."""
    active: int
    """How many of them a token goes through."""
    shared_bytes: int
    """What every token reads of a block: all but the experts."""
    expert_bytes: int
    """All experts of a block together."""


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """What the planner must know of a model, all sizes in bytes (paper Section V-A, beta_block and beta_head)."""

    name: str
    blocks: int
    block_bytes: int
    """Weights of one transformer block (the largest, should they differ)."""
    head_bytes: int
    """Resident head: embedding + final norm + unembedding; tied embeddings counted once."""
    head_read_bytes: int
    """What the head reads per token: the unembedding and the norm (an embedding lookup reads one row)."""
    kv_bytes_per_token_per_block: int
    hidden_bytes: int
    """One token's activation as it crosses an edge."""
    max_context: int
    experts: ExpertBytes | None = None
    """``None``: a token reads every weight of a block."""


@dataclass(frozen=True, slots=True)
class Capability:
    """One member's device as its probe measured it; ``None`` where a measurement failed (Section V-D tiers)."""

    device: str
    """For people: ``cpu (2 threads)``, ``cuda:0 NVIDIA L40S``."""
    memory_bytes: int
    """Room for weights, KV cache and workspace, the reserve already taken off."""
    bandwidth_bytes_per_s: float | None
    overhead_s: float | None
    """Fixed per-token dispatch overhead, o_i of equation (2)."""
    flops: float | None
    bandwidth_spread: float = 0.0
    """By how much of its median the speed varied over the probe's repeats, the outermost tenths left out."""
    head_bytes_per_s: float | None = None
    """How fast the head's own part (final norm, unembedding, drawing a token) goes through the bytes it reads; ``None``
    where that was not measured: as fast as blocks."""
    block_memory_bytes: int | None = None
    """What one block's weights take on this device, padding included; ``None``: what the manifest says."""
    head_memory_bytes: int | None = None
    """What embedding, final norm and unembedding take; likewise."""
    workspace_bytes: int = 0
    """What loading and computing need for a while besides weights and caches, at the offered context and slots."""
    remarks: tuple[str, ...] = ()
    """For the device's owner: what the figures may suffer from, or that they are older."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks ``first`` (inclusive) to ``stop`` (exclusive) of the model."""

    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's share of a ragged batch: ``length`` tokens beginning at absolute position ``start``.

    A member cuts the cache of ``slot`` back to ``start`` tokens before it appends, so a slot is reused by starting
    at 0 and a speculative branch is dropped by starting earlier. ``sample`` asks the head for a token after the
    last position (a prefill chunk that is not the prompt's last does not want one).
    """

    slot: int
    start: int
    length: int
    sample: bool


def last_rows(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Each segment's last row: all that a token can be drawn from. The same tuple where there are no other rows."""
    if all(segment.length == 1 for segment in segments):
        return segments
    return tuple(Segment(s.slot, s.start + s.length - 1, 1, s.sample) for s in segments)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are drawn. ``temperature`` 0 is greedy. ``seed`` with the position of the token decides
    the draw, whatever else shares its batch."""

    temperature: float = 0.0
    top_k: int = 0
    """0: no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that prompt or answer hold, multiplies the negative ones; 1: off."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the answer holds."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token once for each time that the answer holds it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    logprobs: int = 0
    """How many of the likeliest tokens are reported with every token, itself besides; 0: none is."""

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on which tokens came before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


class Best(NamedTuple):
    """The likeliest token among some rows of the vocabulary."""

    logit: float
    """A float32 value, finite."""
    token: int
    """The lowest id where several have the largest logit."""


SCORED_ROWS_UNIT = 64
"""Where the vocabulary is cut: a multiple of every width that packed matrices have columns in."""


def scored_from(vocab: int, percent: int) -> int:
    """The first of the last ``percent`` of the vocabulary's rows, which a ring's last member scores while the head
    scores those before; ``vocab`` where there are none."""
    first = vocab - vocab * percent // 100
    return vocab if first == vocab else first // SCORED_ROWS_UNIT * SCORED_ROWS_UNIT


class History(NamedTuple):
    """The tokens of a request before the one that is drawn."""

    prompt: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()


class TokenLogprobs(NamedTuple):
    """A drawn token and the likeliest tokens in its place, likeliest first, with natural logarithms of what the model
    itself gives them: before temperature, penalties and limits."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class SpelledLogprobs(NamedTuple):
    """:class:`TokenLogprobs` with the bytes that tokens add to a text in the place of ids; a token may hold a part of
    a character."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str
    extra: str = ""
    """JSON object of whatever else the checkpoint's template reads of a turn: ``tool_calls``, ``tool_call_id``,
    ``name``, ``reasoning_content``. Empty: nothing."""


@dataclass(frozen=True, slots=True)
class Question:
    """What somebody asks of a session: a conversation, or a text to continue. :mod:`kafila.question` checks it."""

    messages: tuple[Message, ...] = ()
    """Oldest first; the answer is the next turn."""
    prompt: str | None = None
    """A text to continue as it is, special tokens in it being such, without the chat template; then no messages."""
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 0
    """0: until the model stops or the context is full."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these."""
    tools: str = ""
    """JSON list of the tools that the chat template tells the model of, as OpenAI writes them. Empty: none."""
    template_options: str = ""
    """JSON object of variables for the chat template (``enable_thinking`` and the like). Empty: none."""
    rolling: bool = False
    """Where the conversation is longer than the context, leave out its oldest turns (:mod:`kafila.rolling`)."""


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    CANCELLED = "cancelled"
    MEMBER_LEFT = "member-left"
    BUSY = "busy"
    """Not begun: too many wait already."""
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of a checkpoint's file, as one member asks another for them."""

    file: str
    start: int
    end: int
    """Exclusive; fewer may come."""
    size: int = 0
    """Of the whole file, where it is known; 0: not known yet, as of everything below that is empty."""
    etag: str = ""
    """What its source told it apart by."""
    revision: str = ""
    """The hub's commit."""
    layout: bytes = b""
    """SHA-256 of a safetensors file's header (32 bytes): which tensor is where in it."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Bytes of a file from ``start`` on, and which file they are of."""

    start: int
    size: int
    etag: str
    data: bytes


class Withheld(Enum):
    """Why a member does not give a part of a file."""

    NOT_SHARING = 0
    """Its owner has not allowed it."""
    NOT_HELD = 1
    OTHER_VERSION = 2
    """It holds another file under that name."""
    ABSENT = 3
    """The checkpoint has no such file."""
    BUSY = 4
    """More was asked at once than is allowed."""
