"""How long answers waited for their next token, by how they were divided into batches (pure).

Stage times alone do not say which division is best: stages that share a processor, its memory or a power budget are
slower while others work, so what was seen with many batches on their way is no measure of few, nor the other way round.
A batch that leaves again as soon as it is back takes just as long to go round as its answers wait, whatever it waited
behind. So circuits are kept by division, and what was measured counts before what stage times promise.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import median

_ENOUGH = 6
"""Circuits before a division counts as measured."""
_KEPT = 12
_DIVISIONS = 64
"""That are remembered, those seen last."""
_TRIAL = 8
"""Times so many batches as are on their way, after which a division has had its trial, even if chunks of prompts never
left it alone."""
_STALE = 4096
"""Batches after which a division is worth another trial: minutes, and a conversation has become longer."""


def divided(answers: int, batches: int) -> list[int]:
    """The sizes of ``batches`` that share ``answers`` as evenly as can be, the larger ones first."""
    each, larger = divmod(answers, batches)
    return [each + 1] * larger + [each] * (batches - larger)


class Divisions:
    """Learnt from the batches that come back."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[int, int], tuple[int, deque[float]]] = OrderedDict()
        self._now = (0, 1)
        self._undisturbed = 0
        self._used = 0
        self._count = 0

    def use(self, answers: int, batches: int) -> None:
        """So many answers run in so many batches from now on."""
        if (answers, batches) != self._now:
            self._now, self._undisturbed, self._used = (answers, batches), 0, 0

    def disturbed(self) -> None:
        """Something else than answers is on its way, and they wait behind it."""
        self._undisturbed = 0

    def record(self, size: int, circuit_s: float) -> None:
        """A batch of one token each of ``size`` answers is back."""
        self._count += 1
        self._used += 1
        self._undisturbed += 1
        # What left before the division was this one, and what met that on its way, says nothing of it.
        if self._undisturbed > 2 * self._now[1] and size in divided(*self._now):
            _, circuits = self._seen.pop(self._now, (0, deque(maxlen=_KEPT)))
            circuits.append(circuit_s)
            self._seen[self._now] = self._count, circuits
            if len(self._seen) > _DIVISIONS:
                self._seen.popitem(last=False)

    def tried(self, answers: int, batches: int) -> bool:
        """Whether this division was given the time to show what it is worth."""
        if self.gap_s(answers, batches) is not None:
            return True
        return self._now == (answers, batches) and self._used >= max(_TRIAL * batches, _ENOUGH)

    def gap_s(self, answers: int, batches: int) -> float | None:
        """What each of ``answers`` waits between tokens in so many batches; None where that is not known, or was long
        ago."""
        seen_at, circuits = self._seen.get((answers, batches), (0, ()))
        if len(circuits) < _ENOUGH or self._count - seen_at > _STALE:
            return None
        return median(circuits)
