"""Bounds on configuration values, written into the TypedDicts with ``Annotated``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Range", "Unsupported"]


@dataclass(frozen=True, slots=True)
class Range:
    """The interval a number must lie in: ``Annotated[float, Range(gt=0, le=1)]``.

    None passes, so ``Annotated[int | None, Range(ge=1)]`` bounds only the number. NaN never does.

    Attributes:
        gt: Exclusive lower bound.
        ge: Inclusive lower bound.
        lt: Exclusive upper bound.
        le: Inclusive upper bound.
    """

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or value < self.lt)
            and (self.le is None or value <= self.le)
        )

    def __str__(self) -> str:
        bounds = ((">", self.gt), (">=", self.ge), ("<", self.lt), ("<=", self.le))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A key that others know, and that here is None: ``Annotated[int | None, Unsupported(...)]``.

    Attributes:
        why: What decides instead.
        fix: What to do.
    """

    why: str
    fix: str
