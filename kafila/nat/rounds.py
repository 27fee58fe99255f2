"""When rounds of punching begin: at once, after pauses while they fail, and when the peer begins one.

on        from the start for four seconds; every path has its own schedule within it
pausing   nothing was found: the next begins after 5, 15, 60, 60 ... seconds
off       something was found
"""

from __future__ import annotations

from kafila.nat.schedule import PUNCH_WINDOW_S, RETRY_AFTER_S

JOIN_GAP_S = 2.5
"""After a round, before one that the peer begins is joined: half the first pause, so that two sides cannot keep each
other going without rest."""


class Rounds:
    """The calendar only; who is punched is the caller's."""

    def __init__(self) -> None:
        self.failures = 0
        self._began_at: float | None = None
        self._ended_at = float("-inf")
        self._next_at: float | None = None

    @property
    def on(self) -> bool:
        """Whether one is going on."""
        return self._began_at is not None

    def begin(self, now: float) -> None:
        """A round begins."""
        self._began_at, self._next_at = now, None

    def may_join(self, now: float) -> bool:
        """Whether the peer's round is reason enough to begin one."""
        return self._began_at is None and now >= self._ended_at + JOIN_GAP_S

    def over(self, now: float) -> bool:
        """End the round if its time is up; whether it just ended."""
        if self._began_at is None or now < self._began_at + PUNCH_WINDOW_S:
            return False
        self._began_at, self._ended_at = None, now
        return True

    def failed(self, now: float) -> float:
        """It found nothing: the pause until the next, in seconds."""
        pause_s = RETRY_AFTER_S[min(self.failures, len(RETRY_AFTER_S) - 1)]
        self.failures += 1
        self._next_at = now + pause_s
        return pause_s

    def found(self) -> None:
        """A direct path works: no more rounds, and the next loss starts from short pauses."""
        self.failures, self._next_at = 0, None

    def due(self, now: float) -> bool:
        """Whether the pause is over."""
        return self._next_at is not None and now >= self._next_at

    def due_at(self) -> float | None:
        """When the round or the pause ends; None: neither is on."""
        return self._next_at if self._began_at is None else self._began_at + PUNCH_WINDOW_S

    def ensure(self, now: float) -> None:
        """There is no direct path: let there be another round some time, if none is on or planned."""
        if self._began_at is None and self._next_at is None:
            self.failed(now)
