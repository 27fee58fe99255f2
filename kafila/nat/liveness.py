"""Whether data is being sent, and whether anything comes back for it."""

from __future__ import annotations

SENDING_S = 1.0
"""Data sent so recently counts as sending: longer than the pauses between the tokens of a slow answer."""


class DataFlow:
    """When QUIC datagrams went out and came in, whatever path they took.

    QUIC acknowledges all data within its maximum ack delay (25 ms), and repeats what is not acknowledged. So data that
    goes on being sent while nothing at all comes back is not getting through, even if pings are. A lone last datagram
    proves nothing: it may be an acknowledgement, which is never acknowledged itself.
    """

    def __init__(self) -> None:
        self.sent_at = float("-inf")
        self._unanswered_since: float | None = None

    def sent(self, now: float) -> bool:
        """Data went out; whether it is the first after a pause."""
        resumed = now - self.sent_at > SENDING_S
        self.sent_at = now
        if self._unanswered_since is None:
            self._unanswered_since = now
        return resumed

    def received(self) -> None:
        """Data came in."""
        self._unanswered_since = None

    def sending(self, now: float) -> bool:
        """Whether data is being sent these days."""
        return now - self.sent_at <= SENDING_S

    def unanswered_s(self, now: float, patience_s: float) -> float | None:
        """How long data has been sent without any coming back, once that is more than ``patience_s``; else None."""
        since = self._unanswered_since
        if since is None or now - since < patience_s or self.sent_at - since < patience_s / 2:
            return None
        return now - since

    def restart(self) -> None:
        """Another path carries it now: count anew."""
        self._unanswered_since = None
