"""128-bit digests of blocks of bytes, computed where the bytes are.

A digest proves that bytes arrived as they were sent. Against faults any good hash does. Against
somebody who can change bytes on their way, it must be *keyed*, with a secret that he does not have:
a code over the digests is not enough, because for a hash whose constants are public he finds
other bytes with the digests that he sees pass. There are three kinds:

===========  ==================================================================================
``xxh3``     XXH3-128. On the CPU, where no stranger reaches the bytes (a *private* transport):
             it sees faults, and withstands nobody.
``blake3``   BLAKE3, keyed. On the CPU, for all other transports: a pseudo-random function, so
             that without the key neither a digest nor another content for one can be found.
``fold``     On a GPU, always: see :mod:`rl_core.refit._fold`, which states its bounds.
===========  ==================================================================================

Keys are derived from the token that a trainer gives its engines in ``prepare_refit_info``. There
is one for each kind and trainer, for its whole life: one digest serves all receivers, and what an
engine holds can be compared from refit to refit.

The digest of a tensor, and that of a model, are XXH3 of its blocks' digests. This is as sound as
they are: whoever wants two tensors with one digest needs blocks whose *digests* stand in a relation
that he chose. These are outputs of a keyed function, which he can neither compute nor predict; all
he can do is hope that two random inputs of XXH3-128 collide, which n tensors do with probability
``n**2 / 2**129``. Receivers also compare block by block with what the sender found before anything
is combined.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self, cast, get_args

import xxhash

from rl_core.errors import RefitProtocolError
from rl_core.refit import _fold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

__all__ = [
    "BLOCK",
    "BlockHash",
    "block_digests",
    "hash_views",
    "run_digests",
    "start_digests",
    "tensor_digest",
]

BLOCK = 512 << 10
"""Bytes under one digest on the CPU, at most: they are in its cache when they were just copied."""

_Kind = Literal["xxh3", "blake3", "fold"]
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class BlockHash:
    """The hash of one trainer's blocks; digests of two of them have nothing in common.

    Attributes:
        kind: ``"xxh3"``, ``"blake3"`` or ``"fold"``.
        key: The secret, 32 bytes; empty for ``"xxh3"``, which has none.
    """

    kind: _Kind
    key: bytes = field(repr=False)

    @classmethod
    def choose(cls, device: torch.device, *, private: bool, token: str) -> Self:
        """The hash that a sender uses.

        Args:
            device: Where the bytes lie that are hashed.
            private: As of :class:`~rl_core.refit.transports.base.SenderEnd`.
            token: The trainer's secret.
        """
        if device.type != "cpu":
            return cls._keyed("fold", token)
        return cls._keyed("xxh3" if private else "blake3", token)

    @classmethod
    def named(cls, kind: str, *, private: bool, token: str) -> Self:
        """The hash that a sender says it uses.

        Raises:
            RefitProtocolError: There is none of this kind, or it does not protect the bytes on a
                transport that is not private.
        """
        if kind not in get_args(_Kind):
            raise RefitProtocolError(
                f"the sender hashes with {kind!r}, which is not known here",
                fix="install the same version of rl-core on both sides",
                phase="PREPARE",
            )
        if kind == "xxh3" and not private:
            raise RefitProtocolError(
                "the sender hashes with 'xxh3', which protects no bytes that others can reach",
                fix="let the transport say the same of `private` at both of its ends",
                phase="PREPARE",
            )
        return cls._keyed(cast("_Kind", kind), token)

    @classmethod
    def _keyed(cls, kind: _Kind, token: str) -> Self:
        if kind == "xxh3":
            return cls(kind, b"")
        secret = hashlib.blake2b(token.encode(), person=b"rl-refit token").digest()
        key = hashlib.blake2b(
            kind.encode(), key=secret, person=b"rl-refit blocks", digest_size=_KEY_BYTES
        )
        return cls(kind, key.digest())

    @property
    def block(self) -> int:
        """Bytes under one digest, at most."""
        return _fold.BLOCK if self.kind == "fold" else BLOCK

    @property
    def of_view(self) -> Callable[[memoryview], bytes]:
        """What digests a block in the CPU's memory.

        Raises:
            ValueError: The kind is ``"fold"``, which takes tensors.
        """
        if self.kind == "xxh3":
            return xxhash.xxh3_128_digest
        if self.kind == "fold":
            raise ValueError("fold takes tensors: run_digests")
        from blake3 import blake3  # only where a refit leaves the host

        key = self.key
        return lambda view: blake3(view, key=key).digest(length=16)


def hash_views(views: Iterable[memoryview], block_hash: BlockHash) -> list[bytes]:
    """The digest of each view.

    Args:
        views: A block each.
        block_hash: Not a ``"fold"``.
    """
    return list(map(block_hash.of_view, views))


def tensor_digest(blocks: Sequence[bytes]) -> bytes:
    """One digest (16 bytes) of a tensor from those of its blocks, in order."""
    return blocks[0] if len(blocks) == 1 else xxhash.xxh3_128_digest(b"".join(blocks))


def block_digests(
    data: torch.Tensor, block_hash: BlockHash, *, block: int | None = None
) -> list[bytes]:
    """Digests of the blocks of one run of bytes.

    Args:
        data: uint8 ``[nbytes]``, contiguous, on any device and at any alignment.
        block_hash: Digests of two of them have nothing in common, so one who compares with
            others uses theirs, wherever the bytes are.
        block: Bytes under one digest, if not as many as the hash takes.

    Returns:
        16 bytes for each block or part of one; none for an empty run.
    """
    return run_digests([data], block_hash, block=block)[0]


def run_digests(
    runs: Sequence[torch.Tensor], block_hash: BlockHash, *, block: int | None = None
) -> list[list[bytes]]:
    """As :func:`block_digests`, of many runs of one device; waits for the device once."""
    return start_digests(runs, block_hash, block=block)()


def start_digests(
    runs: Sequence[torch.Tensor], block_hash: BlockHash, *, block: int | None = None
) -> Callable[[], list[list[bytes]]]:
    """As :func:`run_digests`, whose result is had by calling what this returns.

    A device computes meanwhile; what its stream does next to the bytes comes after that.
    """
    block = block or block_hash.block
    if block_hash.kind == "fold":
        return _fold.prepare(runs, block_hash.key, block)()
    of_view = block_hash.of_view
    found = [
        [
            of_view(run[start : start + block].cpu().numpy().data)
            for start in range(0, run.numel(), block)
        ]
        for run in runs
    ]
    return lambda: found
