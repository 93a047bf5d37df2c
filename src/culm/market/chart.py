"""Charts of values over time: step functions on stacked panels, as SVG, and as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

Points: TypeAlias = Sequence[tuple[float, float]]
"""(time, value) pairs: the value holds from that time on."""

LINE_COLOURS = (
    "#1971c2",
    "#e8590c",
    "#2f9e44",
    "#9c36b5",
    "#c92a2a",
    "#0c8599",
    "#f08c00",
    "#495057",
    "#5c940d",
    "#862e9c",
)

_WIDTH, _LEFT, _RIGHT, _HEIGHT, _GAP, _TOP = 960, 80, 180, 150, 50, 60


@dataclass(frozen=True)
class ChartPanel:
    """One set of axes."""

    label: str
    series: dict[str, Points]
    slope: bool = False
    """Draw straight lines from point to point instead of steps."""


def draw_svg(title: str, panels: Sequence[ChartPanel], end: float, unit: str = "h") -> str:
    """Draw the panels over a common time axis from 0 to `end`, in `unit`."""
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    body = [line for number, panel in enumerate(panels) for line in _panel(panel, number, end or 1.0, unit)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
            f'<text x="20" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(panel: ChartPanel, number: int, end: float, unit: str) -> Iterator[str]:
    top = _TOP + number * (_HEIGHT + _GAP)
    high = max((value for points in panel.series.values() for _, value in points), default=0.0) or 1.0
    across, up = (_WIDTH - _LEFT - _RIGHT) / end, _HEIGHT / high

    def at(t: float, value: float) -> tuple[float, float]:
        return _LEFT + min(t, end) * across, top + _HEIGHT - value * up

    yield f'<text x="20" y="{top - 8}" font-weight="bold">{escape(panel.label)}</text>'
    for value in _ticks(high, 4):
        y = at(0, value)[1]
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e9ecef"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#495057">{value:.4g}</text>'
    for t in _ticks(end, 8):
        x = at(t, 0)[0]
        yield f'<text x="{x:.1f}" y="{top + _HEIGHT + 16}" text-anchor="middle" fill="#495057">{t:.4g} {unit}</text>'
    for index, (name, points) in enumerate(panel.series.items()):
        colour = LINE_COLOURS[index % len(LINE_COLOURS)]
        path = _path([at(*point) for point in points], at(end, 0)[0], slope=panel.slope)
        yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        yield f'<rect x="{_WIDTH - _RIGHT + 14}" y="{top + index * 17}" width="12" height="4" fill="{colour}"/>'
        yield f'<text x="{_WIDTH - _RIGHT + 32}" y="{top + index * 17 + 6}">{escape(name)}</text>'


def _path(points: Sequence[tuple[float, float]], right: float, *, slope: bool) -> str:
    if not points:
        return ""
    first, *others = points
    join = "".join(f"L{x:.1f} {y:.1f}" if slope else f"H{x:.1f}V{y:.1f}" for x, y in others)
    return f"M{first[0]:.1f} {first[1]:.1f}{join}" + ("" if slope else f"H{right:.1f}")


def _ticks(high: float, count: int) -> list[float]:
    """About `count` round numbers from 0 to `high`."""
    power = 10.0 ** math.floor(math.log10(high / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * count >= high * 0.999)
    return [number * step for number in range(math.floor(high / step + 1e-9) + 1)]


def draw_text_chart(points: Points, end: float, *, width: int = 72, height: int = 10) -> str:
    """The value over time as columns of block characters, each the mean over its part of the time."""
    columns = column_means(points, end, width)
    high = max(columns, default=0.0) or 1.0
    lines = []
    for row in reversed(range(height)):
        scale = f"{high * (row + 1) / height:8.4g} " if row in (height - 1, (height - 1) // 2) else " " * 9
        lines.append(scale + "".join(_block(value / high * height - row) for value in columns).rstrip())
    return "\n".join([*lines, f"{0:8} {'-' * width}", f"{'':9}0 h{end:{width - 5}.4g} h"]) + "\n"


def _block(filled: float) -> str:
    return " ▁▂▃▄▅▆▇█"[max(0, min(8, round(filled * 8)))]


def column_means(points: Points, end: float, count: int) -> list[float]:
    """The mean of a step function over each of `count` equal parts of the time from 0 to `end`."""
    column_width = end / count
    means = [0.0] * count
    stops = [t for t, _ in points[1:]] + [end]
    for (start, value), stop in zip(points, stops, strict=True):
        for column in range(int(start / column_width) if column_width else count, count):
            overlap = min(stop, (column + 1) * column_width) - max(start, column * column_width)
            if overlap <= 0:
                break
            means[column] += value * overlap / column_width
    return means
