"""The hash of bytes on a GPU: a keyed multilinear sum, then a pseudo-random function.

No byte is copied to the host. Two sums are made of each block on the device; the host turns them,
with the block's length, into its digest::

    sum   = sum of word[i] * m[i]  mod 2**64          twice, with different multipliers
    digest = BLAKE2b(key, sum 0, sum 1, length)       16 bytes

The words have 32 bits, the last one filled up with zeros. All multipliers are odd numbers of 64
bits, expanded from the key by BLAKE3 as an extendable output: uniform, independent and secret.
The sums are the hash of Lemire and Kaser ("Strongly universal string hashing is fast", The Computer
Journal 57(11), 2014); to keep them secret behind a pseudo-random function (PRF) is the construction
of Carter and Wegman, as in UMAC.

**Two contents have one digest** only if the PRF collides (``2**-128``), or if they have the same
length and the same sums. If their words differ by ``d[i]``, the latter means ``sum of
d[i] * m[i] = 0`` modulo ``2**64``, in both sums. Take a ``d`` that is ``2**t`` times an odd number
with the smallest t; as ``|d| < 2**32``, t is at most 31. Given all other multipliers, its own must
be one number modulo ``2**(64 - t)``, as at most ``2**t`` of the ``2**63`` odd ones are. So one sum
agrees with probability ``2**(t - 63)`` at most, and both with ``4**(t - 63)``:

* never, if a single word differs (an odd multiplier times d is not 0), such as by a flipped bit;
* ``2**-126``, if the lowest bit of some word differs;
* ``2**-64`` at worst: all that differs is the highest bit of several words.

**Forgery.** An attacker without the key sees digests only, which are values of a PRF. As long as
no two different blocks behind these digests had the same sums, they are random numbers, whatever
the multipliers are: he learns nothing of them, and chooses contents independently of them. So a
block that he puts in the place of one with known content passes with probability ``2**-64`` at
most, and each attempt that does not ends the refit. After v attempts and q blocks seen, his chance
is at most ``v * (2**-64 + 2**-128)``, plus ``q**2 * 2**-65`` that two of those had the same sums
(for weights that differ in nothing but highest bits; ``q**2 * 2**-127`` where lowest bits differ),
plus what it takes to break BLAKE2b or BLAKE3.

Words of 64 bits would not do: the highest bits of any two would cancel, whatever the multipliers.
Sums of integers have no rounding: a digest is the same on every device and in any order.
"""

from __future__ import annotations

import hashlib
import warnings
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BLOCK = 4 << 20  # bytes under one digest, at most

_CHUNK = 8 << 20  # bytes folded at once: with products (x 2) and multipliers, 40 MiB of a device


def prepare(
    runs: Sequence[torch.Tensor], key: bytes, block: int = BLOCK, chunk: int = _CHUNK
) -> Callable[[], Callable[[], list[bytes]]]:
    """Makes ready to digest the blocks of some runs of bytes on one device, as often as needed.

    Args:
        runs: uint8, contiguous.
        key: The secret.
        block: Bytes under one digest; a multiple of 4, :data:`BLOCK` at most.
        chunk: Bounds the memory that it takes besides, where that depends on the bytes. It has no
            influence on the digests.
    """
    counts = [-(-run.numel() // block) for run in runs]
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    sizes = np.full(sum(counts), block, dtype=np.uint64)
    for run, end, count in zip(runs, ends, counts, strict=True):
        if count:
            sizes[end - 1] = run.numel() - (count - 1) * block
    launch = _fused(runs, key, block) or partial(_in_torch, runs, ends, key, block, chunk)

    def begin() -> Callable[[], list[bytes]]:
        sums = launch()  # int64 [blocks, 2]

        def digests() -> list[bytes]:
            columns = [sums.cpu().numpy().view(np.uint64), sizes]
            packed = np.column_stack(columns).astype("<u8").tobytes()
            return [
                hashlib.blake2b(
                    packed[at : at + 24], key=key, person=b"rl-refit fold", digest_size=16
                ).digest()
                for at in range(0, len(packed), 24)
            ]

        return digests

    return begin


def _fused(
    runs: Sequence[torch.Tensor], key: bytes, block: int
) -> Callable[[], torch.Tensor] | None:
    """What sums all blocks in one kernel, where that is possible."""
    on_gpu = bool(runs) and runs[0].device.type == "cuda"
    if not on_gpu or any(run.data_ptr() % 4 for run in runs):
        return None
    if (kernel := _kernel(runs[0].device)) is None:
        return None
    launch: Callable[[], torch.Tensor] = kernel.prepare(
        runs, multipliers(key, runs[0].device), block
    )
    return launch


@cache
def _kernel(device: torch.device) -> Any:
    """The module of the kernel, if Triton is installed and can compile for a device here."""
    try:
        from rl_core.weights.gpu import fold_triton as _fold_triton
    except ImportError:
        return None
    try:
        factors = torch.ones(2, 1, dtype=torch.int64, device=device)
        _fold_triton.prepare([torch.zeros(4, dtype=torch.uint8, device=device)], factors, 4)()
    except (
        Exception
    ) as error:  # no compiler, or a GPU that it does not know: it has no narrower one
        warnings.warn(
            f"Triton cannot compile for {device} ({error}), so refits hash there with torch's own "
            "operations, which is many times slower. Fix: install a C compiler",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return _fold_triton


def _in_torch(
    runs: Sequence[torch.Tensor], ends: Sequence[int], key: bytes, block: int, chunk: int
) -> torch.Tensor:
    """Both sums of every block, int64 ``[blocks, 2]``."""
    order: list[int] = []
    parts = [torch.empty(0, 2, dtype=torch.int64)]
    for places, words in _batches(runs, ends, block, chunk):
        factors = multipliers(key, words.device)[:, : words.shape[1]]
        product = torch.empty(words.shape, dtype=torch.int64, device=words.device)
        lanes = [torch.mul(words, row, out=product).sum(1) for row in factors]
        parts.append(torch.stack(lanes, dim=1))
        order += places
    sums = torch.cat(parts[1:] or parts)
    return sums[torch.from_numpy(np.argsort(order)).to(sums.device)] if order else sums


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


@lru_cache(maxsize=4)
def multipliers(key: bytes, device: torch.device) -> torch.Tensor:
    """The odd multipliers of both sums by position: int64 ``[2, BLOCK / 4]``, 16 MiB."""
    from blake3 import blake3  # only where a refit is on a GPU

    stream = blake3(b"multipliers", key=key).digest(length=2 * 8 * (BLOCK // 4))
    odd = np.frombuffer(stream, dtype="<u8") | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64).reshape(2, -1)).to(device)
