"""What a process holds that must be given back: children, shared memory, sockets, files."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

from rl_conformance.deadline import stretched

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["Leftovers", "adopting_orphans", "is_running", "left_each_time"]

_SHARED_MEMORY = Path("/dev/shm")
_SHARED = "shared memory"
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
#: Seconds, on a quiet machine, within which threads and orphans release what they hold.
_RELEASE_S = 5.0
#: So many times something is done that seems to leave something, or shared memory alone, behind.
_TRIES, _SHARED_TRIES = 2, 4


@contextmanager
def adopting_orphans() -> Generator[None]:
    """Makes orphans children of this process, where Linux would make them children of init.

    So a process that a backend started is found also once its parent has ended.
    """
    if not psutil.LINUX:
        yield
        return
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def left_each_time(act: Callable[[], object], *, files: bool = True) -> list[str]:
    """What an act leaves behind each time it is done, in words.

    Shared memory has no owner, and other programs of this user may leave some meanwhile. So an act
    that seems to leave something is done again, and what it really leaves is found each time.

    Args:
        act: What is done.
        files: Whether file descriptors count.
    """
    left: list[str] = []
    for number in range(1, _SHARED_TRIES + 1):
        before = Leftovers.now()
        if not files:
            before = replace(before, files=sys.maxsize)
        act()
        left = before.wait_until_back(_RELEASE_S)
        shared = all(what.startswith(_SHARED) for what in left)
        if not left or (number >= _TRIES and not shared):
            break
    return left


@dataclass(frozen=True, slots=True)
class Leftovers:
    """A snapshot of this process.

    Attributes:
        children: Ids of the running processes that it or its descendants started.
        shared_memory: Names of this user's shared memory objects.
        sockets: Paths and addresses of its sockets.
        files: Number of open file descriptors.
        device_bytes: Device memory allocated by torch in this process.
    """

    children: frozenset[str]
    shared_memory: frozenset[str]
    sockets: frozenset[str]
    files: int
    device_bytes: int

    @classmethod
    def now(cls) -> Self:
        """The present state, after a garbage collection."""
        import torch

        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Torch keeps for the next use cached blocks, workspaces, files of counts.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        process = psutil.Process()
        children = process.children(recursive=True)
        return cls(
            children=frozenset(str(child.pid) for child in children if is_running(child.pid)),
            shared_memory=frozenset(_own_shared_memory()),
            sockets=frozenset(_listening(process)),
            files=process.num_fds(),
            device_bytes=_device_bytes(),
        )

    def beyond(self, other: Leftovers) -> list[str]:
        """What this snapshot has that the other has not, in words."""
        found = [f"process {pid}" for pid in sorted(self.children - other.children)]
        names = sorted(self.shared_memory - other.shared_memory)
        found += [f"{_SHARED} {name}" for name in names if not _used_elsewhere(name)]
        found += [f"socket {name}" for name in sorted(self.sockets - other.sockets)]
        if self.files > other.files:
            found.append(f"{self.files - other.files} file descriptors")
        if self.device_bytes > other.device_bytes:
            found.append(f"{self.device_bytes - other.device_bytes} bytes of device memory")
        return found

    def wait_until_back(self, seconds: float) -> list[str]:
        """Returns what is left beyond this snapshot, once there was time to release it."""
        end = time.monotonic() + stretched(seconds)
        while (left := Leftovers.now().beyond(self)) and time.monotonic() < end:
            time.sleep(0.05)
        return left


def is_running(pid: int) -> bool:
    """Whether a process has not ended. One that its parent has not waited for has."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _own_shared_memory() -> list[str]:
    if not _SHARED_MEMORY.is_dir():
        return []
    names = []
    for path in _SHARED_MEMORY.iterdir():
        try:
            own = path.stat().st_uid == os.getuid()
        except FileNotFoundError:
            continue
        if own:
            names.append(path.name)
    return names


def _used_elsewhere(name: str) -> bool:
    """Whether a process that this one did not start has the shared memory mapped."""
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if int(maps.parent.name) in own:
            continue
        try:
            if f"/{name}" in maps.read_text(errors="replace"):
                return True
        except OSError:  # the process ended, or is another user's
            continue
    return False


def _listening(process: psutil.Process) -> list[str]:
    connections = process.net_connections(kind="all")
    return [str(c.laddr) for c in connections if c.laddr and not c.raddr]


def _device_bytes() -> int:
    import torch

    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.memory_allocated() if cuda else 0
