"""Deadlines of tests that give real work some time: multiples of what it takes here and now."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["enough_for"]


def enough_for(work: Callable[[], object], *, least: float, times: float = 5.0) -> float:
    """Does the work, and returns seconds in which a busy machine can do it again.

    Args:
        work: What must fit into the deadline, or more than that.
        least: Seconds that are returned at least, for work that is done at once.
        times: How often the work fits into the seconds that are returned.
    """
    begun = time.monotonic()
    work()
    return max(least, times * (time.monotonic() - begun))
