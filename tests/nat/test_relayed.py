"""The relayed path: measured, sized, kept warm, and no more than that."""

from __future__ import annotations

from kafila.nat.messages import MIN_MESSAGE_BYTES
from kafila.nat.relayed import RelayedPath

KEEPALIVE_S = 15.0


def run(path: RelayedPath, until: float, fits: int = 0, now: float = 0.0) -> list[tuple[float, int]]:
    """Let it ping until ``until``; what fits (inside the envelope) is acked after 100 ms. What was sent, and when."""
    sent, acks = list[tuple[float, int]](), list[tuple[float, int, int]]()
    while True:
        time = min([path.due_at(), *(ack[0] for ack in acks)])
        if time > until:
            return sent
        now = max(now, time)
        for ack in [ack for ack in acks if ack[0] <= now]:
            acks.remove(ack)
            path.acked(ack[1], ack[2], 0.1, now, KEEPALIVE_S)
        sizes = path.take(now, KEEPALIVE_S)
        sent.extend((now, size) for size in sizes)
        acks.extend((now + 0.1, size, path.mtu.generation) for size in sizes if size <= fits)


def test_a_peer_that_is_not_there_yet_is_tried_a_few_times() -> None:
    sent = run(RelayedPath(0.0), 10.0)
    assert [time for time, _ in sent] == [0.0, 0.3, 1.0, 2.0, 4.0]
    assert {size for _, size in sent} == {MIN_MESSAGE_BYTES}


def test_round_trip_and_size_are_found() -> None:
    path = RelayedPath(0.0)
    assert path.max_datagram_bytes == 1200
    run(path, 5.0, fits=1472 - 9)
    assert path.round_trip.smoothed_s is not None
    assert path.max_datagram_bytes == 1472 - 9


def test_a_narrow_relay_still_carries_quic() -> None:
    path = RelayedPath(0.0)
    run(path, 60.0, fits=1100)
    assert path.max_datagram_bytes == 1200


def test_kept_warm() -> None:
    path = RelayedPath(0.0)
    run(path, 5.0, fits=1463)
    assert 4 <= len(run(path, 70.0, fits=1463, now=5.0)) <= 6


def test_woken_for_a_round() -> None:
    path = RelayedPath(0.0)
    run(path, 5.0, fits=1463)
    path.wake(6.0)
    assert path.due_at() == 6.0
