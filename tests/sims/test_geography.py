"""Distances and what light makes of them."""

from __future__ import annotations

import pytest

from sims.geography import Site, distance_km, fibre_rtt_s

PRAGUE = Site("Prague", 50.08, 14.44)
MELBOURNE = Site("Melbourne", -37.81, 144.96)


def test_known_distances() -> None:
    assert distance_km(Site("pole", 90, 0), Site("equator", 0, 77)) == pytest.approx(10_007, abs=2)
    assert distance_km(PRAGUE, MELBOURNE) == pytest.approx(15_970, rel=0.01)
    assert distance_km(Site("a", 0, 179), Site("b", 0, -179)) == pytest.approx(222.4, abs=0.1)


def test_a_round_trip_is_symmetric_and_slower_than_light() -> None:
    assert fibre_rtt_s(PRAGUE, PRAGUE) == 0
    assert fibre_rtt_s(PRAGUE, MELBOURNE) == fibre_rtt_s(MELBOURNE, PRAGUE)
    assert fibre_rtt_s(PRAGUE, MELBOURNE) > 2 * 15_970 / 299_792
