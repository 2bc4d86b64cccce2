"""Some elements of a checkpoint's tensor, and where an engine keeps them."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_backends.tensors import same_bytes
from rl_core.interfaces import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rl_core.interfaces import TensorSpec

__all__ = ["Region", "Step", "count_elements"]

#: A function of each element of a tensor.
Step = partial[torch.Tensor]


class Region(NamedTuple):
    """Some elements of a whole tensor, and where the engine keeps them.

    Attributes:
        target: The engine's elements: a view of its parameter, at least 1-D.
        first: The index of the target's first element in the flattened whole tensor.
        strides: By how much that index grows along each dimension of the target; none grows by
            more than the one before.
        steps: What the engine computes of the whole tensor's elements, one by one.
        plain: With steps, the whole tensor's elements, which are kept beside the engine's.
    """

    target: torch.Tensor
    first: int
    strides: tuple[int, ...]
    steps: tuple[Step, ...] = ()
    plain: torch.Tensor | None = None

    @classmethod
    def of(cls, target: torch.Tensor, first: int, strides: Sequence[int]) -> Region:
        """A region with as few dimensions as there can be, in the order of the whole tensor."""
        dims = sorted(zip(strides, target.shape, target.stride(), strict=True), reverse=True)
        merged: list[tuple[int, int, int]] = []
        for step, n, stride in dims:
            if n == 1:
                continue
            same = merged and merged[-1][0] == n * step and merged[-1][2] == n * stride
            merged.append((step, n * merged.pop()[1] if same else n, stride))
        steps, shape, places = zip(*merged, strict=True) if merged else ((1,), (1,), (1,))
        return cls(target.as_strided(shape, places, target.storage_offset()), first, steps)

    @property
    def place(self) -> torch.Tensor:
        """Where the whole tensor's elements are, in the shape of the target."""
        return self.target if self.plain is None else self.plain

    @property
    def computed(self) -> torch.Tensor:
        """What the target should be, of what was written."""
        found = self.place.clone()  # some steps work in place
        for step in self.steps:
            found = step(found)
        return found.to(self.target.dtype)

    @property
    def extent(self) -> int:
        """How far apart the first and the last element are in the whole tensor, plus one."""
        return _extent(self.target.shape, self.strides)

    def piece(self, spec: TensorSpec) -> Piece | None:
        """These elements as a box of the tensor, if they are one.

        Args:
            spec: The whole tensor.
        """
        box, step, last = [], spec.numel, self.first + self.extent - 1
        first = self.first
        whole: list[int] = []  # by how much the index grows along each dimension of the tensor
        for size in spec.shape:
            step //= size
            whole.append(step)
            begin, first = divmod(first, step)
            end, last = divmod(last, step)
            box.append((begin, end + 1))
        place, shape, strides = self.place, [], []
        dims = list(zip(self.strides, place.shape, place.stride(), strict=True))
        for (begin, after), step in zip(box, whole, strict=True):
            size = after - begin
            shape.append(size)
            if size <= 1:
                strides.append(1)
                continue
            # A dimension of the target is one of the tensor, or several that follow each other.
            if not dims or dims[0][1] % size or dims[0][0] * dims[0][1] != step * size:
                return None
            grows, count, stride = dims.pop(0)
            rest = count // size
            strides.append(stride * rest)
            if rest > 1:
                dims.insert(0, (grows, rest, stride))
        if any(count > 1 for _, count, _ in dims):
            return None
        return Piece(spec.name, tuple(box), place.as_strided(shape, strides))

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Takes what it needs of a run of the whole tensor's elements.

        With steps, :meth:`renew` brings it to the engine.

        Args:
            offset: Index of the first element in the flattened tensor.
            data: 1-D.
        """
        step, rows = self.strides[0], self.target.shape[0]
        row = self.extent - (rows - 1) * step  # what a row extends over
        # Rows that begin in the run or after it, and those that end in it or before.
        begin = min(max(-((self.first - offset) // step), 0), rows)
        end = min(max((offset + data.numel() - self.first - row) // step + 1, begin), rows)
        if begin < end:
            part = self.place[begin:end]
            start = self.first + begin * step - offset
            part.copy_(data.as_strided(part.shape, self.strides, data.storage_offset() + start))
        if len(self.strides) == 1:
            return
        before = max(-((self.first + row - 1 - offset) // step), 0)
        after = min(-((self.first - offset - data.numel()) // step), rows)
        for index in (*range(before, begin), *range(max(end, begin), after)):
            first = self.first + index * step
            Region(self.place[index], first, self.strides[1:]).write(offset, data)

    def read(self, whole: torch.Tensor) -> None:
        """Puts the engine's elements where they belong in the whole tensor, 1-D."""
        whole.as_strided(self.target.shape, self.strides, self.first).copy_(self.place)

    def fill(self, whole: torch.Tensor) -> bool:
        """Takes what it was loaded with; False if that is not what the engine computed with."""
        self.write(0, whole.flatten())
        filled = same_bytes(self.computed, self.target)
        if not filled:
            self.place.zero_()
        return filled

    def renew(self) -> None:
        """Computes the engine's elements of what was written."""
        self.target.copy_(self.computed)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def count_elements(parts: Iterable[tuple[int, Sequence[int], Sequence[int]]]) -> int:
    """How many different elements some views of one tensor have.

    Args:
        parts: Of each view the first element's index, shape and strides.
    """
    found = sorted(
        (first, first + _extent(shape, strides), shape, strides) for first, shape, strides in parts
    )
    if all(one[1] <= other[0] for one, other in pairwise(found)):
        return sum(math.prod(shape) for *_, shape, _ in found)
    mask = torch.zeros(max(end for _, end, *_ in found), dtype=torch.bool)
    for first, _, shape, strides in found:
        mask.as_strided(shape, strides, first).fill_(True)
    return int(mask.sum())
