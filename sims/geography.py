"""How long a datagram takes between two places, from the distance alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import asin, cos, radians, sin, sqrt

EARTH_RADIUS_KM = 6371.0
_FIBRE_KM_PER_S = 299_792.458 / 1.468
"""Light in standard single-mode fibre: the vacuum speed over its group index at 1550 nm, 1.468."""
_ROUTE_FACTOR = 1.5
"""Cables follow coasts, roads and exchanges: a path's length over the great circle. A planning estimate; real paths lie
between 1.2 and 2."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place, in degrees north and east."""

    name: str
    latitude: float
    longitude: float


def distance_km(a: Site, b: Site) -> float:
    """The great-circle distance (haversine formula)."""
    north = radians(b.latitude - a.latitude) / 2
    east = radians(b.longitude - a.longitude) / 2
    chord = sin(north) ** 2 + cos(radians(a.latitude)) * cos(radians(b.latitude)) * sin(east) ** 2
    return 2 * EARTH_RADIUS_KM * asin(sqrt(min(1.0, chord)))


def fibre_rtt_s(a: Site, b: Site) -> float:
    """The round trip over fibre between two places, without what the ends add."""
    return 2 * distance_km(a, b) * _ROUTE_FACTOR / _FIBRE_KM_PER_S
