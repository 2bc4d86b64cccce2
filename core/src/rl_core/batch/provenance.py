"""Where rows come from, as far as this process knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Provenance", "off_policy"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """The distribution of a batch's log-probs, such as ``temperature 0.7, top_p 0.9``.

    None if they are greedy or raw. It stays with slices and selections in this process.
    """

    distribution: str | None

    @classmethod
    def common(cls, several: Iterable[Provenance | None]) -> Provenance | None:
        """That of batches below one another; None unless all are known."""
        given = list(several)
        known = [one.distribution for one in given if one is not None]
        if not known or len(known) < len(given):
            return None
        return cls(known[0] if len(set(known)) == 1 else None)


def off_policy(rows: str, distribution: str | None, temperature: float) -> str:
    """What is wrong with rows of another distribution than a policy scores; ``rows`` begins it."""
    ours = f"temperature {temperature:g}"
    if distribution in (None, ours):
        return ""
    return (
        f"{rows} {distribution}, but the policy scores and trains at {ours} over the whole "
        "vocabulary: their log-probs are of different distributions, so every importance weight is "
        'off by the ratio of the two. Set "temperature" to the same value in both configurations, '
        "and leave top_k, top_p and repetition_penalty out."
    )
