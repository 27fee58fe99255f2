"""What a chunk of a prompt adds to a batch that answers ride in, by where in the prompt it stands (pure).

A chunk of c tokens from place p costs a stage its rows' arithmetic and their attention to all that lies before: about
(b + d p) c, and something whatever c is: reading the p tokens' cache, and the weights where a device cannot share that
with the answers' rows. None of these is known beforehand. So nothing is fitted: what was measured lately near by, in
octaves of p, is scaled to the place in proportion, the most it can grow, and to the tokens half in proportion, for the
other half may not depend on them. Where all of it does, a chunk of a new size is once dearer than was thought, by a
third at most; what was measured for the size nearest to the one asked for is what counts, so it happens once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_KEPT = 5
"""Chunks of an octave that are remembered; their median counts, for machines do other things too."""
_GROWTH = 2
"""How much longer than any of those a chunk may be: what was not seen is approached in steps."""
_NEAR = 64
"""Places that attention hardly feels. Without it the second chunk of a prompt would seem a multiple of the first."""


@dataclass(frozen=True, slots=True)
class _Seen:
    tokens: int
    place: float
    """Of the chunk's middle."""
    answers: int
    """That it rode with."""
    added_s: tuple[float, ...]
    usual_s: tuple[float, ...]
    """What those answers alone took then. A machine that slows down slows both."""

    def at(self, tokens: int, place: float, usual_s: Sequence[float]) -> tuple[float, ...]:
        """What ``tokens`` from there would add."""
        grown = (1 + tokens / self.tokens) / 2 * max(1.0, (place + _NEAR) / (self.place + _NEAR))
        return tuple(
            added * grown * (now / then if then > 0 else 1.0)
            for added, then, now in zip(self.added_s, self.usual_s, usual_s, strict=True)
        )


class ChunkCosts:
    """Learnt from the chunks that pass."""

    def __init__(self, answers_s: Callable[[int], tuple[float, ...]]) -> None:
        """``answers_s``: what each stage takes for a token of each of so many answers."""
        self._answers_s = answers_s
        self._octaves: dict[int, deque[_Seen]] = {}

    def record(self, answers: int, tokens: int, start: int, stage_s: Sequence[float]) -> None:
        """A batch with ``tokens`` of a prompt from place ``start``, and one token of each of so many answers."""
        usual_s = self._answers_s(answers)
        added_s = tuple(max(time - usual, 0.0) for time, usual in zip(stage_s, usual_s, strict=True))
        seen = _Seen(tokens, start + tokens / 2, answers, added_s, usual_s)
        self._octaves.setdefault(start.bit_length(), deque(maxlen=_KEPT)).append(seen)

    def longest(self, start: int) -> int:
        """Tokens of a chunk from ``start`` that an estimate may be asked for."""
        return _GROWTH * max((seen.tokens for seen in self._near(start)), default=0)

    def added_s(self, tokens: int, start: int) -> tuple[float, ...]:
        """What each stage would take longer for a chunk, which is no longer than :meth:`longest`."""
        place = start + tokens / 2
        near = self._near(start)
        size = min((seen.tokens for seen in near), key=lambda size: max(size, tokens) / min(size, tokens))
        guesses = [seen.at(tokens, place, self._answers_s(seen.answers)) for seen in near if seen.tokens == size]
        return tuple(sorted(stage)[len(stage) // 2] for stage in zip(*guesses, strict=True))

    def _near(self, start: int) -> Sequence[_Seen]:
        """The octave's, or those of the nearest one that has any."""
        octave = start.bit_length()
        nearest = min(self._octaves, key=lambda other: (abs(other - octave), other), default=None)
        return () if nearest is None else self._octaves[nearest]
