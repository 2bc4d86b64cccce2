"""The sums of :mod:`rl_core.weights.gpu.fold` in one launch of a Triton kernel, for any runs.

One program takes one group of columns of several blocks of like size, so that it loads the
multipliers once for all of them. Programs add what they found to the blocks' sums, in any order:
these are integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CUDA: Any = torch.cuda  # its device_of is not typed
_COLUMNS = 2048  # words: 8 KiB of data, 32 KiB of multipliers
_ROWS = 16  # blocks that share the multipliers


def prepare(
    runs: Sequence[torch.Tensor], factors: torch.Tensor, block: int
) -> Callable[[], torch.Tensor]:
    """Makes ready to sum the blocks of some runs of bytes, which are held, as often as needed."""
    places = [
        (run.data_ptr() + start, min(block, run.numel() - start))
        for run in runs
        for start in range(0, run.numel(), block)
    ]
    device, count = factors.device, len(places)
    table = np.array(places, dtype=np.int64).reshape(-1, 2)
    order = np.argsort(-table[:, 1], kind="stable")  # those of like size together
    back = torch.from_numpy(np.argsort(order)).to(device)
    table = table[order]
    widths = -(-table[::_ROWS, 1] // (4 * _COLUMNS))  # of each group of rows: of its largest
    tasks = np.array(
        [(row, column) for row, width in enumerate(widths) for column in range(width)],
        dtype=np.int64,
    ).reshape(-1, 2)
    parts = (table[:, 0], table[:, 1], tasks.ravel())
    there = torch.from_numpy(np.concatenate(parts)).to(device)
    addresses, sizes, work = there[:count], there[count : 2 * count], there[2 * count :]
    aligned = not (table[:, 0] % 16).any()

    def launch(held: Sequence[torch.Tensor] = tuple(runs)) -> torch.Tensor:
        sums = torch.zeros(count, 2, dtype=torch.int64, device=device)
        if len(tasks):
            with _CUDA.device_of(factors):  # Triton launches on the current device
                _sum[(len(tasks),)](
                    work, addresses, sizes, factors, sums, count, factors.shape[1],
                    columns=_COLUMNS, rows=_ROWS, aligned=aligned, num_warps=8,
                )  # fmt: skip
        return sums[back]

    return launch


# Triton reads the signature itself, and knows no annotation but that of constants.
@triton.jit  # type: ignore[untyped-decorator]
def _sum(  # type: ignore[no-untyped-def]
    work, addresses, sizes, factors, sums, blocks, width,
    columns: tl.constexpr, rows: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    task = work + 2 * tl.program_id(0)
    begin = tl.load(task + 1) * columns
    column = begin + tl.arange(0, columns)
    first = tl.load(factors + column, mask=column < width, other=0)
    second = tl.load(factors + width + column, mask=column < width, other=0)
    top = tl.load(task) * rows
    for number in range(rows):
        row = top + number
        if row < blocks:
            size = tl.load(sizes + row)
            if begin * 4 < size:
                words = tl.load(addresses + row).to(tl.pointer_type(tl.int32))
                if aligned:
                    words = tl.multiple_of(words, 16)
                whole = size // 4
                if begin + columns <= whole:  # without a mask loads are wide
                    word = tl.load(words + column).to(tl.int64)
                else:
                    word = tl.load(words + column, mask=column < whole, other=0).to(tl.int64)
                    place = tl.arange(0, 4)  # of one to three bytes more
                    rest = words.to(tl.pointer_type(tl.uint8)) + whole * 4 + place
                    last = tl.load(rest, mask=place < size % 4, other=0).to(tl.int64)
                    word = tl.where(column == whole, tl.sum(last << (8 * place)), word)
                tl.atomic_add(sums + 2 * row, tl.sum(word * first), sem="relaxed")
                tl.atomic_add(sums + 2 * row + 1, tl.sum(word * second), sem="relaxed")
