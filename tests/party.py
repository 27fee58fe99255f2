"""Whole sessions of nodes with stand-in shards; the simulator's scenarios need them too, so they live there."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from kafila.ring.invite import HostPort
from sims.standin_party import BLOCKS, CONTEXT, Guest, Party, Screen, answer_of, first_of, solo

__all__ = ["BLOCKS", "CONTEXT", "Guest", "Party", "Screen", "answer_of", "first_of", "form_ring", "solo"]


async def form_ring(party: Party, guests: Sequence[Guest], where: HostPort) -> None:
    """The first hosts, the others join, and all serve."""
    code = await party.host(guests[0], len(guests), rendezvous=where)
    for guest in guests[1:]:
        party.join(guest, code)
    with trio.fail_after(30):
        for guest in guests:
            await guest.serving.wait()
