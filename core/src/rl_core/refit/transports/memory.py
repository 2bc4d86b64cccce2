"""Memory that two processes share, and that nothing can leave behind.

On Linux it has no name at all: an anonymous file that a peer opens through the owner's entry in
``/proc`` (which only the same user may), gone with the last process that maps it, and not subject
to the size of ``/dev/shm``. Elsewhere it is a file of this user alone with an unguessable name,
removed as soon as all receivers have it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_core.errors import RefitError, RefitProtocolError
from rl_core.refit.messages import RegionRef

if TYPE_CHECKING:
    from typing import Self

__all__ = ["SharedRegion"]

_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class SharedRegion:
    """Bytes shared between processes, mapped and touched once, used by many refits.

    Attributes:
        ref: What a peer needs to attach.
        data: All bytes, as a uint8 tensor ``[nbytes]``.
        view: The same bytes for hashing.
    """

    def __init__(self, fd: int, ref: RegionRef, *, owned: bool) -> None:
        self.ref = ref
        self._fd = fd if owned else None
        mapped = mmap.mmap(fd, ref.nbytes, flags=_FLAGS)
        self.view = memoryview(mapped)
        self.data = torch.frombuffer(mapped, dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int, *, directory: str | None = None) -> Self:
        """New zeroed memory.

        Args:
            nbytes: At least 1.
            directory: Make a file there, for peers that cannot see this process in ``/proc``
                (another PID namespace). By default no file is made where that is possible.

        Raises:
            RefitError: There is not enough memory.
        """
        fd, path = _open(directory)
        try:
            os.fchmod(fd, 0o600)
            if nbytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
                raise OSError("the host has less memory than that")
            os.posix_fallocate(fd, 0, nbytes)  # so that a lack shows here, not as a signal later
            stat = os.fstat(fd)
            ref = RegionRef(
                path or f"/proc/{os.getpid()}/fd/{fd}", nbytes, stat.st_dev, stat.st_ino
            )
            return cls(fd, ref, owned=True)
        except OSError as error:
            os.close(fd)
            if path:
                os.unlink(path)
            raise RefitError(
                f"{nbytes} bytes of shared memory cannot be had: {error}",
                fix="lower bucket_bytes, or give the host (or container) more memory",
            ) from error

    @classmethod
    def attach(cls, ref: RegionRef) -> Self:
        """Maps the memory of another process.

        Raises:
            RefitProtocolError: It is not there, or is not what ``ref`` describes.
        """
        try:
            fd = os.open(ref.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                stat = os.fstat(fd)
                found = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_uid)
                if found == (ref.device, ref.inode, ref.nbytes, os.geteuid()):
                    return cls(fd, ref, owned=False)
            finally:
                os.close(fd)
        except OSError as error:
            raise RefitProtocolError(
                f"the sender's shared memory {ref.path} cannot be mapped: {error}",
                fix="run both sides as one user in one PID namespace, or set RL_CORE_SHM_DIR "
                "to a directory in memory that both see",
            ) from error
        raise RefitProtocolError(f"{ref.path} is not the sender's shared memory")

    def slot(self, index: int, nbytes: int) -> tuple[torch.Tensor, memoryview]:
        """One of the equal parts of the memory, as a tensor and as bytes."""
        start = index * nbytes
        return self.data[start : start + nbytes], self.view[start : start + nbytes]

    @property
    def anonymous(self) -> bool:
        """True if it has no name, so that peers can attach at any time."""
        return self.ref.path.startswith("/proc/")

    def unlink(self) -> None:
        """Removes the name, if there is one; whoever has the memory keeps it."""
        if not self.anonymous:
            with suppress(FileNotFoundError):
                os.unlink(self.ref.path)

    def close(self) -> None:
        """Lets go; the memory is gone once every process and tensor has let go of it."""
        if self._fd is not None:
            self.unlink()
            os.close(self._fd)
            self._fd = None
        self.data = torch.empty(0, dtype=torch.uint8)
        self.view = memoryview(b"")


def _open(directory: str | None) -> tuple[int, str]:
    """A descriptor of new memory, and its path if it has a name."""
    if directory is None and hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        return os.memfd_create("rl-refit", os.MFD_CLOEXEC), ""
    fast = Path("/dev/shm")  # noqa: S108 - the file is exclusive, private and unguessable
    base = directory or (str(fast) if fast.is_dir() else tempfile.gettempdir())
    path = os.path.join(base, f"rl-refit-{secrets.token_hex(16)}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), path
