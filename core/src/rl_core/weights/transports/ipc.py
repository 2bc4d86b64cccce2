"""Between processes of one host: ZeroMQ on a socket in a private directory, and shared memory.

Tensors on the CPU lie in memory that all processes map; on a GPU, in memory that receivers open
through CUDA IPC. Either way a receiver reads the sender's own memory.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.errors import RefitError, RefitPeerError, RefitProtocolError
from rl_core.weights.protocol.timing import EXIT_VISIBLE_S
from rl_core.weights.transports.base import (
    CPU,
    RankEnd,
    ReceiverEnd,
    SenderEnd,
    Transport,
    refuse_options,
)
from rl_core.weights.transports.control import ControlClient, ControlServer
from rl_core.weights.transports.cuda import CudaRegion, uuid_of
from rl_core.weights.transports.memory import SharedRegion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from rl_core.weights.transports.base import Lane

__all__ = ["IPC", "IpcRank", "IpcReceiver", "IpcSender", "boot_id"]

_PREFIX = "rl-refit-"
_SCHEME = "ipc://"
#: Age in seconds from which a socket that refuses connections is a dead sender's; one that is
#: just being made does so, too.
_YOUNG_S = 60.0


class _Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: str


class IpcRank(RankEnd):
    """Makes memory that processes share, and has no socket."""

    reads_memory = True
    private = True

    def lane_device(self, device: torch.device, gpus: Sequence[Sequence[str]]) -> torch.device:
        """See :meth:`RankEnd.lane_device`: all receivers must see the very GPU."""
        uuid, self.reason_not_shareable = uuid_of(device), None
        if uuid is None or not all(uuid in seen for seen in gpus):
            return CPU
        try:
            CudaRegion.create(1, device).close()
        except RefitError as error:
            self.reason_not_shareable = error.message
        return CPU if self.reason_not_shareable else device

    def lane(
        self, nbytes: int, device: torch.device, receivers: Sequence[str], *, direct: bool = False
    ) -> Lane:
        if device.type == "cuda":
            return CudaRegion.create(nbytes, device)
        return SharedRegion.create(nbytes, grows=direct)

    def close(self) -> None:
        """There is nothing to close."""


class IpcSender(ControlServer, IpcRank, SenderEnd):
    """Rank 0's end, with its socket in a directory that this user alone can enter."""

    def __init__(self) -> None:
        # Another host that has this directory, too, cannot see whether a sender of this one lives.
        prefix = f"{_PREFIX}{boot_id()[:8]}-"
        try:
            for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
                # Of a sender that was killed, where no receiver removed it.
                with suppress(OSError):  # removed meanwhile
                    found = left.lstat()  # not what another user made it point to
                    if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _YOUNG_S:
                        _clear(f"{_SCHEME}{left}/socket")
            self._directory = tempfile.mkdtemp(prefix=prefix)
        except OSError as error:
            raise RefitError(
                f"cannot create a private directory for a socket: {error}",
                fix="set TMPDIR to a short path on a local disk",
            ) from error
        self._remove = weakref.finalize(self, _remove, self._directory, os.getpid())
        try:
            super().__init__(f"{_SCHEME}{self._directory}/socket")
        except BaseException:
            self._remove()
            raise
        self.address = {"endpoint": self.endpoint}

    def close(self) -> None:
        super().close()
        self._remove()


class IpcReceiver(ControlClient, ReceiverEnd):
    """A receiver's end; it removes the directory of a sender that was killed."""

    private = True

    def connect(self, address: Mapping[str, Any]) -> None:
        path = self.endpoint.removeprefix(_SCHEME)
        try:
            os.stat(path)
        except (OSError, ValueError) as error:  # the latter where it is no path at all
            raise RefitPeerError(
                f"the trainer's socket {path} cannot be reached from here: {error}; "
                "either the trainer has ended, or this process sees another directory under that "
                "name (another host or container) or runs as another user",
                fix="if the trainer runs, run both sides as one user with one TMPDIR, or use "
                'transport="collective"; else start it again, and call refit again',
                phase="DISCOVER",
                peer="the sender",
            ) from error
        self.open()

    def attach(self, ref: Mapping[str, Any], receiver: str, device: torch.device = CPU) -> Lane:
        if ref.get("kind") == "cuda":
            return CudaRegion.attach(ref)
        return SharedRegion.attach(ref)

    def disconnect(self) -> None:
        lost = self.lost()
        super().disconnect()
        end = time.monotonic() + EXIT_VISIBLE_S
        while lost and not _clear(self.endpoint) and time.monotonic() < end:
            time.sleep(EXIT_VISIBLE_S / 50)

    def close(self) -> None:
        super().close()
        _clear(self.endpoint)


class _Ipc(Transport):
    """Takes no options."""

    def sender(self, **options: Any) -> IpcSender:
        refuse_options("the ipc transport", options)
        return IpcSender()

    def rank(self, address: Mapping[str, Any]) -> IpcRank:
        return IpcRank()

    def receiver(self, address: Mapping[str, Any], **options: Any) -> IpcReceiver:
        refuse_options("the ipc transport", options)
        return IpcReceiver(_endpoint(address))

    def remove_leftovers(self, address: Mapping[str, Any]) -> None:
        _clear(_endpoint(address))


#: The transport named ``ipc``.
IPC: Transport = _Ipc()


def _endpoint(address: Mapping[str, Any]) -> str:
    try:
        endpoint = msgspec.convert(address, _Address).endpoint
    except msgspec.ValidationError as error:
        raise RefitProtocolError(f"received a malformed ipc address: {error}") from error
    if not endpoint.startswith(_SCHEME):
        raise RefitProtocolError(f"received {endpoint!r}, which is not an ipc endpoint")
    return endpoint


@cache
def boot_id() -> str:
    """Of this host since it was started; empty where there is none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child ends, not the sender
        shutil.rmtree(directory, ignore_errors=True)


def _clear(endpoint: str) -> bool:
    """Removes the directory of a sender that is dead: one that lives accepts connections.

    Returns:
        False if it lives.
    """
    path = Path(endpoint.removeprefix(_SCHEME))
    if not path.parent.name.startswith(f"{_PREFIX}{boot_id()[:8]}-"):
        return True
    if not path.exists():
        with suppress(OSError):  # it has another thing in it, or was removed
            if time.time() - path.parent.lstat().st_mtime > _YOUNG_S:
                path.parent.rmdir()
        return True
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            path.parent.rmdir()
        else:
            return False
    return True
