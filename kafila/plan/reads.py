"""What a batch reads of a block: all of its weights, or of a block with experts those that its tokens go through.

Weights that a member holds and weights that a token reads are two figures then: memory and fetching count the first,
time the second. A token goes through k of a block's E experts. Where a router spreads tokens evenly (they are trained
to), an expert is left out by one token with probability 1 - k/E and by n tokens with (1 - k/E)^n, so a batch of n is
expected to read E (1 - (1 - k/E)^n) experts.
"""

from __future__ import annotations

from kafila.types import ModelManifest


def read_bytes(manifest: ModelManifest, rows: int = 1) -> int:
    """Bytes of a block's weights that a batch of ``rows`` tokens is expected to read: the mean over the model's blocks
    where only some have experts."""
    experts = manifest.experts
    if experts is None:
        return manifest.block_bytes
    left_out = (1 - experts.active / experts.count) ** rows
    return experts.shared_bytes + round(experts.expert_bytes * (1 - left_out))
