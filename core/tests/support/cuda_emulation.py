"""Memory of the CPU that behaves as a GPU's does, for tests on machines without one.

What runs is the product's own code for CUDA. In place of the driver and of torch's allocator there
is :class:`Gpu`: regions are memory of this process, which only its own receivers can attach to. The
hash is the GPU's everywhere, and verified as there: a bucket at a time. What this cannot show is
whatever CUDA itself does: streams, contexts, mappings of another process's memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl_core.weights.data.digests import BlockHash
from rl_core.weights.receiving import receiver as _receiver
from rl_core.weights.transports import cuda, ipc
from rl_core.weights.transports.base import CPU, Lane

UUID = "GPU-emulated"


class Gpu:
    """One GPU, in place of ``torch``, ``torch.cuda`` and ``torch.UntypedStorage`` in ``cuda.py``.

    Attributes:
        limit: Bytes that one allocation may have; None for no limit.
        synchronized: How often the host waited for the current stream.
        emptied: How often unused memory was given back to the driver.
        expandable: All memory is in one expandable segment.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.expandable = False
        self.synchronized = 0
        self.emptied = 0
        self.cuda = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    # -- torch

    def empty(self, nbytes: int, **options: Any) -> torch.Tensor:
        if self.limit is not None and nbytes > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.empty(nbytes, **options)

    def as_tensor(self, array: Any, device: torch.device) -> torch.Tensor:
        """Of an object with ``__cuda_array_interface__``, which numpy has by another name."""
        array.__array_interface__ = array.__cuda_array_interface__
        return torch.from_numpy(np.asarray(array))

    # -- torch.cuda

    def device_count(self) -> int:
        return 1

    def get_device_properties(self, device: torch.device | int) -> SimpleNamespace:
        return SimpleNamespace(uuid=UUID.removeprefix("GPU-"))

    def memory_snapshot(self, **options: Any) -> list[dict[str, Any]]:
        whole = {"is_expandable": True, "address": 0, "total_size": 1 << 64}
        return [whole] if self.expandable else []

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        def synchronize() -> None:
            self.synchronized += 1

        return SimpleNamespace(synchronize=synchronize)

    def ipc_collect(self) -> None:
        pass

    def empty_cache(self) -> None:
        self.emptied += 1

    # -- torch.UntypedStorage

    def _share_cuda_(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        return 0, bytes(66), storage.nbytes(), 0, b"/counter", 0, b"", False

    def _release_ipc_counter_cuda(self, counter: bytes, slot: int) -> None:
        pass


def emulate(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Makes the transport ``ipc`` take the CPU for a GPU."""
    gpu = Gpu()
    for name in ("torch", "_CUDA", "_STORAGE"):
        monkeypatch.setattr(cuda, name, gpu)
    monkeypatch.setattr(ipc, "uuid_of", lambda device: UUID)
    monkeypatch.setattr(_receiver, "visible_gpus", lambda device: (UUID,))
    make = ipc.IpcSender.lane

    def lane(end: ipc.IpcSender, nbytes: int, *rest: Any, **options: Any) -> Lane:
        if end.reason_not_shareable:  # the memory of the CPU, then
            return make(end, nbytes, *rest, **options)
        return cuda.CudaRegion.create(nbytes, CPU)

    monkeypatch.setattr(ipc.IpcSender, "lane", lane)
    _hash_as_a_gpu_does(monkeypatch)
    return gpu


def _hash_as_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(cls: type[BlockHash], device: torch.device, *, private: bool, token: str) -> Any:
        return cls._keyed("fold", token)

    monkeypatch.setattr(BlockHash, "choose", classmethod(choose))
