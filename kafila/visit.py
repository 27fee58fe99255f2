"""A guest's place beside the ring while a session serves (sans-IO).

A guest holds no blocks. Its questions go over one link to the head, and what the head says of them comes back over it;
nothing else does, and nobody else hears of either.
"""

from __future__ import annotations

from kafila.errors import ProtocolError
from kafila.ring.frames import Activation, Control, Edge, Stats, Text
from kafila.serve import Lately, Said, Stage


class Visit(Stage):
    """What a guest has where members have a stage."""

    def _activation(self, frame: Activation) -> None:  # noqa: ARG002  - a guest takes none, whatever it is
        raise ProtocolError("a guest computes nothing, and was sent something to compute")

    def _control(self, message: Control, now: float) -> None:  # noqa: ARG002  - as a stage's
        match message:
            case Text(asker=asker) if asker == self.place.me:
                self._events.append(Said(message))
            case Stats():
                self._events.append(Lately(message))
            case Edge():
                self.edges.heard(message)
            case _:
                raise ProtocolError("a guest was sent what is another's")
