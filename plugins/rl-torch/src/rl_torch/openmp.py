"""Helpers of OpenMP: each thread that computes has its own, which wait for its next loop.

Where a process has more of them than processors, libgomp has them sleep at once, not look for work
for a moment. To wake one takes longer than a loop of a small model, so that what should run on two
processors runs on one. It does not count who of them has anything to do.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["end_helpers"]

#: ``omp_pause_soft`` of OpenMP 5.0.
_SOFT = 1


def end_helpers() -> None:
    """Ends those of the calling thread, if it has any; it starts others when it computes again."""
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
