"""The direct paths known for one peer: never more than thirty-two, whoever names them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kafila.nat.candidates import MAX_CANDIDATES, Candidate, CandidateKind
from kafila.nat.path import Path, PathState
from kafila.types import Address

SPARES = 2
"""Working direct paths kept alive beside the one in use."""


def _preference(path: Path) -> tuple[int, float]:
    return path.scope, path.round_trip.smoothed_s or 0.0


class PathTable:
    """Paths by address, in the order in which they became known."""

    def __init__(self) -> None:
        self._paths: dict[Address, Path] = {}

    def __iter__(self) -> Iterator[Path]:
        return iter(self._paths.values())

    def __len__(self) -> int:
        return len(self._paths)

    def get(self, address: Address) -> Path | None:
        """The path to ``address``, if it is known."""
        return self._paths.get(address)

    def add(self, address: Address, kind: CandidateKind, *, advertised: bool = False) -> Path | None:
        """The path to ``address``, made if there is room for it; None when there is not."""
        path = self._paths.get(address)
        if path is None and (len(self._paths) < MAX_CANDIDATES or self._evict()):
            path = self._paths[address] = Path(address, kind)
        if path is not None and advertised:
            path.advertised = True
        return path

    def advertise(self, candidates: Iterable[Candidate]) -> None:
        """These are the peer's own addresses now; others stay only while they are of use."""
        wanted = list(candidates)
        addresses = {candidate.address for candidate in wanted}
        for path in list(self._paths.values()):
            path.advertised = path.address in addresses
            if not path.advertised and path.state in (PathState.IDLE, PathState.PUNCHING):
                del self._paths[path.address]
        for candidate in wanted:
            self.add(candidate.address, candidate.kind, advertised=True)

    def usable(self) -> list[Path]:
        """Those that work."""
        return [path for path in self._paths.values() if path.state is PathState.USABLE]

    def trial(self) -> Path | None:
        """The most promising of those that answered and are being confirmed."""
        confirming = [path for path in self._paths.values() if path.state is PathState.CONFIRMING]
        return min(confirming, key=_preference, default=None)

    def thin_out(self, chosen: Path, now: float) -> None:
        """Keep a few spares alive, and look only for what would be nearer than the path in use."""
        spares = sorted((path for path in self.usable() if path is not chosen), key=_preference)
        for path in spares[SPARES:]:
            path.retire(now)
        for path in self._paths.values():
            if path.state is PathState.LOST and path.scope >= chosen.scope:
                path.retire(now)

    def _evict(self) -> bool:
        """Make room: the path heard from longest ago, learned ones first, of those that nothing is expected of."""
        idle = [path for path in self._paths.values() if path.state is PathState.IDLE]
        if not idle:
            return False
        oldest = min(idle, key=lambda p: (p.advertised, p.heard_at if p.heard_at is not None else float("-inf")))
        del self._paths[oldest.address]
        return True
