"""The deployed backend: a real device, real checkpoints; what blocks runs in threads (Trio)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import trio

from kafila.backend import Duty, Worker
from kafila.errors import SourceSilent, UsageError
from kafila.head import Language
from kafila.ring.agreement import ModelOffer
from kafila.shard.config import DecoderConfig, parse_config
from kafila.shard.devices import open_ops
from kafila.shard.library import Library, Wanted
from kafila.shard.manifest import model_manifest
from kafila.shard.patience import Patience
from kafila.shard.schemes import with_scheme
from kafila.shard.worker import Coming, Result, ShardWorker, Stage
from kafila.sharing import Sharing
from kafila.types import Capability, FilePart, FilePiece, Withheld

if TYPE_CHECKING:
    from kafila.shard.ops import Ops  # imports numpy, which a machine that only reads errors may lack

DEFAULT_CONTEXT = 4096
"""Tokens a conversation may hold where nobody says: the paper's evaluation reserves this much, and a model that can
hold more would otherwise reserve memory for prompts that never come."""
INBOX_JOBS = 128
"""Twice the batches a member may hold (``serve.MAX_PENDING_BATCHES``): each may have a pass and a draw waiting."""
COMING_EVERY_S = 0.25
"""Between two words about bytes that have come: what a person sees move, and nothing to the event loop."""
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
    quantize: str = ""
    """Of the session, at the host: one of `kafila.shard.schemes.SCHEMES`."""
    kv_dtype: str = "auto"
    """Of the session, at the host; ``auto`` is ``dtype``."""
    threads: int | None = None
    memory_bytes: int | None = None
    probe_cache: bool = True
    """Whether what was measured within the last day will do."""


class DeviceBackend:
    """A device under torch or MLX."""

    def __init__(
        self,
        settings: DeviceSettings,
        told: Callable[[str], None] | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        """``told`` hears what people should know of the checkpoint's source, from any thread. ``sharing``: what this
        machine has of the checkpoint is given to neighbours, and they are asked; None: neither."""
        self._settings = settings
        self._told = told or _unheard
        self._sharing = sharing
        self._library = Library(self._told, sharing)
        if sharing is not None:
            sharing.give_from(self._give)

    def close(self) -> None:
        """Let go of checkpoint and source; nothing may be asked any more."""
        self._library.close()

    async def offer(self, model: str, context: int | None, slots: int) -> ModelOffer:
        """Read a checkpoint's configuration and headers; raises ModelError, or UsageError for too long a context."""
        return await trio.to_thread.run_sync(self._offer, model, context, slots, abandon_on_cancel=True)

    def _offer(self, model: str, context: int | None, slots: int) -> ModelOffer:
        found = self._library.look(Wanted(model))
        checkpoint = found.checkpoint
        config = with_scheme(checkpoint.config, self._settings.quantize)
        dtype = _dtype(config) if self._settings.dtype == "auto" else self._settings.dtype
        kv_dtype = "" if self._settings.kv_dtype == "auto" else self._settings.kv_dtype
        limit = checkpoint.config.max_context
        if context is not None and context > limit:
            raise UsageError(
                f"{checkpoint.name} was made for {limit} tokens: --context {context} is more than it can hold"
            )
        return ModelOffer(
            manifest=model_manifest(checkpoint.name, config, dtype, kv_dtype),
            source=found.wanted.source,
            config=checkpoint.config_text,
            dtype=dtype,
            context=context or min(limit, DEFAULT_CONTEXT),
            slots=slots,
            quantize=self._settings.quantize,
            kv_dtype=kv_dtype,
            revision=found.wanted.revision,
            fingerprint=found.wanted.fingerprint,
        )

    async def measure(self, offer: ModelOffer) -> Capability:
        """Measure with the model's shapes. The checkpoint is looked at before, so that trouble shows early."""
        await trio.to_thread.run_sync(self._look, offer, abandon_on_cancel=True)
        return await trio.to_thread.run_sync(self._measure, offer)

    def _look(self, offer: ModelOffer) -> None:
        try:
            self._library.look(_wanted(offer))
        except SourceSilent as silent:
            if self._sharing is None:
                raise _suggesting_neighbours(silent) from silent
            self._told(f"{silent}; neighbours are asked for it once the ring is formed")

    def _give(self, part: FilePart) -> FilePiece | Withheld:
        held = self._library.held
        return Withheld.NOT_HELD if held is None else held.read(part)

    def _measure(self, offer: ModelOffer) -> Capability:
        # Imports numpy, slow and not needed for errors.
        from kafila.shard.probe_cache import ProbeCache, default_path, measure_or_recall  # noqa: PLC0415  - numpy

        return measure_or_recall(
            self._ops(offer.dtype),
            with_scheme(parse_config(offer.config), offer.quantize),
            ProbeCache(default_path(), time.time) if self._settings.probe_cache else None,
            context=offer.context,
            slots=offer.slots,
            memory_cap=self._settings.memory_bytes,
        )

    async def worker(self, offer: ModelOffer, duty: Duty, on_result: Callable[[Result], None]) -> Worker:
        """A worker thread that loads its shard first."""
        await trio.lowlevel.checkpoint()
        patience = Patience()
        return ShardWorker(
            lambda: self._load(offer, duty, on_result, patience),
            on_result,
            inbox=INBOX_JOBS,
            give_up=patience.stopping.set,
        )

    def _load(self, offer: ModelOffer, duty: Duty, on_result: Callable[[Result], None], patience: Patience) -> Stage:
        from kafila.shard.load import load_shard  # noqa: PLC0415  - as above

        try:
            checkpoint = self._library.share(
                _wanted(offer),
                duty.blocks,
                holds_head=duty.holds_head,
                progress=_now_and_then(on_result),
                patience=patience,
                scored_percent=duty.scored_percent,
            )
        except SourceSilent as silent:
            alone = duty.blocks.stop - duty.blocks.first == offer.manifest.blocks
            if alone or self._sharing is not None:
                raise
            raise _suggesting_neighbours(silent) from silent
        return load_shard(
            self._ops(duty.dtype),
            replace(checkpoint, config=with_scheme(checkpoint.config, offer.quantize)),
            duty.blocks,
            holds_head=duty.holds_head,
            slots=duty.slots,
            context=duty.context,
            kv_dtype=offer.kv_dtype,
            scored_percent=duty.scored_percent,
            spare_bytes=duty.spare_bytes,
        )

    async def language(self, offer: ModelOffer) -> Language:
        """The checkpoint's tokenizer and template."""
        return await trio.to_thread.run_sync(self._language, offer, abandon_on_cancel=True)

    def _language(self, offer: ModelOffer) -> Language:
        from kafila.shard.chat import ChatFormat  # noqa: PLC0415  - as above

        return ChatFormat.load(self._library.language(_wanted(offer)), lambda: datetime.now().astimezone())

    def _ops(self, dtype: str) -> Ops[Any]:
        asked = self._settings
        return open_ops(asked.device, dtype, threads=asked.threads, memory_cap=asked.memory_bytes)


def _suggesting_neighbours(silent: SourceSilent) -> SourceSilent:
    return SourceSilent(f"{silent}; a neighbour in the ring that has it gives it if both start with --share-weights")


def _unheard(_line: str) -> None:
    pass


def _dtype(config: DecoderConfig) -> str:
    """What to compute in where nobody says. Kernels for few bits want 16-bit sessions; float32 adds nothing there."""
    return "bfloat16" if config.quantization is not None and config.dtype == "float32" else config.dtype


def _wanted(offer: ModelOffer) -> Wanted:
    return Wanted(offer.source, offer.revision, offer.fingerprint, offer.manifest.name)


def _now_and_then(on_result: Callable[[Result], None]) -> Callable[[int, int], None]:
    """Progress as results: the last always, others some time after one another."""
    told = -COMING_EVERY_S

    def progress(done: int, wanted: int) -> None:
        nonlocal told
        now = time.monotonic()
        if done == wanted or now >= told + COMING_EVERY_S:
            told = now
            on_result(Coming(done, wanted))

    return progress
