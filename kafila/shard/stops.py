"""Stop strings: ending an answer at a text, wherever the tokens divide it."""

from __future__ import annotations

from collections.abc import Sequence

from kafila.errors import UsageError


class StopMatcher:
    """Lets text through up to the first stop string, which it swallows.

    Text that may be the beginning of a stop string is withheld until that is decided. The stop string that is complete
    first counts, of several that end together the longest: the outcome does not depend on how the text is cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise UsageError("a stop string cannot be empty")
        self._stops = tuple(stops)
        self._withheld = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """The text that can be shown now that ``text`` has arrived; nothing more once a stop string has matched."""
        if self.matched is not None:
            return ""
        text = self._withheld + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._withheld = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._withheld = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was withheld, when no text follows."""
        text, self._withheld = self._withheld, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of ``text`` that ``stop`` begins with, short of the whole of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
