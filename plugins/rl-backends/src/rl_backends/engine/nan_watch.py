"""Keys and values that are no numbers, and how an engine gets rid of them.

With NaN in its weights an engine computes NaN, and keeps it in the memory of its key/value cache.
When it drops what is cached it gives that memory to other rows as it is, and some kernels read
beyond the end of a row: of a NaN there, times 0, they make NaN in that row. So after finite weights
have come, rows could be wrong until all of the memory was written over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["NAN_WATCH", "NanWatch"]


class NanWatch:
    """Has the memory of a worker's cache set to 0 by the first forward pass after the next refit.

    Only if a NaN was computed before that refit: to set all memory to 0 takes time, and on a CPU
    memory that no row has used yet. A forward pass does it, and not the refit, because at a refit
    the cache may be asleep, and rows may still be in it.
    """

    def __init__(self) -> None:
        self._largest: torch.Tensor | None = None
        self._due = False

    def look(self, computed: torch.Tensor) -> None:
        """Notes whether a model computed NaN for some row, without waiting for the device."""
        if computed.numel():
            largest = computed.amax()  # NaN if there is one
            before = largest if self._largest is None else self._largest
            self._largest = torch.maximum(before, largest)

    def committed(self, version: int) -> None:
        """Notes that other weights serve; no row keeps what is in the cache now."""
        del version
        if self._largest is not None and self._largest.isnan():
            self._due = True
        self._largest = None

    @torch.inference_mode()
    def clear(self, held: Iterable[Any]) -> None:
        """Sets the memory to 0, if that is due; for each forward pass, before it.

        Args:
            held: The cache's tensors, and lists of them. What is neither, or has indices, stays.
        """
        if self._due:
            self._due = False
            for tensor in _tensors_of(held):
                # Floats of 8 bits, and memory that layers share, have other dtypes of a byte.
                if tensor.is_floating_point() or tensor.element_size() == 1:
                    tensor.zero_()


def _tensors_of(held: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in held:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors_of(one)


#: Of this process, which is one worker.
NAN_WATCH = NanWatch()
