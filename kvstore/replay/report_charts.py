"""Charts of a report as inline SVG: lines over a logarithmic axis, and bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

LARGE, SMALL = (520, 300), (370, 220)  # width, height
LEFT, RIGHT, TOP, BOTTOM = 46, 96, 12, 34
LABEL_PIXELS = 14
TICKS_MAX = 6


class Point(NamedTuple):
    """A point, and what a person reads when pointing at it."""

    x: float
    y: float
    text: str = ""


class Series(NamedTuple):
    """A line with its name and the name of its colour."""

    name: str
    colour: str
    points: Sequence[Point]


class Band(NamedTuple):
    """What lies between two lines: (x, low, high)."""

    name: str
    edges: Sequence[tuple[float, float, float]]


class Axis(NamedTuple):
    """Where values lie between two ends, and the ticks with their texts."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-12))
        return (value - low) / (high - low) if high > low else 0.5


def percent_axis(values: Sequence[float]) -> Axis:
    """Shares from 0 to a round number above the largest."""
    top = max([*values, 0.01])
    steps = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25)
    step = next((s for s in steps if top / s <= TICKS_MAX), 0.25)
    count = math.ceil(top / step - 1e-9)
    digits = 1 if step < 0.01 else 0
    ticks = [(i * step, f"{i * step:.{digits}%}") for i in range(count + 1)]
    return Axis(0.0, count * step, ticks)


def seconds_axis(values: Sequence[float]) -> Axis:
    """Seconds on a logarithmic axis, ticks at 1, 2 and 5 of each decade or at decades."""
    low = max(min(values), 1e-4)
    high = max(*values, low * 1.01)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) > TICKS_MAX:
        inside = [tick for tick in inside if round(math.log10(tick), 6).is_integer()]
    return Axis(low, high, [(tick, _seconds_text(tick)) for tick in inside], logarithmic=True)


def _seconds_text(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1000:g} ms"


def sizes_axis(ticks: Sequence[tuple[float, str]]) -> Axis:
    """Capacities on a logarithmic axis with ticks at the simulated ones."""
    values = [value for value, _ in ticks]
    low, high = min(values), max(values)
    if low == high:
        low, high = low / 2, high * 2
    return Axis(low, high, ticks, logarithmic=True)


def line_chart(
    title: str, series: Sequence[Series], x: Axis, y: Axis, band: Band | None = None,
    small: bool = False,
) -> str:  # fmt: skip
    """A chart of lines with dots, named at their ends; a small one has neither dots nor names."""
    size = SMALL if small else LARGE
    plot = _Plot(x, y, *size, 16 if small else RIGHT)
    parts = [*plot.frame()]
    if band is not None:
        parts += plot.band(band)
    for one in series:
        parts += plot.line(one, not small)
    if not small:
        parts += plot.labels(series, band)
    return (
        f'<svg viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )


class _Plot:
    """Places things between two axes."""

    def __init__(self, x: Axis, y: Axis, width: int, height: int, right: int) -> None:
        self._x, self._y = x, y
        self._width = width - LEFT - right
        self._height = height - TOP - BOTTOM

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = LEFT + self._x.share(x) * self._width
        return across, TOP + (1 - self._y.share(y)) * self._height

    def frame(self) -> list[str]:
        bottom, end = TOP + self._height, LEFT + self._width
        parts = []
        for value, text in self._y.ticks:
            _, height = self.at(self._x.low, value)
            parts.append(_line("grid-line", LEFT, height, end, height))
            parts.append(_text(LEFT - 8, height + 4, text, "end"))
        parts.append(_line("axis", LEFT, bottom, end, bottom))
        last = -math.inf
        for value, text in self._x.ticks:
            across, _ = self.at(value, self._y.low)
            parts.append(_line("axis", across, bottom, across, bottom + 4))
            if across - last > 7 * len(text):
                parts.append(_text(across, bottom + 19, text, "middle"))
                last = across
        return parts

    def line(self, series: Series, dots: bool) -> list[str]:
        colour = f"var(--{series.colour})"
        places = [self.at(x, y) for x, y, _ in series.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        kind = "best" if series.colour == "best" else "series"
        parts = [f'<polyline class="{kind}" points="{path}" style="stroke:{colour}"/>']
        for (x, y), point in zip(places, series.points, strict=True):
            if dots:
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" style="fill:{colour}">'
                    f"<title>{escape(series.name)}: {escape(point.text)}</title></circle>"
                )
        return parts

    def band(self, band: Band) -> list[str]:
        lower = [self.at(x, low) for x, low, _ in band.edges]
        upper = [self.at(x, high) for x, _, high in band.edges]
        area = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
        top = " ".join(f"{x:.1f},{y:.1f}" for x, y in upper)
        return [
            f'<polygon class="band" points="{area}"/>',
            f'<polyline class="best" points="{top}"/>',
        ]

    def labels(self, series: Sequence[Series], band: Band | None) -> list[str]:
        """Names at the right ends, moved apart where they would overlap."""
        ends = [(self.at(*s.points[-1][:2]), s.name, s.colour) for s in series if s.points]
        if band is not None and band.edges:
            x, _, high = band.edges[-1]
            ends.append((self.at(x, high), band.name, "best"))
        ends.sort(key=lambda end: end[0][1])
        heights = spread([place[1] for place, _, _ in ends], LABEL_PIXELS, TOP, TOP + self._height)
        parts = []
        for ((x, y), name, colour), height in zip(ends, heights, strict=True):
            if abs(height - y) > 2:
                parts.append(_line("leader", x + 5, y, x + 12, height))
            parts.append(_text(x + 14, height + 4, name, "start", f"fill:var(--{colour})", "name"))
        return parts


def spread(heights: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Rising heights moved as little as needed to lie `apart`, within [low, high] if they fit."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + apart if placed else low))
    limit = high
    for i in range(len(placed) - 1, -1, -1):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - apart
    return placed


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, style: str = "", kind: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}" style="{style}">'
        f"{escape(text)}</text>"
    )


def table(head: Sequence[str], groups: Sequence[Sequence[Sequence[str]]], left: int = 1) -> str:
    """A table of groups of rows; cells are HTML already, the first `left` columns are texts."""
    top = "".join(f"<th{_side(i, left)}>{escape(text)}</th>" for i, text in enumerate(head))
    body = "".join(
        ('<tr class="first">' if number and not row_number else "<tr>")
        + "".join(f"<td{_side(i, left)}>{cell}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for number, group in enumerate(groups)
        for row_number, row in enumerate(group)
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _side(column: int, left: int) -> str:
    return ' class="left"' if column < left else ""
