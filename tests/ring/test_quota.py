"""Token buckets against a plain model, and the table of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafila.ring import quota
from kafila.ring.quota import Buckets, TokenBucket, network_of


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 150)), max_size=60))
def test_a_bucket_never_gives_more_than_its_burst_and_rate(steps: list[tuple[float, float]]) -> None:
    bucket = TokenBucket(10.0, 100.0, 0.0)
    now = taken = 0.0
    for pause, cost in steps:
        now += pause
        ready_at = bucket.ready_at(cost, now)
        if bucket.take(cost, now):
            assert ready_at <= now
            taken += min(cost, 100.0)
        else:
            assert ready_at > now
        assert taken <= 100.0 + 10.0 * now + 1e-6


@given(st.floats(0, 1000), st.floats(1, 100))
def test_what_is_not_there_is_there_when_promised(now: float, cost: float) -> None:
    bucket = TokenBucket(10.0, 100.0, now)
    assert bucket.take(100.0, now)
    assert bucket.take(cost, bucket.ready_at(cost, now) + 1e-6)


def test_more_than_a_burst_is_taken_from_a_full_bucket() -> None:
    bucket = TokenBucket(10.0, 100.0, 0.0)
    assert bucket.take(500.0, 0.0)
    assert not bucket.take(1.0, 1.0)  # the debt is paid first
    assert bucket.ready_at(1.0, 1.0) == pytest.approx(40.1)


def test_a_table_forgets_full_buckets_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MAX_KEYS", 3)
    buckets = Buckets(1.0, 10.0)
    buckets.get("used", 0.0).take(10.0, 0.0)
    for key in "abcdef":
        buckets.get(key, 0.0)
        assert len(buckets) <= 3
    assert not buckets.get("used", 0.0).take(1.0, 0.0)
    for key in "abcdef":
        buckets.get(key, 0.0).take(1.0, 0.0)
    assert len(buckets) <= 3


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("203.0.113.5", "203.0.113.5"),
        ("::ffff:203.0.113.5", "203.0.113.5"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
    ],
)
def test_a_network_is_an_ipv4_address_or_an_ipv6_64(host: str, network: str) -> None:
    assert network_of(host) == network
