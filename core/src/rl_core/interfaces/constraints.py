"""What keys of a configuration may be, and what others call them: for ``Annotated``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AlsoCalled", "Range", "Unsupported"]


@dataclass(frozen=True, slots=True)
class Range:
    """The interval a number must lie in: ``Annotated[float, Range(gt=0, le=1)]``.

    None passes, so ``Annotated[int | None, Range(ge=1)]`` bounds only the number. NaN never does.

    Attributes:
        gt: Exclusive lower bound.
        ge: Inclusive lower bound.
        lt: Exclusive upper bound.
        le: Inclusive upper bound.
        fix: What to do about a number outside, if it is not to set another.
    """

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    fix: str | None = None

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
class AlsoCalled:
    """Names of a key elsewhere: ``Annotated[float, AlsoCalled("learning_rate")]``.

    Attributes:
        names: With blanks between them; the error for one of them has the key.
        value: What the key is set to, if that is another than the value of such a name.
    """

    names: str
    value: str = "..."


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A key that others know, and that here is None: ``Annotated[int | None, Unsupported(...)]``.

    Attributes:
        why: What decides instead.
        fix: What to do.
    """

    why: str
    fix: str
