"""Whether data is on the move, and whether anything comes back for what is sent."""

from __future__ import annotations

BUSY_S = 1.0
"""Data that moved so recently makes a path busy: longer than the pauses between the tokens of a slow answer."""


class DataFlow:
    """When QUIC datagrams went out and came in, whatever path they took.

    QUIC acknowledges all data within its maximum ack delay (25 ms), and repeats what is not acknowledged. So data that
    goes on being sent while nothing at all comes back is not getting through, even if pings are. A lone last datagram
    proves nothing: it may be an acknowledgement, which is never acknowledged itself.
    """

    def __init__(self) -> None:
        self.moved_at = float("-inf")
        self._sent_at = float("-inf")
        self._unanswered_since: float | None = None

    def sent(self, now: float) -> bool:
        """Data that wants an answer went out; whether it is the first to move after a pause."""
        resumed = not self.busy(now)
        self.moved_at = self._sent_at = now
        if self._unanswered_since is None:
            self._unanswered_since = now
        return resumed

    def received(self, now: float) -> bool:
        """Data came in, and its acknowledgement goes out; whether it is the first to move after a pause."""
        resumed = not self.busy(now)
        self.moved_at = now
        self._unanswered_since = None
        return resumed

    def busy(self, now: float) -> bool:
        """Whether data is on the move, either way: who only receives must still get its acknowledgements out."""
        return now - self.moved_at <= BUSY_S

    def unanswered_s(self, now: float, patience_s: float) -> float | None:
        """How long data has been sent without any coming back, once that is more than ``patience_s``; else None."""
        since = self._unanswered_since
        if since is None or now - since < patience_s or self._sent_at - since < patience_s / 2:
            return None
        return now - since

    def restart(self) -> None:
        """Another path carries it now: count anew."""
        self._unanswered_since = None
