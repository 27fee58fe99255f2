"""What a person is told when the rendezvous says no, or nothing (pure)."""

from __future__ import annotations

from kafila.errors import RendezvousUnreachable, SessionError, SessionFull, UnknownSession
from kafila.ring.control import Reason, Refused
from kafila.ring.rendezvous_client import Unreachable

_REFUSALS: dict[Reason, tuple[type[SessionError], str]] = {
    Reason.VERSION: (
        SessionError,
        "the rendezvous at {server} speaks another version of Kafila: update whichever is older",
    ),
    Reason.UNKNOWN_SESSION: (
        UnknownSession,
        "the rendezvous at {server} knows no such session: ask its host whether it runs, and for its present code",
    ),
    Reason.LOCATOR_TAKEN: (
        SessionError,
        "another session at {server} goes by the same locator: start again, with a new code",
    ),
    Reason.FULL: (SessionFull, "the session already has as many members as its host asked for (--members)"),
    Reason.EVICTED: (SessionError, "the session's host has put this member out: ask it why, then join again"),
    Reason.BUSY: (SessionError, "the rendezvous at {server} has too much to do: try again in a minute"),
    Reason.REPLACED: (SessionError, "this member has registered again over another connection, and that one counts"),
}


def as_error(event: Refused | Unreachable, server: str) -> SessionError:
    """What to raise for an event that ends a client; ``server`` is the rendezvous as the person named it."""
    if isinstance(event, Unreachable):
        return RendezvousUnreachable(
            f"no answer from the rendezvous at {server} ({event.reason}): see that it runs and that UDP can reach it"
        )
    kind, text = _REFUSALS[event.reason]
    return kind(text.format(server=server))
