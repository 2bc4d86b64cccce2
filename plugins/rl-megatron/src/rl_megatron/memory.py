"""Device memory that is lent back while a policy sleeps.

The memory behind tensors is let go of, not the tensors: gradients are collected by hooks that torch
forgets where a parameter moves to another device. What a refit has moved to memory that engines
read, which no tensor can let go of, first gets memory of its own again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.weights.sending.shared_tensors import Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Sleeper"]


class Sleeper:
    """Some tensors of one device, which are there or asleep in host memory.

    Args:
        tensors: Gives all that use their memory; what they are views of may be left out.
        keeps: Whether what is in them is wanted again; else they wake as zeros.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[torch.Tensor]], *, keeps: bool = True
    ) -> None:
        self._tensors = tensors
        self._storages: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []
        self._keeps = keeps
        self._host: list[torch.Tensor] | None = None

    def sleep(self) -> None:
        """Frees the device memory. Idempotent."""
        if self._host is not None:
            return
        self._storages = []
        for memory in Memory.of(self._tensors()).values():
            if not memory.storage.resizable():
                size, device = memory.storage.nbytes(), memory.storage.device
                memory.move(torch.empty(size, dtype=torch.uint8, device=device))
            self._storages.append(memory.storage)
        self._sizes = [storage.nbytes() for storage in self._storages]
        kept = self._storages if self._keeps else []
        self._host = [_bytes(storage).to("cpu", copy=True) for storage in kept]
        for storage in self._storages:
            storage.resize_(0)

    def wake(self) -> None:
        """Takes as much memory again, with what was there. Idempotent."""
        if self._host is None:
            return
        for number, (storage, size) in enumerate(zip(self._storages, self._sizes, strict=True)):
            storage.resize_(size)
            if self._keeps:
                _bytes(storage).copy_(self._host[number])
            else:
                _bytes(storage).zero_()
        self._host, self._storages = None, []


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
