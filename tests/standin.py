"""The exact stand-in for a shard; it lives with the simulator, whose scenarios need it too."""

from sims.standin import WORDS, Letters, StandInShard, solo_tokens

__all__ = ["WORDS", "Letters", "StandInShard", "solo_tokens"]
