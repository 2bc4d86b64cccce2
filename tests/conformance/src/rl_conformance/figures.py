"""What a check can have plotted: distributions and durations. Imports nothing heavy."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Figure", "Histogram", "Span", "Timeline", "figure_as_dict", "figures_from"]

#: Bounds of all bins that there are, four to a decade: reports of any two runs can be compared.
_GRID = tuple(float(f"{10 ** (step / 4):.4g}") for step in range(-36, 5))


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values occurred, in bins on a logarithmic scale.

    The outermost bins there can be, at 1e-9 and 10, also hold what lies beyond them.

    Attributes:
        title: What is plotted; figures of a clause with the same title share a chart.
        name: What tells it from the others in the chart.
        edges: Bounds of the bins, one more than ``counts``; empty if every value was 0.
        counts: Values in each bin.
        zeros: Values that were exactly 0.
        tolerance: The largest value that passes, None if single values are not judged.
        unit: Of the values; "" for a pure number.
    """

    kind: ClassVar[str] = "histogram"

    title: str
    name: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    zeros: int = 0
    tolerance: float | None = None
    unit: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        name: str,
        values: Iterable[float],
        *,
        tolerance: float | None = None,
        unit: str = "",
    ) -> Self:
        """Counts values that are not negative; one that is not a number counts as the largest."""
        counts, zeros = [0] * (len(_GRID) - 1), 0
        for value in values:
            if value == 0:
                zeros += 1
            else:
                counts[min(max(bisect_right(_GRID, value) - 1, 0), len(counts) - 1)] += 1
        filled = [index for index, count in enumerate(counts) if count]
        first, end = (filled[0], filled[-1] + 1) if filled else (0, 0)
        edges = _GRID[first : end + 1] if filled else ()
        return cls(title, name, edges, tuple(counts[first:end]), zeros, tolerance, unit)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads what :func:`figure_as_dict` wrote."""
        return cls(**{**data, "edges": tuple(data["edges"]), "counts": tuple(data["counts"])})

    @property
    def total(self) -> int:
        """How many values there were."""
        return sum(self.counts) + self.zeros


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of time.

    Attributes:
        name: Of what was going on.
        seconds: How long.
    """

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What came after what, and how long it took.

    Attributes:
        title: What is plotted; figures of a clause with the same title share a chart.
        name: What tells it from the others in the chart.
        spans: One after the other.
    """

    kind: ClassVar[str] = "timeline"

    title: str
    name: str
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, title: str, name: str, seconds: Mapping[str, float]) -> Self:
        """From the seconds of each span, in order."""
        return cls(title, name, tuple(Span(span, float(s)) for span, s in seconds.items()))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads what :func:`figure_as_dict` wrote."""
        return cls(**{**data, "spans": tuple(Span(**span) for span in data["spans"])})

    @property
    def seconds(self) -> float:
        """From the beginning of the first span to the end of the last."""
        return sum(span.seconds for span in self.spans)


Figure = Histogram | Timeline

_KINDS: dict[str, type[Histogram | Timeline]] = {cls.kind: cls for cls in (Histogram, Timeline)}


def figure_as_dict(figure: Figure) -> dict[str, Any]:
    """For JSON."""
    return {"kind": figure.kind, **asdict(figure)}


def figures_from(data: Iterable[Mapping[str, Any]]) -> tuple[Figure, ...]:
    """Reads what :func:`figure_as_dict` wrote; kinds of a later suite are left out."""
    return tuple(
        _KINDS[each["kind"]].from_dict({k: v for k, v in each.items() if k != "kind"})
        for each in data
        if each["kind"] in _KINDS
    )
