"""The host hears how far everybody is, a member of itself; nothing waits for it."""

from __future__ import annotations

from kafila.ring.agreement import Fetched
from kafila.ring.session import MemberSession
from kafila.ring.session_host import HostSession
from kafila.ring.session_machine import State
from kafila.ring.steps import BuildWanted, Event, Fetching
from tests.ring.test_session import Session, info


class _Fetching(Session):
    """Members that fetch ten bytes each."""

    def act(self, machine: HostSession | MemberSession, event: Event) -> None:
        if isinstance(event, BuildWanted):
            machine.fetched(1, 10)
            machine.fetched(10, 10)
        super().act(machine, event)


def _heard(session: Session, number: int) -> list[tuple[str, int]]:
    events = session.events[info(number).node_id]
    return [(event.name, event.done_bytes) for event in events if isinstance(event, Fetching)]


def test_the_host_hears_of_all_and_a_member_of_itself() -> None:
    session = _Fetching(2, expected=3)
    session.run()
    assert session.host.state is State.SERVING
    everybody = {(f"member {number}", done) for number in range(3) for done in (1, 10)}
    assert set(_heard(session, 0)) == everybody
    assert _heard(session, 1) == [("member 1", 1), ("member 1", 10)]


def test_who_fetches_at_another_time_or_is_a_stranger_is_not_heard() -> None:
    session = Session(1, expected=None)
    session.run()
    for sender in (1, 7):
        session.host.receive(info(sender).node_id, Fetched(1, 10))
    session.host.fetched(1, 10)
    session.members[info(1).node_id].fetched(1, 10)
    session.run()
    assert _heard(session, 0) == _heard(session, 1) == []
