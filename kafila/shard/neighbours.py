"""Members that may hold what a checkpoint's source does not give, as those who fetch see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kafila.shard.patience import Patience
from kafila.types import FilePart, FilePiece


@dataclass(frozen=True, slots=True)
class Nobody:
    """No neighbour gives a part; ``reasons`` in words. ``absent``: the checkpoint has no such file."""

    reasons: str
    absent: bool = False
    unasked: bool = False
    """There are no neighbours yet: the ring is not formed."""


class Neighbours(Protocol):
    """Any thread may ask."""

    def ask(self, part: FilePart, patience: Patience) -> FilePiece | Nobody:
        """The part or its beginning, once somebody gives it. Raises FetchFailed when this member is leaving."""
        ...
