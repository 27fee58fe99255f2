"""When a source is asked again, and when that is given up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from kafila.errors import FetchFailed, SourceSilent

ATTEMPTS = 6
"""With the waits below a quarter of a minute, which outlasts a restart."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
LONGEST_RETRY_AFTER_S = 300.0
"""A source that asks to be left alone for longer is given up, in words that say so."""


@dataclass(slots=True)
class Patience:
    """How long to wait for a source; ``stopping`` ends every wait. Tests put in their own ``wait`` and ``jitter``."""

    stopping: threading.Event = field(default_factory=threading.Event)
    wait: Callable[[float], object] | None = None
    """Sleeps so many seconds; None: on ``stopping``."""
    jitter: Callable[[], float] = random.random
    """From 0 to 1: members that were refused together do not come back together."""
    clock: Callable[[], float] = time.time
    """Seconds since 1970, for a Retry-After that names a date."""
    attempts: int = ATTEMPTS
    """In a row without a byte of progress."""

    def go_on(self) -> None:
        """Raises FetchFailed once this member is leaving."""
        if self.stopping.is_set():
            raise FetchFailed("fetching was given up: this member is leaving")

    def sleep(self, seconds: float) -> None:
        """Wait, unless this member leaves; then raises FetchFailed."""
        (self.wait or self.stopping.wait)(seconds)
        self.go_on()


class Attempts:
    """The attempts at one thing; ``what`` names it in the error of the last one."""

    def __init__(self, patience: Patience, what: str) -> None:
        self._patience = patience
        self._what = what
        self._failed = 0

    def progressed(self) -> None:
        """Bytes came: the count begins anew."""
        self._failed = 0

    def failed(self, why: str, retry_after: str | None = None) -> None:
        """Wait before the next attempt. Raises SourceSilent when there is none, FetchFailed when this member leaves."""
        self._failed += 1
        if self._failed >= self._patience.attempts:
            raise SourceSilent(
                f"{self._what} does not come ({why}, {self._failed} times): check the network and the address, then "
                "start again; what has been fetched is kept"
            )
        asked = retry_after_s(retry_after, self._patience.clock())
        if asked is not None and asked > LONGEST_RETRY_AFTER_S:
            raise SourceSilent(
                f"{self._what} does not come ({why}): its server asks to wait {asked:.0f} s; start again after that; "
                "what has been fetched is kept"
            )
        backoff: float = min(FIRST_WAIT_S * 2 ** (self._failed - 1), LONGEST_WAIT_S)
        self._patience.sleep(max(backoff * (0.5 + self._patience.jitter() / 2), asked or 0.0))


def retry_after_s(text: str | None, now: float) -> float | None:
    """Seconds to wait by a Retry-After header (RFC 9110 section 10.2.3: seconds or a date); None without one."""
    if text is None:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (when - datetime.fromtimestamp(now, UTC)).total_seconds()) if when.tzinfo else None
