"""Whole sessions of nodes with stand-in shards; the simulator's scenarios need them too, so they live there."""

from sims.standin_party import BLOCKS, CONTEXT, Guest, Party, Screen, answer_of, first_of, solo

__all__ = ["BLOCKS", "CONTEXT", "Guest", "Party", "Screen", "answer_of", "first_of", "solo"]
