"""An end to what hangs."""

from __future__ import annotations

import signal
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

__all__ = ["TookTooLong", "deadline"]


class TookTooLong(AssertionError):
    """It did not end in time. No verdict about the backend: the host may be slow."""


@contextmanager
def deadline(seconds: float) -> Generator[None]:
    """Ends what takes longer. Only the main thread can be interrupted.

    Raises:
        TookTooLong: In the block; the message has the place.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def expire(_: int, frame: FrameType | None) -> None:
        stack = traceback.extract_stack(frame)
        innermost = [at for at in stack if not at.filename.endswith("/calls.py")][-3:]
        where = " < ".join(
            f"{at.name} ({'/'.join(Path(at.filename).parts[-2:])}:{at.lineno})"
            for at in reversed(innermost)
        )
        raise TookTooLong(f"timed out after {seconds:g} s, in {where}")

    before = signal.signal(signal.SIGALRM, expire)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, before)
