"""Plain copies, on the clock of ``refit_pair.py``: what no refit can be faster than."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from refit_pair import (
    CONTEXT,
    Case,
    Contender,
    Engine,
    Link,
    LocalLink,
    Method,
    Tensors,
    fill,
)

__all__ = ["IN_ONE_BLOCK", "ONE_COPY", "TENSOR_BY_TENSOR", "TWO_COPIES"]

ONE_COPY = "one copy"
TWO_COPIES = "two copies"
ALL = 1 << 62
#: Elements of two bytes.
PIECES = {"all at once": ALL, "in pieces of 4 MiB": (4 << 20) // 2}


def copy(target: torch.Tensor, given: torch.Tensor) -> None:
    """One copy, by torch."""
    target.copy_(given)


def move(target: torch.Tensor, given: torch.Tensor) -> None:
    """One copy, by the C library, which for large blocks may use other instructions than torch."""
    ctypes.memmove(target.data_ptr(), given.data_ptr(), target.nbytes)


class SharedCopy(Method):
    """The bound of one copy: one thread of the engine reads memory that it shares with the trainer.

    Args:
        folder: Where the memory is.
        copy: Copies one run of bytes.
        piece: Elements in a run at most.
    """

    def __init__(
        self,
        folder: Path,
        copy: Callable[[torch.Tensor, torch.Tensor], None],
        piece: int,
    ) -> None:
        super().__init__(folder)
        self.copy, self.piece = copy, piece
        self.shared: Tensors = {}

    def _share(self, tensors: Tensors) -> None:
        for index, (name, tensor) in enumerate(tensors.items()):
            path = str(self.folder / str(index))
            self.shared[name] = torch.from_file(
                path, shared=True, size=tensor.numel(), dtype=tensor.dtype
            )

    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> None:
        if not self.shared:  # in the first round, which warms up
            self._share(tensors)
            for name, tensor in tensors.items():
                tensor.data = self.shared[name].copy_(tensor)
        tell(None)

    def load(self, told: None, targets: Tensors) -> None:
        if not self.shared:
            self._share(targets)
        for name, target in targets.items():
            runs = target.split(self.piece), self.shared[name].split(self.piece)
            for one, other in zip(*runs, strict=True):
                self.copy(one, other)


class LocalCopy(Method):
    """One copy within one process."""

    starts_engine = True

    def connect(self, pipe: Any, case: Case) -> Link:
        return LocalLink(Engine(self, case))

    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> None:
        tell(tensors)

    def load(self, told: Tensors, targets: Tensors) -> None:
        fill(targets, told)


class HashedCopy(SharedCopy):
    """One copy of bytes that both sides hash: what verification costs where nothing else does.

    The trainer hashes a few pieces ahead of the engine, which hashes and copies piece by piece.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, copy, (4 << 20) // 2)
        self.free, self.full = CONTEXT.Semaphore(4), CONTEXT.Semaphore(0)

    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> None:
        super().send(tensors, tell)
        for tensor in tensors.values():
            for piece in tensor.split(self.piece):
                self.free.acquire()
                xxhash.xxh3_128_digest(piece.view(torch.uint8).numpy())
                self.full.release()

    def load(self, told: None, targets: Tensors) -> None:
        if not self.shared:
            self._share(targets)
        for name, target in targets.items():
            pieces = target.split(self.piece), self.shared[name].split(self.piece)
            for one, other in zip(*pieces, strict=True):
                self.full.acquire()
                xxhash.xxh3_128_digest(other.view(torch.uint8).numpy())
                self.copy(one, other)
                self.free.release()


class TwoCopies(Method):
    """The bound of packed data: a pack and a load, by two processes at the same time.

    Between them are two slots of shared memory and two semaphores, and nothing else.
    """

    def __init__(self, folder: Path, slot: int) -> None:
        super().__init__(folder)
        self.slots = torch.ones(2, slot, dtype=torch.uint8).share_memory_()
        self.free, self.full = CONTEXT.Semaphore(2), CONTEXT.Semaphore(0)

    def _turns(self, tensors: Tensors) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each run of a tensor, with its place in the slot whose turn it is."""
        turn = 0
        for tensor in tensors.values():
            for part in tensor.view(torch.uint8).split(self.slots.shape[1]):
                yield part, self.slots[turn, : part.numel()]
                turn = 1 - turn

    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> None:
        tell(None)
        for part, slot in self._turns(tensors):
            self.free.acquire()
            slot.copy_(part)
            self.full.release()

    def load(self, told: None, targets: Tensors) -> None:
        for part, slot in self._turns(targets):
            self.full.acquire()
            part.copy_(slot)
            self.free.release()


CALLS = {"torch": copy, "memmove": move}
IN_ONE_BLOCK = [
    Contender(
        ONE_COPY,
        {
            f"{call}, {how}": lambda folder, _, call=call, piece=piece: SharedCopy(
                folder, CALLS[call], piece
            )
            for call in CALLS
            for how, piece in PIECES.items()
        },
        "one thread of the engine's process, out of memory that the trainer's shares",
        kind="bound",
    ),
    Contender(
        TWO_COPIES,
        {
            f"slots of {size} MiB": lambda folder, _, size=size: TwoCopies(folder, size << 20)
            for size in (1, 4, 16, 64)
        },
        "pack and load at the same time, in two processes",
        kind="bound",
    ),
    Contender(
        "one copy, hashed by both",
        {"pieces of 4 MiB": lambda folder, _: HashedCopy(folder)},
        "as one copy, and both processes compute XXH3 of all bytes",
        kind="bound",
    ),
    Contender(
        "one copy, one process",
        {"torch": lambda folder, _: LocalCopy(folder)},
        "private memory on both sides",
        kind="bound",
    ),
]
TENSOR_BY_TENSOR = Contender(
    "one copy, tensor by tensor",
    {"torch": lambda folder, _: SharedCopy(folder, copy, ALL)},
    kind="bound",
)
