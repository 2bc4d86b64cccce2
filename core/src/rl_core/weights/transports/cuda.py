"""Memory of a GPU that two processes share (CUDA IPC)."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from weakref import WeakValueDictionary

import msgspec
import torch

from rl_core.errors import RefitError, RefitProtocolError
from rl_core.weights.transports.base import Lane

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from rl_core.weights.data.plan import Runs

__all__ = ["CudaRegion", "uuid_of", "visible_gpus"]

_STORAGE: Any = torch.UntypedStorage  # what these have for sharing is not typed
_CUDA: Any = torch.cuda
_UNCOUNTED = b"/rl-refit-uncounted"  # no such counter exists; torch passes over a lack of it


class _Ref(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the memory is: what ``UntypedStorage._share_cuda_`` gave, less its reference counter.

    ``handle`` is that of the whole segment of the allocator, ``offset`` the place in it.
    ``pid`` and ``key`` name the sender's region where both ends are in one process.
    """

    kind: Literal["cuda"]
    uuid: str
    handle: bytes
    nbytes: Annotated[int, msgspec.Meta(ge=1)]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    pid: int
    key: str


class _Piece:
    """Some bytes of a region, as torch, CuPy and Numba describe them to each other.

    A tensor made of it has a separate storage, so that saving it saves nothing else, and keeps
    the piece, which keeps the region's memory.
    """

    def __init__(self, data: torch.Tensor, start: int, stop: int) -> None:
        self.data = data
        self.__cuda_array_interface__ = {
            "shape": (stop - start,),
            "typestr": "|u1",
            "strides": None,
            "data": (data.data_ptr() + start, False),
            "version": 3,
        }


class CudaRegion(Lane):
    """Bytes on a GPU, shared between processes of one host, used by many refits.

    Torch counts the users of shared memory in a file, one for each time that it is shared, and
    keeps memory with a count forever once it is dropped: a receiver that never attaches or is
    killed would leak it, and a second one take the count below zero. So the memory is shared once
    in its life, its count is dropped at once, and receivers attach without one. What keeps the
    memory is the sender's region alone. Close the receivers' first: after the sender's, torch uses
    the memory for something else, and CUDA leaves undefined what reading it gives then.
    """

    unmap_after_each_refit: ClassVar[bool] = True

    def __init__(self, data: torch.Tensor, ref: _Ref) -> None:
        self.data = data
        self.ref = msgspec.structs.asdict(ref)
        self._device = data.device
        self._key = (ref.pid, ref.key)

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> Self:
        """New memory, not initialised."""
        try:
            data = torch.empty(nbytes, dtype=torch.uint8, device=device)
            handle, offset = _export(data)
        except torch.OutOfMemoryError as error:
            raise RefitError(
                f"cannot allocate a buffer of {nbytes} bytes on {device}: {error}",
                fix="lower bucket_bytes, or leave more of the GPU's memory free",
            ) from error
        except RuntimeError as error:
            raise RefitError(
                f"memory on {device} cannot be shared with another process: {error}",
                fix="give the trainer's process torch's own caching allocator, or use the "
                "collective transport",
            ) from error
        key = secrets.token_hex(16)
        ref = _Ref("cuda", _uuid(data.device), handle, nbytes, offset, os.getpid(), key)
        region = cls(data, ref)
        _OWNED[region._key] = region
        return region

    @classmethod
    def attach(cls, ref: Mapping[str, Any]) -> Self:
        """Maps the memory of another process, or shares that of this one.

        The GPU is found by its UUID, as its index differs where CUDA_VISIBLE_DEVICES does.
        """
        try:
            wanted = msgspec.convert(ref, _Ref)
        except msgspec.ValidationError as error:
            raise RefitProtocolError(f"received a malformed GPU reference: {error}") from error
        owner = _OWNED.get((wanted.pid, wanted.key))
        if owner is not None:  # CUDA does not map memory into the process that made it
            return cls(owner.data, wanted)
        seen = [_uuid(index) for index in range(torch.cuda.device_count())]
        if wanted.uuid not in seen:
            raise RefitProtocolError(
                f"the sender's buffer is on {wanted.uuid}, which this process does not see; it "
                f"sees {', '.join(seen) or 'no GPU'}",
                fix=f"add {wanted.uuid} to the receiver's CUDA_VISIBLE_DEVICES, or use the "
                "collective transport",
                uuid=wanted.uuid,
            )
        index = seen.index(wanted.uuid)
        try:
            storage = _STORAGE._new_shared_cuda(
                index, wanted.handle, wanted.nbytes, wanted.offset, _UNCOUNTED, 0, b"", False
            )
        except RuntimeError as error:
            raise RefitProtocolError(
                f"the sender's memory on {wanted.uuid} (here cuda:{index}) cannot be mapped: "
                f"{error}",
                fix="check that the sender still runs, as the same user on this host, and that "
                "containers share their IPC namespace",
            ) from error
        return cls(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), wanted)

    def allocate_view(self, start: int, stop: int) -> torch.Tensor:
        return torch.as_tensor(_Piece(self.data, start, stop), device=self._device)

    def free_old_memory(self) -> None:
        """See :meth:`Lane.free_old_memory`: torch would keep it for this process alone."""
        _CUDA.empty_cache()

    def publish(self, start: int, stop: int, runs: Mapping[str, Runs] = {}) -> None:
        """Waits until the current stream has done its writes."""
        torch.cuda.current_stream(self._device).synchronize()

    def release(self) -> None:
        """Waits until the current stream has done its reads."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Drops this side's reference: a receiver's memory is unmapped, the sender's is free."""
        self.data = torch.empty(0, dtype=torch.uint8)
        if _OWNED.get(self._key) is self:
            del _OWNED[self._key]
            _CUDA.ipc_collect()  # so that the file with torch's counts goes, too


#: Regions made in this process, for receivers in the same.
_OWNED: WeakValueDictionary[tuple[int, str], CudaRegion] = WeakValueDictionary()


def _export(data: torch.Tensor) -> tuple[bytes, int]:
    """Shares a tensor's memory; its segment's handle and its place in the segment."""
    address, segments = data.data_ptr(), _CUDA.memory_snapshot()
    if any(
        segment["is_expandable"] and 0 <= address - segment["address"] < segment["total_size"]
        for segment in segments
    ):
        raise RefitError(
            f"memory on {data.device} is in an expandable segment, which other processes can map "
            "only with rights that containers rarely grant",
            fix="leave expandable_segments out of PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF "
            "in the trainer's process, or use the collective transport",
        )
    shared = _STORAGE._share_cuda_(data.untyped_storage())
    _, handle, _, offset, counter, slot, _, _ = shared
    _STORAGE._release_ipc_counter_cuda(counter, slot)
    return handle, offset


def visible_gpus(device: torch.device) -> tuple[str, ...]:
    """UUIDs of the GPUs that this process sees, that of ``device`` first; none for a CPU."""
    if device.type != "cuda":
        return ()
    seen = [_uuid(index) for index in range(torch.cuda.device_count())]
    return tuple(sorted(seen, key=_uuid(device).__ne__))


def uuid_of(device: torch.device) -> str | None:
    """A GPU's UUID, as CUDA_VISIBLE_DEVICES takes it; None for other devices."""
    return _uuid(device) if device.type == "cuda" else None


def _uuid(device: torch.device | int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
