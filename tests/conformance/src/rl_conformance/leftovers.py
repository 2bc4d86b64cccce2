"""What a process holds that must be given back: children, shared memory, sockets, files."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

__all__ = ["Leftovers"]

_SHARED_MEMORY = Path("/dev/shm")
#: Seconds within which what another run has killed is cleaned up by what is left of it.
_OF_OTHERS_S = 30.0
_SHARED = "shared memory"


@dataclass(frozen=True, slots=True)
class Leftovers:
    """A snapshot of this process.

    Attributes:
        children: Ids of its child processes.
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
            children=frozenset(str(child.pid) for child in children),
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

    def wait_until_back(self, seconds: float = 5.0) -> list[str]:
        """What is left beyond this snapshot; threads get a moment to let go.

        Shared memory has no owner. What no process uses may be of another run's killed process, and
        then it goes away in a while: it is waited for longer.
        """
        started = time.monotonic()
        while left := Leftovers.now().beyond(self):
            nameless = all(what.startswith(_SHARED) for what in left)
            if time.monotonic() - started > (_OF_OTHERS_S if nameless else seconds):
                break
            time.sleep(0.05)
        return left


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
    """Whether another process has the shared memory mapped: it is that process's own."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name == str(os.getpid()):
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
