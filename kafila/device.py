"""The deployed backend: a real device, real checkpoints; what blocks runs in threads (Trio)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from kafila.backend import Duty, Worker
from kafila.errors import DeviceError, UsageError
from kafila.head import Language
from kafila.ring.agreement import ModelOffer
from kafila.shard.config import parse_config
from kafila.shard.manifest import model_manifest, open_checkpoint
from kafila.shard.worker import Result, ShardWorker, Stage
from kafila.types import Capability

if TYPE_CHECKING:
    from kafila.shard.ops import Ops  # imports numpy, which a machine that only reads errors may lack

DEFAULT_CONTEXT = 4096
"""Tokens a conversation may hold where nobody says: the paper's evaluation reserves this much, and a model that can
hold more would otherwise reserve memory for prompts that never come."""
INBOX_JOBS = 128
"""Twice the batches a member may hold (``serve.MAX_PENDING_BATCHES``): each may have a pass and a draw waiting."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes in ``12GB``, ``800 MiB`` or ``1e9``-free plain numbers. Raises UsageError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size: write it as 12GB or 800MiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """What a person asked to compute with."""

    device: str = "auto"
    dtype: str = "auto"
    """Of the session, at the host; ``auto`` is the checkpoint's own."""
    threads: int | None = None
    memory_bytes: int | None = None


class DeviceBackend:
    """A device under torch or MLX."""

    def __init__(self, settings: DeviceSettings) -> None:
        self._settings = settings

    async def offer(self, model: str, context: int | None, slots: int) -> ModelOffer:
        """Read a checkpoint's configuration and headers; raises ModelError, or UsageError for too long a context."""
        return await trio.to_thread.run_sync(self._offer, model, context, slots)

    def _offer(self, model: str, context: int | None, slots: int) -> ModelOffer:
        checkpoint = open_checkpoint(Path(model).expanduser())
        dtype = checkpoint.config.dtype if self._settings.dtype == "auto" else self._settings.dtype
        limit = checkpoint.config.max_context
        if context is not None and context > limit:
            raise UsageError(
                f"{checkpoint.name} was made for {limit} tokens: --context {context} is more than it can hold"
            )
        return ModelOffer(
            manifest=model_manifest(checkpoint.name, checkpoint.config, dtype),
            source=str(checkpoint.folder.resolve()),
            config=checkpoint.config_text,
            dtype=dtype,
            context=context or min(limit, DEFAULT_CONTEXT),
            slots=slots,
        )

    async def measure(self, offer: ModelOffer) -> Capability:
        """Measure with the model's shapes; the checkpoint must be there already, so that trouble shows early."""
        return await trio.to_thread.run_sync(self._measure, offer)

    def _measure(self, offer: ModelOffer) -> Capability:
        from kafila.shard.probe import measure  # noqa: PLC0415  - imports numpy, slow and not needed for errors

        open_checkpoint(Path(offer.source))
        return measure(self._ops(offer.dtype), parse_config(offer.config), memory_cap=self._settings.memory_bytes)

    async def worker(self, offer: ModelOffer, duty: Duty, on_result: Callable[[Result], None]) -> Worker:
        """A worker thread that loads its shard first."""
        await trio.lowlevel.checkpoint()
        return ShardWorker(lambda: self._load(offer, duty), on_result, inbox=INBOX_JOBS)

    def _load(self, offer: ModelOffer, duty: Duty) -> Stage:
        from kafila.shard.load import load_shard  # noqa: PLC0415  - as above

        return load_shard(
            self._ops(duty.dtype),
            open_checkpoint(Path(offer.source)),
            duty.blocks,
            holds_head=duty.holds_head,
            slots=duty.slots,
            context=duty.context,
        )

    async def language(self, offer: ModelOffer) -> Language:
        """The checkpoint's tokenizer and template."""
        return await trio.to_thread.run_sync(_language, Path(offer.source))

    def _ops(self, dtype: str) -> Ops[Any]:
        asked = self._settings
        try:
            from kafila.shard.devices import open_ops  # noqa: PLC0415  - as above
        except ModuleNotFoundError as error:
            raise DeviceError(
                f"this installation holds no share of a model ({error.name} is missing): "
                "pip install 'kafila[torch]', or on Apple silicon 'kafila[mlx]'"
            ) from error
        return open_ops(asked.device, dtype, threads=asked.threads, memory_cap=asked.memory_bytes)


def _language(folder: Path) -> Language:
    from kafila.shard.chat import ChatFormat  # noqa: PLC0415  - as above

    return ChatFormat.load(folder, lambda: datetime.now().astimezone())
