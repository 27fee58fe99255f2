"""What ``--quantize`` makes of a checkpoint: which matrices are held how. Members quantize while they load.

``int8``: 8 bits, one scale an output. ``int4``: 4 bits in groups of 32 inputs, which take 5 bits a weight where groups
of 64 take 4.5 and halve what a small model loses. As in ``int8`` stay embedding and unembedding, through which every
token's logits go, and of each block the matrices of ``_SENSITIVE``: 28% of SmolLM2's blocks, which in 4 bits account
for most of what it would lose (``bench/perplexity.py``).
"""

from __future__ import annotations

from dataclasses import replace

from kafila.errors import UsageError
from kafila.shard.config import DecoderConfig
from kafila.shard.experts import ROUTER
from kafila.shard.formats import Affine, Quantization
from kafila.shard.manifest import expected_tensors

SCHEMES = ("int8", "int4")
_INT8 = Affine(8, 0)
_INT4 = Affine(4, 32)
_SENSITIVE = ("v_proj.weight", "down_proj.weight")


def with_scheme(config: DecoderConfig, scheme: str) -> DecoderConfig:
    """``config`` with its matrices quantized by ``scheme``, one of `SCHEMES`; empty: as they are.

    Raises UsageError for a checkpoint that is quantized already.
    """
    if not scheme:
        return config
    if config.quantization is not None:
        raise UsageError("this checkpoint is quantized already: leave --quantize away")
    matrices = {name: shape for name, shape in expected_tensors(config).items() if len(shape) == 2}
    overrides = {name.removesuffix(".weight"): _form(scheme, name, inputs) for name, (_, inputs) in matrices.items()}
    return replace(config, quantization=Quantization(_INT8, overrides, stored=False))


def _form(scheme: str, name: str, inputs: int) -> Affine | None:
    if name.endswith(ROUTER):
        return None  # small, and what it rounds differently sends a token through other experts
    in_block = name.startswith("model.layers.")
    forms = (_INT4, _INT8) if scheme == "int4" and in_block and not name.endswith(_SENSITIVE) else (_INT8,)
    return next((form for form in forms if form.fits(inputs)), None)
