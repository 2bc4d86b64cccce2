"""Deadlines that leave more time on a busy machine."""

from __future__ import annotations

import math
import signal
import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

__all__ = ["NoVerdict", "TookTooLong", "deadline", "stretched"]

#: Seconds of computation in which the load of the machine is measured.
_SAMPLE_S = 0.02
#: When the load was measured, and how many times longer a computation took.
_measured, _busy = -math.inf, 1.0
#: Seconds, besides its deadline, in which a block that took too long may end.
_ENDING_S = 30.0


class NoVerdict(AssertionError):
    """A check could not find out whether the backend keeps the clause; its status is ``error``."""


class TookTooLong(NoVerdict):
    """The check did not end in time: the backend hangs, or the machine is slow."""


def stretched(seconds: float) -> float:
    """Seconds in which this process gets as much done as in ``seconds`` on a quiet machine.

    A short computation is timed here and now, by the clock and by the processor time that it gets;
    again after a second.
    """
    global _measured, _busy
    started, used = time.perf_counter(), time.thread_time()
    if started - _measured > 1.0:
        while time.thread_time() - used < _SAMPLE_S:
            pass
        _measured = time.perf_counter()
        _busy = max(1.0, (_measured - started) / (time.thread_time() - used))
    return seconds * _busy


@contextmanager
def deadline(seconds: float) -> Generator[None]:
    """Ends what takes longer, on a busy machine in proportion. It works in the main thread only.

    Raises:
        TookTooLong: In the block; the message has the place. Once more if what then ends the block
            takes longer than that.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    started, again = time.monotonic(), seconds + _ENDING_S

    def expire(_: int, frame: FrameType | None) -> None:
        took = time.monotonic() - started
        if took < (most := stretched(seconds)):
            signal.setitimer(signal.ITIMER_REAL, most - took, again)
            return
        stack = traceback.extract_stack(frame)
        innermost = [at for at in stack if not at.filename.endswith("/calls.py")][-3:]
        where = " < ".join(
            f"{at.name} ({'/'.join(Path(at.filename).parts[-2:])}:{at.lineno})"
            for at in reversed(innermost)
        )
        busy = f" ({took:.0f} s on a busy machine)" if took > 2 * seconds else ""
        raise TookTooLong(f"timed out after {seconds:g} s{busy}, in {where}")

    before = signal.signal(signal.SIGALRM, expire)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, before)
