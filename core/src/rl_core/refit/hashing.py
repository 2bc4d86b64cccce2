"""128-bit digests of bytes, computed where the bytes are.

On the CPU the hash is XXH3-128. On a device it is one of our own in plain torch operations, so
that no byte is copied to the host. Both see bytes that changed, moved, were added or are missing;
neither withstands somebody who looks for collisions, which the authenticated messages exclude.

The device's hash is the multilinear hash of Lemire and Kaser ("Strongly universal string hashing
is fast", The Computer Journal 57(11), 2014) in two lanes with multipliers of their own::

    lane = (length * m + sum of word[i] * m[i]) mod 2**64,    digest = mix(lane 0), mix(lane 1)

The words have 32 bits and the ring has 64, which is what makes it sound: a difference between
two words is less than 2**32, so that times an odd multiplier it is never 0, and every change
within one word (a flipped bit, the highest one too) changes both lanes for certain, as does a
length that differs by zeros alone. Any other two contents collide where ``sum of d[i] * m[i]`` is
0; given all multipliers but one whose ``d`` is ``2**t`` times an odd number (t < 32), at most
``2**t`` of the ``2**63`` odd values of that one make it so. Two lanes collide with probability
``2**-126`` where the lowest bit of some word differs, and ``2**-64`` at worst, where all that
differs is the highest bit of several words. Over words of 64 bits the highest bits of any two
words would cancel whatever the multipliers are. The multipliers are SplitMix64 (Steele, Lea and
Flood, OOPSLA 2014) of the position, from two seeds; ``mix`` is its last step, a bijection, so that
every bit of the digest depends on all of the lane. Integer sums have no rounding: the digest is the
same on every device and for every order of summation.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

__all__ = [
    "BLOCK",
    "block_digests",
    "hash_views",
    "kind_for",
    "run_digests",
    "tensor_digest",
    "views_of",
]

BLOCK = 4 << 20
"""Bytes under one digest, at most."""

_CHUNK = 8 << 20  # bytes folded at once: with products (x 2) and multipliers, 40 MiB of a device
_SEEDS = np.array([[0x6A09E667F3BCC909], [0xBB67AE8584CAA73B]], dtype=np.uint64)


def hash_views(views: Iterable[memoryview]) -> list[bytes]:
    """XXH3-128 of each view, the fast way for views that were prepared with :func:`views_of`.

    Args:
        views: At most :data:`BLOCK` bytes each.
    """
    return list(map(xxhash.xxh3_128_digest, views))


def views_of(view: memoryview) -> list[memoryview]:
    """The blocks of a run of bytes on the CPU; none for an empty run."""
    return [view[start : start + BLOCK] for start in range(0, len(view), BLOCK)]


def tensor_digest(blocks: Sequence[bytes]) -> bytes:
    """One digest (16 bytes) of a tensor from those of its blocks, in order."""
    return blocks[0] if len(blocks) == 1 else xxhash.xxh3_128_digest(b"".join(blocks))


def kind_for(device: torch.device) -> str:
    """The hash that is made for bytes on a device: ``"xxh3"`` on the CPU, else ``"fold"``."""
    return "xxh3" if device.type == "cpu" else "fold"


def block_digests(data: torch.Tensor, kind: str | None = None) -> list[bytes]:
    """Digests of the blocks of one run of bytes.

    Args:
        data: uint8 ``[nbytes]``, contiguous, on any device and at any alignment.
        kind: As of :func:`kind_for`; by default that of the device of ``data``. Digests of two
            kinds have nothing in common, so one who compares with others names theirs.

    Returns:
        16 bytes for each :data:`BLOCK` bytes or part of it; none for an empty run.
    """
    return run_digests([data], kind)[0]


def run_digests(runs: Sequence[torch.Tensor], kind: str | None = None) -> list[list[bytes]]:
    """As :func:`block_digests`, of many runs of one device.

    On a device this waits once for all of them, and costs one small copy for each run that is no
    multiple of :data:`BLOCK`.
    """
    if not runs:
        return []
    if (kind or kind_for(runs[0].device)) == "fold":
        return _folded(runs, BLOCK, _CHUNK)
    return [
        [
            xxhash.xxh3_128_digest(run[start : start + BLOCK].cpu().numpy().data)
            for start in range(0, run.numel(), BLOCK)
        ]
        for run in runs
    ]


def _folded(runs: Sequence[torch.Tensor], block: int, chunk: int) -> list[list[bytes]]:
    """The device's digests, by run; ``chunk`` bounds memory and has no influence on them."""
    counts = [-(-run.numel() // block) for run in runs]
    ends = np.cumsum(counts)
    rows: list[int] = []
    lanes: list[torch.Tensor] = []
    for places, words in _batches(runs, ends.tolist(), block, chunk):
        rows += places
        lanes.append(_lanes(words))
    total = int(ends[-1])
    found = np.empty((total, 2), dtype=np.uint64)
    if lanes:
        found[rows] = torch.cat(lanes).cpu().numpy().view(np.uint64)
    sizes = np.full(total, block, dtype=np.uint64)
    for run, end, count in zip(runs, ends, counts, strict=True):
        if count:
            sizes[end - 1] = run.numel() - (count - 1) * block
    packed = _mix(found + sizes[:, None] * (_mix(_SEEDS.T) | np.uint64(1))).tobytes()
    parts = [packed[start : start + 16] for start in range(0, len(packed), 16)]
    return [parts[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _batches(
    runs: Sequence[torch.Tensor], ends: Sequence[int], block: int, chunk: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Blocks as rows of int32 words ``[blocks, words]``, each with the blocks' indices."""
    tails: dict[int, list[tuple[int, torch.Tensor]]] = {}
    per = max(1, chunk // block)
    for run, end in zip(runs, ends, strict=True):
        whole, rest = divmod(run.numel(), block)
        for first in range(0, whole, per):
            last = min(first + per, whole)
            piece = run[first * block : last * block]
            if piece.data_ptr() % 4 or piece.storage_offset() % 4:
                piece = piece.clone()
            start = end - whole - bool(rest)
            places = list(range(start + first, start + last))
            yield places, piece.view(torch.int32).view(last - first, -1)
        if rest:
            width = max(64, 1 << (rest - 1).bit_length())
            tails.setdefault(width, []).append((end - 1, run[whole * block :]))
    for width, group in tails.items():
        per = max(1, chunk // width)
        for first in range(0, len(group), per):
            part = group[first : first + per]
            padded = part[0][1].new_zeros(len(part), width)
            for row, (_, tail) in zip(padded, part, strict=True):
                row[: tail.numel()].copy_(tail)
            yield [place for place, _ in part], padded.view(torch.int32)


def _lanes(words: torch.Tensor) -> torch.Tensor:
    """Both lanes ``[blocks, 2]`` of rows of words, without their lengths."""
    keys = _multipliers(words.device)[:, : words.shape[1]]
    product = torch.empty(words.shape, dtype=torch.int64, device=words.device)
    return torch.stack([torch.mul(words, key, out=product).sum(1) for key in keys], dim=1)


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """The odd multipliers of both lanes by position: int64 ``[2, BLOCK / 4]``."""
    steps = np.arange(1, BLOCK // 4 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy((_mix(_SEEDS + steps) | np.uint64(1)).view(np.int64)).to(device)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output step of SplitMix64, a bijection of 64-bit numbers."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
