"""Which of several working paths bulk data takes."""

from __future__ import annotations

from collections.abc import Iterable

from kafila.nat.path import Path

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
