"""Stage times against their predictions as a picture: a column a stage, a dot a batch, a bar for what was predicted.

SVG is written here; for PNG matplotlib draws the same, which need not be installed for anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor, log10
from pathlib import Path
from xml.sax.saxutils import escape

from kafila.errors import DeviceError, TraceError, UsageError
from kafila.trace_reading import Epoch, Trace
from kafila.trace_report import StageTimes, stage_times

MOST_DOTS = 300
"""A stage; of more batches every so manieth is drawn."""
_COLUMN, _HEIGHT = 130, 320
_LEFT, _TOP, _BOTTOM = 70, 50, 60
_MEASURED, _PREDICTED, _INK = "#4477aa", "#cc3311", "#222222"


def plot(trace: Trace, path: Path) -> None:
    """Draw the last plan that has decode batches, as ``path``'s ending says.

    Raises UsageError for another ending, TraceError where there is nothing to draw or no place to write to, DeviceError
    without the library that PNG needs.
    """
    kind = path.suffix.lower()
    if kind not in {".svg", ".png"}:
        raise UsageError(f"{path}: a plot is written as .svg or .png")
    epoch = next((epoch for epoch in reversed(trace.epochs) if any(batch.decode for batch in epoch.batches)), None)
    if epoch is None:
        raise TraceError(
            "there is no decode batch in this trace to plot: the head's has them, once something was asked"
        )
    title = f"{epoch.plan.model}: decode stage times"
    try:
        if kind == ".svg":
            path.write_text(svg(stage_times(epoch), title), encoding="utf-8")
        else:
            _png(epoch, title, path)
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}") from error


def svg(stages: Sequence[StageTimes], title: str) -> str:
    """The picture as a document of its own."""
    width, height = _LEFT + _COLUMN * len(stages) + 20, _TOP + _HEIGHT + _BOTTOM
    top_ms = ceiling_ms(stages)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="{_INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="38">dots: measured, one a batch; black: their median; '
        f'<tspan fill="{_PREDICTED}">red: predicted</tspan></text>',
        *_axis(top_ms, width),
        *(part for place, stage in enumerate(stages) for part in _column(place, stage, top_ms)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def ceiling_ms(stages: Sequence[StageTimes]) -> float:
    """Where the axis ends: above nearly everything, so that one hiccup does not press all else to the floor."""
    times = [time for stage in stages for time in (stage.share(0.98), stage.predicted_s) if time is not None]
    return max(times, default=0.0) * 1.1e3 or 1.0


def ticks(top_ms: float) -> Iterator[float]:
    """Round numbers from 0 to ``top_ms``, five to ten of them."""
    power = 10.0 ** floor(log10(top_ms / 5))
    step = next(power * factor for factor in (1, 2, 5, 10) if top_ms / (power * factor) <= 10)
    for number in range(floor(top_ms / step) + 1):
        yield number * step


def _y(time_ms: float, top_ms: float) -> float:
    return _TOP + _HEIGHT * (1 - min(time_ms / top_ms, 1.0))


def _axis(top_ms: float, width: int) -> Iterator[str]:
    for tick in ticks(top_ms):
        y = _y(tick, top_ms)
        yield f'<line x1="{_LEFT}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
    yield f'<text x="14" y="{_TOP + _HEIGHT / 2:.0f}" transform="rotate(-90 14 {_TOP + _HEIGHT / 2:.0f})">ms</text>'


def _column(place: int, stage: StageTimes, top_ms: float) -> Iterator[str]:
    left, middle = _LEFT + place * _COLUMN + 15, _LEFT + place * _COLUMN + _COLUMN / 2
    inner = _COLUMN - 30
    drawn = stage.measured_s[:: -(-len(stage.measured_s) // MOST_DOTS) or 1]
    for index, time in enumerate(drawn):
        x = left + inner * (index + 0.5) / len(drawn)
        yield f'<circle cx="{x:.1f}" cy="{_y(time * 1e3, top_ms):.1f}" r="2" fill="{_MEASURED}" fill-opacity="0.5"/>'
    for time_s, colour in ((stage.median_s, _INK), (stage.predicted_s, _PREDICTED)):
        if time_s is not None:
            y = _y(time_s * 1e3, top_ms)
            ends = f'x1="{left}" x2="{left + inner}" y1="{y:.1f}" y2="{y:.1f}"'
            yield f'<line {ends} stroke="{colour}" stroke-width="2"/>'
    error = "" if stage.error is None else f", {stage.error:+.0%}"
    for line, text in enumerate((stage.name, f"blocks {stage.blocks}{error}")):
        yield f'<text x="{middle}" y="{_TOP + _HEIGHT + 20 + 16 * line}" text-anchor="middle">{escape(text)}</text>'


def _png(epoch: Epoch, title: str, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  - an extra of its own
        from matplotlib.figure import Figure  # noqa: PLC0415  - likewise
    except ImportError as error:
        raise DeviceError("PNG is drawn by matplotlib: pip install 'kafila[plot]', or write an .svg") from error
    stages = stage_times(epoch)
    figure = Figure(figsize=(1.2 + 1.6 * len(stages), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, stage in enumerate(stages):
        count = len(stage.measured_s)
        across = [place - 0.35 + 0.7 * (index + 0.5) / count for index in range(count)]
        axes.plot(across, [time * 1e3 for time in stage.measured_s], ".", color=_MEASURED, alpha=0.5, markersize=4)
        for time_s, colour in ((stage.median_s, _INK), (stage.predicted_s, _PREDICTED)):
            if time_s is not None:
                axes.plot([place - 0.35, place + 0.35], [time_s * 1e3] * 2, color=colour, linewidth=2)
    axes.set_xticks(range(len(stages)), [f"{stage.name}\nblocks {stage.blocks}" for stage in stages])
    axes.set_ylim(0, ceiling_ms(stages))
    axes.set_ylabel("ms")
    axes.set_title(f"{title}\nblack: median measured, red: predicted", fontsize=10)
    figure.savefig(path, dpi=120)
