"""Which working path is used: the faster, the nearer when equal, and no swinging between them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafila.nat.candidates import CandidateKind
from kafila.nat.choice import best_of, takes_over
from kafila.nat.path import Path
from kafila.types import Address

HOSTS = ("127.0.0.1", "192.168.1.7", "203.0.113.7")


def path(host: str, rtt_s: float, samples: int = 2) -> Path:
    made = Path(Address(host, 4242), CandidateKind.HOST)
    for _ in range(samples):
        made.round_trip.measured(rtt_s)
    return made


PATHS = st.builds(path, st.sampled_from(HOSTS), st.floats(1e-5, 1.0), st.integers(1, 3))


@given(PATHS, PATHS)
def test_two_paths_never_take_over_from_each_other(one: Path, other: Path) -> None:
    assert not (takes_over(one, other) and takes_over(other, one))


@given(st.lists(PATHS, min_size=1, max_size=6), st.integers(0, 5))
def test_settles_at_once(paths: list[Path], first: int) -> None:
    """However many working paths there are, with the same round trips there is no going round in circles."""
    chosen: Path | None = paths[first % len(paths)]
    changes = 0
    while (better := best_of(paths, chosen)) is not chosen:
        chosen = better
        changes += 1
        assert changes <= len(paths)


def test_nearer_when_equally_fast() -> None:
    loopback, lan, wide = (path(host, 0.0004) for host in HOSTS)
    assert best_of([wide, lan, loopback], None) is loopback
    assert best_of([loopback, lan, wide], None) is loopback
    assert best_of([wide, lan], wide) is lan


def test_faster_when_clearly_so() -> None:
    slow_lan, wide = path("192.168.1.7", 0.080), path("203.0.113.7", 0.020)
    assert best_of([slow_lan, wide], slow_lan) is wide


def test_a_little_faster_is_noise() -> None:
    one, other = path("203.0.113.7", 0.020), path("203.0.113.8", 0.018)
    assert best_of([one, other], one) is one


def test_one_sample_is_no_reason_to_leave_an_equal() -> None:
    one, other = path("203.0.113.7", 0.050), path("203.0.113.8", 0.010, samples=1)
    assert best_of([one, other], one) is one


def test_nothing_works() -> None:
    assert best_of([], None) is None
