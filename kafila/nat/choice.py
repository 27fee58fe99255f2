"""Which of several working paths bulk data takes, and what it takes beside it while that is in doubt."""

from __future__ import annotations

from collections.abc import Iterable

from kafila.nat.path import Path, PathState
from kafila.nat.table import PathTable

FASTER = 0.8
SLACK_S = 0.001
"""Another path takes over when its round trip is a fifth and a millisecond shorter, or when it is nearer and at most as
much longer: less is noise, and each change costs QUIC its estimates. The two cannot hold both ways round, so there is
no swinging back and forth."""


def _rtt_s(path: Path) -> float:
    rtt_s = path.round_trip.smoothed_s
    return float("inf") if rtt_s is None else rtt_s


def takes_over(challenger: Path, incumbent: Path) -> bool:
    """Whether to leave ``incumbent`` for ``challenger``; both work."""
    new_s, old_s = _rtt_s(challenger), _rtt_s(incumbent)
    if challenger.scope < incumbent.scope:
        return new_s * FASTER - SLACK_S <= old_s
    if challenger.scope > incumbent.scope:
        return new_s < old_s * FASTER - SLACK_S
    settled = challenger.round_trip.samples > 1 and incumbent.round_trip.samples > 1
    return settled and new_s < old_s * FASTER - SLACK_S


def best_of(working: Iterable[Path], incumbent: Path | None) -> Path | None:
    """The path to use, given the one in use; None when none works."""
    best = incumbent
    for path in working:
        if best is None or (path is not best and takes_over(path, best)):
            best = path
    return best


class Selection:
    """The path in use and its understudies. None stands for the relay, where a route is meant."""

    def __init__(self) -> None:
        self.chosen: Path | None = None
        self._fallen: Path | None = None  # was chosen and is in doubt: data goes there beside the relay
        self._before: Path | None = None  # what was chosen before: data goes there as well ...
        self._overlap_until = 0.0  # ... until then

    def fall(self) -> bool:
        """Leave the path in use if it no longer works; whether it was left."""
        if self.chosen is None or self.chosen.state is PathState.USABLE:
            return False
        self._fallen, self.chosen, self._before = self.chosen, None, None
        return True

    def improve(self, table: PathTable, now: float) -> bool:
        """Take the best path that works; whether that is another than before."""
        best = best_of(table.usable(), self.chosen)
        if best is None or best is self.chosen:
            return False
        self._before, self._fallen = self.chosen, None
        self._overlap_until = now + max(_trip_s(self.chosen), _trip_s(best))
        self.chosen = best
        return True

    def expire(self, now: float) -> None:
        """Let time pass."""
        if now >= self._overlap_until:
            self._before = None

    def due_at(self) -> float | None:
        """When :meth:`expire` has something to do."""
        return None if self._before is None else self._overlap_until

    def routes(self, table: PathTable) -> tuple[Path | None, ...]:
        """Where data goes, to each of them; what is relied on comes first."""
        if self.chosen is not None:
            return (self.chosen,) if self._before is None else (self.chosen, self._before)
        beside = self._fallen
        if beside is None or beside.state not in (PathState.SILENT, PathState.CONFIRMING):
            beside = table.trial()
        return (None,) if beside is None else (None, beside)


def _trip_s(path: Path | None) -> float:
    return 0.0 if path is None else path.round_trip.smoothed_s or 0.0
