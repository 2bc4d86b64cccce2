"""Where rows come from, as far as this process knows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Provenance", "moment"]

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
        temperature: Of the distribution that their log-probs are of; None if they were greedy or
            raw.
    """

    began: int | None
    temperature: float | None

    @classmethod
    def common(cls, several: Iterable[Provenance | None]) -> Provenance | None:
        """That of batches below one another: the first to begin; None unless all are known."""
        known = list(several)
        if not known or any(one is None or one.began is None for one in known):
            return None
        sure = [one for one in known if one is not None]
        temperatures = {one.temperature for one in sure}
        return cls(
            min(one.began for one in sure if one.began is not None),
            temperatures.pop() if len(temperatures) == 1 else None,
        )
