"""Plots are well-formed, and what they show is where it belongs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sims.report.svg import HEIGHT, Series, bars, lines, nice_top

NAMESPACE = "{http://www.w3.org/2000/svg}"


@given(st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=5))
def test_an_axis_holds_every_value_and_is_not_far_too_long(values: list[float]) -> None:
    assert max(values) <= nice_top(values) * (1 + 1e-12)
    assert nice_top(values) <= 2.5 * max(values)


def test_an_empty_axis_is_one_long() -> None:
    assert nice_top([]) == nice_top([0.0]) == 1.0


def test_bars_are_as_tall_as_their_values() -> None:
    svg = bars("a < b", "ms", ["one", "two"], [Series("ours", [10.0, 5.0]), Series("theirs", [None, 20.0])])
    root = ET.fromstring(svg)  # noqa: S314  - written a line above
    drawn = {bar.findtext(f"{NAMESPACE}title"): float(bar.get("height", 0)) for bar in root.iter(f"{NAMESPACE}rect")}
    assert drawn["ours, one: 10"] == pytest.approx(drawn["theirs, two: 20"] / 2, abs=0.2)
    assert drawn["ours, two: 5"] == pytest.approx(drawn["theirs, two: 20"] / 4, abs=0.2)
    assert root.findtext(f"{NAMESPACE}title") == "a < b"


def test_lines_go_through_their_points() -> None:
    svg = lines("gain", "%", "times", [10.0, 100.0], [Series("ours", [4.0, 2.0]), Series("theirs", [None, 4.0])])
    root = ET.fromstring(svg)  # noqa: S314  - written a line above
    dots = [(float(dot.get("cx", 0)), float(dot.get("cy", 0))) for dot in root.iter(f"{NAMESPACE}circle")]
    assert len(dots) == 3
    assert dots[0][1] == dots[2][1] < dots[1][1] < HEIGHT
    assert dots[0][0] < dots[1][0] == dots[2][0]
    assert len(re.findall("polyline", svg)) == 2
