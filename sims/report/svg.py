"""Plots as SVG, written by hand: grouped bars, and lines through points. Enough for a page, and no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0b6e4f", "#c8553d", "#4a6fa5", "#b08900", "#6b4c9a", "#888888")
WIDTH, HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 72
_TICKS = 5
_STYLE = "font-family:sans-serif;font-size:12px;fill:#222"


@dataclass(frozen=True, slots=True)
class Series:
    """One colour: a name, and a value (None: nothing there) for each group, or for each x of a line plot."""

    name: str
    values: Sequence[float | None]


def bars(title: str, y_label: str, groups: Sequence[str], series: Sequence[Series]) -> str:
    """Grouped bars from zero."""
    top = nice_top([value for one in series for value in one.values if value is not None])
    plot = _Plot(title, y_label, top)
    band = plot.width / max(1, len(groups))
    bar = band * 0.8 / max(1, len(series))
    for place, group in enumerate(groups):
        plot.text(_LEFT + band * (place + 0.5), HEIGHT - _BOTTOM + 18, group, anchor="middle")
        for number, one in enumerate(series):
            value = one.values[place]
            if value is not None:
                x = _LEFT + band * (place + 0.1) + bar * number
                plot.bar(x, bar * 0.95, value, COLOURS[number % len(COLOURS)], f"{one.name}, {group}: {value:.3g}")
    plot.legend([one.name for one in series])
    return plot.done()


def lines(title: str, x_label: str, y_label: str, xs: Sequence[float], series: Sequence[Series]) -> str:
    """Lines through points over a linear axis."""
    top = nice_top([value for one in series for value in one.values if value is not None])
    plot = _Plot(title, y_label, top)
    right = nice_top(xs)
    for step in range(_TICKS + 1):
        x = _LEFT + plot.width * step / _TICKS
        plot.text(x, HEIGHT - _BOTTOM + 18, f"{right * step / _TICKS:.3g}", anchor="middle")
    plot.text(_LEFT + plot.width / 2, HEIGHT - _BOTTOM + 36, x_label, anchor="middle")
    for number, one in enumerate(series):
        points = [
            (_LEFT + plot.width * x / right, plot.y(value), value)
            for x, value in zip(xs, one.values, strict=True)
            if value is not None
        ]
        plot.line([(x, y) for x, y, _ in points], COLOURS[number % len(COLOURS)])
        for x, y, value in points:
            plot.dot(x, y, COLOURS[number % len(COLOURS)], f"{one.name}: {value:.3g}")
    plot.legend([one.name for one in series])
    return plot.done()


def nice_top(values: Sequence[float]) -> float:
    """The end of an axis from zero: the least of 1, 2, 2.5, 5 times a power of ten that holds every value."""
    most = max([value for value in values if math.isfinite(value)], default=0.0)
    if most <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(most))
    return next(power * step for step in (1.0, 2.0, 2.5, 5.0, 10.0, 20.0) if power * step >= most)


class _Plot:
    def __init__(self, title: str, y_label: str, top: float) -> None:
        self._top = top
        self.width = WIDTH - _LEFT - _RIGHT
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        ]
        self.text(_LEFT, 20, title, weight="bold")
        self.text(_LEFT, 35, y_label)
        for step in range(_TICKS + 1):
            value = top * step / _TICKS
            y = self.y(value)
            self._parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="#ddd"/>')
            self.text(_LEFT - 6, y + 4, f"{value:.3g}", anchor="end")

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / self._top

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> None:
        style = f'{_STYLE};font-weight:{weight}" text-anchor="{anchor}'
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" style="{style}">{escape(words)}</text>')

    def bar(self, x: float, width: float, value: float, colour: str, words: str) -> None:
        y = self.y(value)
        height = HEIGHT - _BOTTOM - y
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {shape} fill="{colour}"><title>{escape(words)}</title></rect>')

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')

    def dot(self, x: float, y: float, colour: str, words: str) -> None:
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(words)}</title></circle>'
        )

    def legend(self, names: Sequence[str]) -> None:
        x, y = float(_LEFT), HEIGHT - 16
        for number, name in enumerate(names):
            self._parts.append(
                f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" fill="{COLOURS[number % len(COLOURS)]}"/>'
            )
            self.text(x + 14, y, name)
            x += 30 + 7 * len(name)

    def done(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])
