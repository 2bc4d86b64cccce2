"""The most memory that something takes while it runs, which is more than what it leaves behind."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["MemoryPeak"]


class MemoryPeak:
    """What this process, its children and its GPU take beyond what they have now.

    Linux keeps the peak of each process, and begins anew if it is told to. Where it cannot be told,
    only what is kept to the end is seen. Processes that start later are not looked at.

    Args:
        trim: First gives back what this process has freed and its allocator keeps, so that what is
            taken from that counts too. Not so in a child.

    Attributes:
        exact: Whether peaks are seen.
    """

    def __init__(self, *, trim: bool = False) -> None:
        if trim:
            _give_back()
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self._resident: dict[psutil.Process, int] = {}
        self._kept = {process.pid for process in processes if _begin_anew(process)}
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                self._resident[process] = process.memory_info().rss
        self.exact = len(self._kept) == len(processes)
        self._device = _device_peak(anew=True)

    def resident(self) -> int:
        """Bytes of main memory, of the process that took the most."""
        risen = [0]
        for process, before in self._resident.items():
            with suppress(psutil.NoSuchProcess):
                now = _peak(process) if process.pid in self._kept else process.memory_info().rss
                risen.append(now - before)
        return max(risen)

    def device(self) -> int:
        """Bytes of device memory that torch allocated in this process."""
        return _device_peak() - self._device


def _give_back() -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc has it
        library.malloc_trim(0)


def _begin_anew(process: psutil.Process) -> bool:
    """Whether the peak is now what the process has; not elsewhere, and not in every container."""
    try:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak(process: psutil.Process) -> int:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    except OSError as error:
        raise psutil.NoSuchProcess(process.pid) from error
    peaks = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
    return sum(peaks) << 10  # one that has ended and was not waited for has none


def _device_peak(*, anew: bool = False) -> int:
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    if anew:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()
