"""The most memory that something takes while it runs, which is more than what it leaves behind."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["MemoryPeak"]

#: Where memory lies that no file holds: no name, a name in brackets, or a file of memory alone.
_OWN = ("[", "/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")


class MemoryPeak:
    """What this process, its children and its GPU take beyond what they have now.

    Linux keeps the peak of each process, and resets it on request. Where it does not,
    only what is kept to the end is seen. Processes that start later are not looked at. What is kept
    is also seen where the system takes back pages of files meanwhile, which hides it in a peak. A
    page of a mapped file that is written to takes nothing: it was there.

    Args:
        trim: First frees what nothing in this process uses any more, and gives back what its
            allocator keeps: what is taken from that counts then, and what is freed meanwhile does
            not hide what is taken. Not so in a child.

    Attributes:
        exact: Whether peaks are seen.
    """

    def __init__(self, *, trim: bool = False) -> None:
        if trim:
            gc.collect()
            if hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # glibc has it
                library.malloc_trim(0)
        self._device = _device_peak(anew=True)  # first: it may have to import torch
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self._resident: dict[psutil.Process, int] = {}
        self._own: dict[psutil.Process, int] = {}
        self._kept = {process.pid for process in processes if _begin_anew(process)}
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                own, resident = _own(process), process.memory_info().rss
                self._resident[process], self._own[process] = resident, own
        self.exact = len(self._kept) == len(processes)

    def resident(self) -> int:
        """Bytes of main memory, of the process that took the most."""
        risen = [0]
        for process, before in self._resident.items():
            with suppress(psutil.NoSuchProcess):
                kept = process.pid in self._kept
                now = _peak(process) if kept else process.memory_info().rss
                risen += [now - before, _own(process) - self._own[process]]
        return max(risen)

    def device(self) -> int:
        """Bytes of device memory that torch allocated in this process."""
        return _device_peak() - self._device


def _begin_anew(process: psutil.Process) -> bool:
    """Whether the peak is now what the process has; not elsewhere, and not in every container."""
    try:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak(process: psutil.Process) -> int:
    """The most that was resident since the peak began anew, in bytes."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    except OSError as error:
        raise psutil.NoSuchProcess(process.pid) from error
    peaks = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return sum(int(words[1]) for words in peaks) << 10  # one that has ended has none


def _own(process: psutil.Process) -> int:
    """Memory that no file holds, swapped or not, in bytes; 0 where the system does not count it."""
    if not psutil.LINUX:
        return 0
    try:
        maps = process.memory_maps(grouped=False)
    except (psutil.AccessDenied, OSError):
        return 0
    return sum(each.rss + each.swap for each in maps if each.path.startswith(_OWN))


def _device_peak(*, anew: bool = False) -> int:
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    if anew:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()
