"""The most memory that something takes while it runs, which is more than what it leaves behind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["MemoryPeak"]


class MemoryPeak:
    """What this process, its children and its GPU take beyond what they have now.

    Linux keeps the peak of each process, and begins anew when it is told to. Elsewhere only what
    is kept to the end is seen.
    """

    def __init__(self) -> None:
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self._resident: dict[psutil.Process, int] = {}
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                _begin_anew(process)
                self._resident[process] = process.memory_info().rss
        self._device = _device_peak(anew=True)

    def resident(self) -> int:
        """Bytes of main memory, of the process that took the most."""
        risen = [0]
        for process, before in self._resident.items():
            with suppress(psutil.NoSuchProcess):
                risen.append(_peak(process) - before)
        return max(risen)

    def device(self) -> int:
        """Bytes of device memory that torch allocated in this process."""
        return _device_peak() - self._device


def _begin_anew(process: psutil.Process) -> None:
    with suppress(OSError):
        Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")


def _peak(process: psutil.Process) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return int(process.memory_info().rss)


def _device_peak(*, anew: bool = False) -> int:
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    if anew:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()
