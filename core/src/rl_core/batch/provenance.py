"""Where rows come from, as far as this process knows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Provenance", "moment", "off_policy"]

_moments = itertools.count(1)


def moment() -> int:
    """A number that grows with every call in this process: what happened after what."""
    return next(_moments)


@dataclass(frozen=True, slots=True)
class Provenance:
    """How the rows of a batch were generated.

    It stays with the batch through slices and selections, and is not sent to other processes,
    whose moments are others.

    Attributes:
        began: The :func:`moment` at which the call that generated them began; None if the weights
            were a policy's own, which are never stale.
        distribution: That their log-probs are of, such as ``temperature 0.7, top_p 0.9``; None if
            they were greedy or raw.
    """

    began: int | None
    distribution: str | None

    @classmethod
    def common(cls, several: Iterable[Provenance | None]) -> Provenance | None:
        """That of batches below one another: the first to begin; None unless all are known."""
        known = [(one.began, one.distribution) if one else (None, None) for one in several]
        moments = [began for began, _ in known if began is not None]
        if not known or len(moments) < len(known):
            return None
        distributions = {distribution for _, distribution in known}
        return cls(min(moments), distributions.pop() if len(distributions) == 1 else None)


def off_policy(rows: str, distribution: str | None, temperature: float) -> str:
    """What is wrong with rows that are drawn from another distribution than a policy scores.

    Args:
        rows: The sentence's beginning: whose rows, and a verb.
        distribution: See :attr:`Provenance.distribution`.
        temperature: The policy's, which scores over the whole vocabulary.
    """
    ours = f"temperature {temperature:g}"
    if distribution in (None, ours):
        return ""
    return (
        f"{rows} {distribution}, the policy scores and trains at {ours} over the whole vocabulary: "
        "their log-probs are of different distributions, and every importance weight is off by the "
        'ratio of the two. Set "temperature" to the same value in both configurations, and leave '
        "top_k, top_p and repetition_penalty out."
    )
