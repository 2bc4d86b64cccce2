"""Where everything in a chart goes. The template draws it as inline SVG, in the page's colours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rl_conformance.figures import Histogram, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rl_conformance.figures import Figure
    from rl_conformance.reports.matrix import Column, Matrix, Row

__all__ = ["Bar", "Chart", "Strip", "Tick", "charts"]

#: Sizes in the units of the SVG, which are about a pixel each.
WIDTH, LEFT, RIGHT = 400.0, 34.0, 388.0
_LABEL, _GAP, _AXIS = 18.0, 12.0, 38.0
_HEIGHTS = {Histogram.kind: 46.0, Timeline.kind: 16.0}
#: Room at the left of a logarithmic axis for values that are exactly 0.
_ZERO, _ZERO_BAR = 44.0, 20.0
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
#: Most labels along an axis.
_TICKS = 7


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar or a stretch of time.

    Attributes:
        x: Its left end.
        width: Its width.
        height: As a fraction of the strip's.
        series: Which colour.
        text: What it stands for, in words.
    """

    x: float
    width: float
    height: float
    series: int
    text: str


@dataclass(frozen=True, slots=True)
class Strip:
    """One figure of a chart.

    Attributes:
        name: Of the figure.
        note: Its size.
        top: Where its bars may begin.
        height: Of the tallest bar.
        bars: From left to right.
        peak: What the tallest bar stands for, "" if all are of one height.
    """

    name: str
    note: str
    top: float
    height: float
    bars: tuple[Bar, ...]
    peak: str

    @property
    def bottom(self) -> float:
        """Where its bars stand."""
        return self.top + self.height


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled place on the axis."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Figures of one clause in one run that share an axis.

    Attributes:
        id: Unique on the page.
        clause: Number of the clause.
        column: Heading of the run.
        title: What is plotted.
        axis: What the axis measures.
        strips: From top to bottom.
        ticks: Along the axis.
        limit: The largest value that passes, if there is one.
        legend: Names of the colours, if there are several.
        first: Whether it is the first with its clause and title.
    """

    id: str
    clause: str
    column: str
    title: str
    axis: str
    strips: tuple[Strip, ...]
    ticks: tuple[Tick, ...]
    limit: Tick | None
    legend: tuple[str, ...]
    first: bool

    @property
    def height(self) -> float:
        """Of the whole SVG."""
        return self.strips[-1].bottom + _AXIS


@dataclass(frozen=True, slots=True)
class _Scale:
    """An axis: its label, its ticks, and where a value lies on it."""

    label: str
    ticks: tuple[Tick, ...]
    place: Callable[[float], float]


def charts(matrix: Matrix) -> list[Chart]:
    """Every chart; those of one clause and title stand together and share their axis."""
    found: list[Chart] = []
    for row in matrix.rows:
        for group in _groups(matrix, row):
            draw = _DRAWERS[group[0][1][0].kind]
            scale = draw.scale([figure for _, figures in group for figure in figures])
            for index, (column, figures) in enumerate(group):
                id_ = f"chart-{len(found)}"
                found.append(_chart(id_, row, column, figures, scale, draw, first=not index))
    return found


def _groups(matrix: Matrix, row: Row) -> Iterator[list[tuple[Column, list[Figure]]]]:
    """Figures of a clause by kind and title, and in these by column."""
    every = [
        (figure, index)
        for index, cell in enumerate(row.cells)
        for outcome in (cell.outcomes if cell else ())
        for figure in outcome.figures
    ]
    keys = dict.fromkeys((figure.kind, figure.title) for figure, _ in every)
    for key in keys:
        same = [(f, index) for f, index in every if (f.kind, f.title) == key]
        by_column = groupby(same, key=lambda pair: pair[1])
        yield [(matrix.columns[index], [f for f, _ in pairs]) for index, pairs in by_column]


def _chart(
    id_: str,
    row: Row,
    column: Column,
    figures: Sequence[Figure],
    scale: _Scale,
    draw: _Drawer,
    *,
    first: bool,
) -> Chart:
    strips, top = [], _LABEL
    legend = draw.legend(figures)
    for figure in figures:
        strips.append(draw.strip(figure, top, scale, legend))
        top = strips[-1].bottom + _GAP + _LABEL
    return Chart(
        id=id_,
        clause=row.clause.id,
        column=column.label,
        title=figures[0].title,
        axis=scale.label,
        strips=tuple(strips),
        ticks=scale.ticks,
        limit=draw.limit(figures, scale),
        legend=legend,
        first=first,
    )


# -- histograms ------------------------------------------------------------------------------------


def _log_scale(figures: Sequence[Histogram]) -> _Scale:
    """Whole decades that hold every bin and every tolerance, and a place for 0."""
    bounds = [edge for f in figures for edge in (f.edges[:1] + f.edges[-1:])]
    bounds += [f.tolerance for f in figures if f.tolerance]
    first = math.floor(math.log10(min(bounds, default=1e-9)))
    last = max(math.ceil(math.log10(max(bounds, default=1.0))), first + 1)
    zero = any(f.zeros for f in figures)
    start = LEFT + _ZERO * zero

    def place(value: float) -> float:
        if value == 0:
            return LEFT
        return start + (math.log10(value) - first) / (last - first) * (RIGHT - start)

    step = math.ceil((last - first + 1) / _TICKS)
    decades = range(last, first - 1, -step)
    ticks = [Tick(place(10.0**n), "10" + str(n).translate(_SUPERSCRIPTS)) for n in decades[::-1]]
    if zero:
        ticks.insert(0, Tick(LEFT + _ZERO_BAR / 2, "0"))
    unit = f"{figures[0].unit}, " if figures[0].unit else ""
    return _Scale(f"absolute error ({unit}logarithmic scale)", tuple(ticks), place)


def _histogram(figure: Histogram, top: float, scale: _Scale, legend: tuple[str, ...]) -> Strip:
    peak = max((*figure.counts, figure.zeros), default=0)
    bars = []
    if figure.zeros:
        bars.append(Bar(LEFT, _ZERO_BAR, figure.zeros / peak, 0, f"exactly 0: {figure.zeros}"))
    for low, high, count in zip(figure.edges, figure.edges[1:], figure.counts, strict=False):
        if count:
            x, end = scale.place(low), scale.place(high)
            text = f"{low:.2g} to {high:.2g}: {count}"
            bars.append(Bar(x + 0.5, end - x - 1, count / peak, 0, text))
    height = _HEIGHTS[figure.kind]
    return Strip(figure.name, f"{figure.total} values", top, height, tuple(bars), str(peak))


def _limit(figures: Sequence[Histogram], scale: _Scale) -> Tick | None:
    tolerances = {f.tolerance for f in figures if f.tolerance}
    if len(tolerances) != 1:
        return None
    (tolerance,) = tolerances
    return Tick(scale.place(tolerance), f"at most {tolerance:g}")


# -- timelines -------------------------------------------------------------------------------------


def _time_scale(figures: Sequence[Timeline]) -> _Scale:
    """From 0 to the longest."""
    longest = max(f.seconds for f in figures) or 1e-3
    unit, factor = _time_unit(longest)
    least = longest * factor / (_TICKS - 2)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= least * (1 - 1e-9))
    end = math.ceil(longest * factor / step) * step

    def place(seconds: float) -> float:
        return LEFT + seconds * factor / end * (RIGHT - LEFT)

    marks = [step * n for n in range(round(end / step) + 1)]
    ticks = tuple(Tick(place(mark / factor), f"{mark:g}") for mark in marks)
    return _Scale(f"time since the first message ({unit})", ticks, place)


def _time_unit(seconds: float) -> tuple[str, float]:
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e3)


def _timeline(figure: Timeline, top: float, scale: _Scale, legend: tuple[str, ...]) -> Strip:
    bars, passed = [], 0.0
    for span in figure.spans:
        x, end = scale.place(passed), scale.place(passed + span.seconds)
        passed += span.seconds
        text = f"{span.name}: {_duration(span.seconds)}"
        bars.append(Bar(x, end - x, 1.0, legend.index(span.name), text))
    height = _HEIGHTS[figure.kind]
    return Strip(figure.name, _duration(passed), top, height, tuple(bars), "")


def _duration(seconds: float) -> str:
    unit, factor = _time_unit(seconds)
    return f"{seconds * factor:.3g} {unit}"


@dataclass(frozen=True, slots=True)
class _Drawer:
    """How one kind of figure is drawn."""

    scale: Callable[..., _Scale]
    strip: Callable[..., Strip]
    limit: Callable[..., Tick | None] = lambda figures, scale: None
    legend: Callable[..., tuple[str, ...]] = lambda figures: ()


_DRAWERS = {
    Histogram.kind: _Drawer(_log_scale, _histogram, limit=_limit),
    Timeline.kind: _Drawer(
        _time_scale,
        _timeline,
        legend=lambda figures: tuple(dict.fromkeys(span.name for f in figures for span in f.spans)),
    ),
}
