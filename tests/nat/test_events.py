"""What people are told."""

from __future__ import annotations

from kafila.nat.events import (
    MAX_EVENTS,
    DatagramSizeChanged,
    EventLog,
    KeepaliveShortened,
    MappingMoved,
    PathChanged,
    PathLost,
    PathNarrowed,
    PathSilent,
    PathTooNarrow,
    PunchFailed,
)
from kafila.types import Address, PathKind

LAN = Address("192.168.1.7", 4242)


def test_lines() -> None:
    changed = PathChanged(PathKind.DIRECT, LAN, 0.0004, 1452, PathKind.RELAYED, None)
    assert str(changed) == "path changed from relayed to direct 192.168.1.7:4242, 0.4 ms, 1452-byte datagrams"
    v6 = Address("2001:db8::7", 4242)
    back = PathChanged(PathKind.RELAYED, None, None, 1200, PathKind.DIRECT, v6)
    assert str(back) == (
        "path changed from direct [2001:db8::7]:4242 to relayed, round trip not yet measured, 1200-byte datagrams"
    )
    assert str(PathSilent(LAN, 0.76, data_only=False)) == (
        "direct path 192.168.1.7:4242 went silent for 0.76 s, using the relay too"
    )
    assert "stopped carrying data" in str(PathSilent(LAN, 0.76, data_only=True))
    assert str(PunchFailed(1, 5.0)) == "no direct path to any of 1 address, relayed; next try in 5 s"
    assert str(PunchFailed(0, 5.0)) == "the peer has no address that can be tried directly, staying on the relay"
    assert str(DatagramSizeChanged(1200, 1452)) == ("path stopped carrying 1452-byte datagrams, using 1200 bytes")
    moved = MappingMoved(LAN, Address("198.51.100.7", 22_921), Address("198.51.100.7", 5000))
    assert str(moved) == "a NAT moved us: 192.168.1.7:4242 sees us at 198.51.100.7:22921, before at 198.51.100.7:5000"
    for event in (PathLost(LAN), PathTooNarrow(LAN), PathNarrowed(LAN, 1452), KeepaliveShortened(14.0, 7.0)):
        assert "\n" not in str(event)
        assert len(str(event)) > 20


def test_only_changes_are_told() -> None:
    log = EventLog(1200)
    log.path_is(None, None, 1200)
    assert log.next() is None
    log.path_is(LAN, 0.01, 1200)
    log.path_is(LAN, 0.02, 1200)
    log.path_is(LAN, 0.02, 1452)
    assert log.next() == PathChanged(PathKind.DIRECT, LAN, 0.01, 1200, PathKind.RELAYED, None)
    assert log.next() == DatagramSizeChanged(1452, 1200)
    assert log.next() is None


def test_bounded() -> None:
    log = EventLog(1200)
    for number in range(3 * MAX_EVENTS):
        log.append(PunchFailed(number, 5.0))
    kept = list(iter(log.next, None))
    assert len(kept) == MAX_EVENTS
    assert kept[-1] == PunchFailed(3 * MAX_EVENTS - 1, 5.0)
