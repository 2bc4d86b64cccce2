"""Memory that processes of one host share, and that nothing can leave behind.

It has no name: an anonymous file that a peer opens through the owner's entry in ``/proc`` (which
only the same user may), freed with the last process that maps it, and not subject to the size of
``/dev/shm``.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch

from rl_core.errors import RefitError, RefitProtocolError
from rl_core.weights.transports.base import Lane

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

__all__ = ["SharedRegion"]

_SEAL_FUTURE_WRITE = 0x10  # the kernel's F_SEAL_FUTURE_WRITE, which fcntl does not name everywhere
#: Bytes that tensors left after which the heap returns its free memory to the system.
_TRIM_BYTES = 64 << 20


class _Ref(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A path to open, and what must be found there."""

    kind: Literal["memory"]
    path: str
    nbytes: int
    device: int
    inode: int


class SharedRegion(Lane):
    """Bytes shared between processes, mapped and touched once, used by many refits.

    What the sender writes is there for receivers at once: nothing is published or awaited. It alone
    may write, and nobody can cut the memory off that another has mapped.
    """

    def __init__(self, fd: int, ref: _Ref, *, writable: bool = False, grows: bool = False) -> None:
        self.ref = msgspec.to_builtins(ref)
        self._fd, self._grows, self._left = fd, grows, 0
        flags = mmap.MAP_SHARED | (0 if grows else mmap.MAP_POPULATE)
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapped = mmap.mmap(fd, ref.nbytes, flags=flags, prot=rights)
        seen: Any = self._mapped
        if not writable:  # torch has no tensors that may only be read, and warns of such buffers
            address = np.frombuffer(self._mapped, np.uint8).ctypes.data
            seen = (ctypes.c_ubyte * ref.nbytes).from_address(address)
            seen.mapped = self._mapped  # stays mapped as long as a tensor looks at it
        self.data = torch.frombuffer(seen, dtype=torch.uint8, count=ref.nbytes)
        self._finalizer: weakref.finalize[..., SharedRegion] | None = None

    @classmethod
    def create(cls, nbytes: int, *, grows: bool = False) -> Self:
        """New zeroed memory.

        Args:
            nbytes: At least 1.
            grows: Memory is had as :meth:`allocate_view` asks for it, so that what is moved in can
                be freed where it was before the next is moved. Nothing else may be written.
        """
        fd = os.memfd_create("rl-refit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            if nbytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
                raise OSError("the host has less memory than that")
            if grows:
                os.ftruncate(fd, nbytes)
            else:
                os.posix_fallocate(fd, 0, nbytes)  # a lack shows here, not as a signal later
            stat = os.fstat(fd)
            path = f"/proc/{os.getpid()}/fd/{fd}"
            ref = _Ref("memory", path, nbytes, stat.st_dev, stat.st_ino)
            region = cls(fd, ref, writable=True, grows=grows)
            # Nobody may change the size, or map the memory to write to it.
            seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            try:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _SEAL_FUTURE_WRITE)
            except OSError:  # before Linux 5.1
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            os.close(fd)
            raise _lacking(nbytes, error) from error
        region._finalizer = weakref.finalize(region, _release, fd, os.getpid())
        return region

    @classmethod
    def attach(cls, ref: Mapping[str, Any]) -> Self:
        """Maps the memory of another process."""
        try:
            wanted = msgspec.convert(ref, _Ref)
            fd = os.open(wanted.path, os.O_RDONLY | os.O_CLOEXEC)
        except msgspec.ValidationError as error:
            raise RefitProtocolError(f"received a malformed memory reference: {error}") from error
        except (OSError, ValueError) as error:
            raise _unmapped(wanted.path, error) from error
        try:
            stat = os.fstat(fd)
            found = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_uid)
            if found == (wanted.device, wanted.inode, wanted.nbytes, os.geteuid()):
                return cls(fd, wanted)
        except (OSError, ValueError) as error:
            raise _unmapped(wanted.path, error) from error
        finally:
            os.close(fd)
        raise RefitProtocolError(f"{wanted.path} is not the sender's shared memory")

    def allocate_view(self, start: int, stop: int) -> torch.Tensor:
        if self._grows:
            if self._left >= _TRIM_BYTES:
                self.free_old_memory()
            self._left += stop - start
            try:
                os.posix_fallocate(self._fd, start, stop - start)
            except OSError as error:
                raise _lacking(stop - start, error) from error
        return torch.frombuffer(self._mapped, dtype=torch.uint8, offset=start, count=stop - start)

    def sender_gone(self) -> bool:
        """See :meth:`Lane.sender_gone`: who has the memory has its path."""
        try:
            found = os.stat(self.ref["path"])
        except OSError as error:
            return isinstance(error, FileNotFoundError | ProcessLookupError)
        return (found.st_dev, found.st_ino) != (self.ref["device"], self.ref["inode"])

    def free_old_memory(self) -> None:
        """See :meth:`Lane.free_old_memory`: malloc keeps small pieces otherwise."""
        self._left = 0
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc has it
            trim(0)

    def close(self) -> None:
        """Releases this side; the memory is freed once no process and no tensor uses it."""
        if self._finalizer is not None:
            self._finalizer()
        self.data = torch.empty(0, dtype=torch.uint8)


def _lacking(nbytes: int, error: OSError) -> RefitError:
    return RefitError(
        f"cannot allocate {nbytes} bytes of shared memory: {error}",
        fix="lower bucket_bytes, or give the host (or container) more memory",
    )


def _unmapped(path: str, error: Exception) -> RefitProtocolError:
    return RefitProtocolError(
        f"the sender's shared memory {path} cannot be mapped: {error}",
        fix='run both sides as one user in one PID namespace, or use transport="collective"',
    )


def _release(fd: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child that ends: its parent still has the memory
        os.close(fd)
