"""An answer on its way to a slow reader: deltas that were not read yet become one."""

from __future__ import annotations

from dataclasses import replace

import trio

from kafila.ring.frames import Text


class Mailbox:
    """Holds at most one unread :class:`Text`, so a terminal that cannot keep up costs the answer's length, no more."""

    def __init__(self) -> None:
        self._unread: Text | None = None
        self._something = trio.Event()
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether the last part has been put in."""
        return self._finished

    def put(self, text: Text) -> None:
        """Add a part; after the last one (it has a ``finish``) nothing is added."""
        if self._finished:
            return
        self._finished = text.finish is not None
        if (before := self._unread) is not None:
            text = replace(text, delta=before.delta + text.delta, logprobs=before.logprobs + text.logprobs)
        self._unread = text
        self._something.set()

    def __aiter__(self) -> Mailbox:
        return self

    async def __anext__(self) -> Text:
        """Everything unread as one part. Ends after the last one."""
        if self._finished and self._unread is None:
            raise StopAsyncIteration
        await self._something.wait()
        text, self._unread = self._unread, None
        self._something = trio.Event()
        if text is None:  # only the end of an answer that was already read can have set the event
            raise StopAsyncIteration
        return text
