"""OpenMP's helper threads: each thread that computes keeps its own, idle between its loops.

If a process has more of them than processors, libgomp puts an idle helper to sleep at once, where
it otherwise spins for a moment. Waking one takes longer than a loop of a small model, so such loops
run on one processor. libgomp counts all helpers, also those of a thread that only waits.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["release_threads"]

#: ``omp_pause_soft`` of OpenMP 5.0.
_SOFT = 1


def release_threads() -> None:
    """Ends the calling thread's helpers; its next loop starts new ones."""
    if (pause := _pause_resources()) is not None:
        pause(_SOFT)


@cache
def _pause_resources() -> Any:
    """The function of the OpenMP that torch was linked with, or None."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library)).omp_pause_resource_all
    except (AttributeError, OSError):
        return None
