"""128-bit digests of blocks of bytes, computed where the bytes are.

A digest proves that bytes arrived as they were sent. Against faults any good hash does. Against
somebody who can change bytes on their way, it must be *keyed*, with a secret that they do not have:
a code over the digests is not enough, because for a hash with public constants they find other
bytes with the digests that they see pass. There are three kinds:

===========  ==================================================================================
``xxh3``     XXH3-128. On the CPU, where no stranger reaches the bytes (a *private* transport):
             it sees faults, and withstands nobody.
``blake3``   BLAKE3, keyed. On the CPU, for all other transports: a pseudo-random function, so
             that without the key neither a digest nor another content for one can be found.
``fold``     On a GPU, always: see :mod:`rl_core.weights.gpu.fold`, which states its bounds.
===========  ==================================================================================

Keys are derived from the token that a trainer gives its engines in ``prepare_refit_info``. There
is one for each kind and trainer, for its whole life: one digest serves all receivers, and what an
engine holds can be compared from refit to refit.

The digest of a tensor, and that of a model, are XXH3 of its blocks' digests. This is as sound as
they are: they are outputs of a keyed function, so that all an attacker can do is hope that two
random inputs of XXH3-128 collide, which n tensors do with probability ``n**2 / 2**129``. Receivers
also compare every block with what the sender found before anything is combined.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args

import numpy as np
import torch
import xxhash

from rl_core.errors import RefitProtocolError
from rl_core.weights.data.plan import BLOCK
from rl_core.weights.data.runs import copy_run, flat, is_plain
from rl_core.weights.gpu import fold as _fold

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from rl_core.interfaces.weights import TensorSpec
    from rl_core.weights.data.manifest import WeightManifest
    from rl_core.weights.data.plan import Segment

__all__ = ["BlockHash", "DigestTable", "Hasher", "TensorHasher", "tensor_digest"]

DIGEST_BYTES = 16
_UNKNOWN = bytes(DIGEST_BYTES)
_Place = tuple[str, int, int]  # name, address and bytes of a tensor

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
        """The hash that a sender uses."""
        if device.type != "cpu":
            return cls._keyed("fold", token)
        return cls._keyed("xxh3" if private else "blake3", token)

    @classmethod
    def named(cls, kind: str, *, private: bool, token: str) -> Self:
        """The hash that a sender names."""
        if kind not in get_args(_Kind):
            raise RefitProtocolError(
                f"the sender hashes with {kind!r}, which this rl-core does not have",
                phase="PREPARE",
            )
        if kind == "xxh3" and not private:
            raise RefitProtocolError(
                "the sender hashes with 'xxh3', which does not protect data on a shared network",
                fix="give both ends of the transport the same value of `private`",
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
        """The function that digests a block in the CPU's memory."""
        if self.kind == "xxh3":
            return xxhash.xxh3_128_digest
        if self.kind == "fold":
            raise ValueError("fold hashes tensors, not memory: use TensorHasher")
        from blake3 import blake3  # only where a refit leaves the host

        key = self.key
        return lambda view: blake3(view, key=key).digest(length=16)


class Hasher:
    """Digests the blocks of some runs of bytes, as often as needed.

    Args:
        runs: uint8 ``[nbytes]`` each, contiguous, at any alignment, all on one device. Their memory
            is held.
        block_hash: Digests of two of them have nothing in common, so one who compares with others
            uses theirs, wherever the bytes are.
        block: Bytes under one digest, if not as many as the hash takes.
    """

    def __init__(
        self, runs: Sequence[torch.Tensor], block_hash: BlockHash, block: int | None = None
    ) -> None:
        size = block or block_hash.block
        self._fold: Callable[[], Callable[[], list[bytes]]] | None = None
        self._blocks: list[Any] = []  # memoryviews on the CPU, tensors elsewhere
        if block_hash.kind == "fold":
            self._fold = _fold.prepare(runs, block_hash.key, size)
        else:
            of_view = block_hash.of_view
            on_cpu = all(run.device.type == "cpu" for run in runs)
            self._digest: Callable[[Any], bytes] = (
                of_view if on_cpu else lambda block: of_view(as_view(block.cpu()))
            )
            for run in runs:
                whole = as_view(run) if on_cpu else run
                self._blocks += [whole[at : at + size] for at in range(0, len(whole), size)]

    def begin(self) -> Callable[[], list[bytes]]:
        """Begins to digest what the bytes are now.

        A device does so meanwhile, and before any later work of its current stream
        on the bytes.
        """
        if self._fold is not None:
            return self._fold()
        found = list(map(self._digest, self._blocks))
        return lambda: found

    def digests(self) -> list[bytes]:
        """The result for what the bytes are now."""
        return self.begin()()


def as_view(data: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    array: Any = flat(data).view(torch.uint8).numpy()  # no buffer to 3.11's types
    return memoryview(array)


def tensor_digest(blocks: Sequence[bytes]) -> bytes:
    """One digest (16 bytes) of a tensor from those of its blocks, in order."""
    return blocks[0] if len(blocks) == 1 else xxhash.xxh3_128_digest(b"".join(blocks))


class TensorHasher:
    """Digests tensors as they would travel."""

    def __init__(self, block_hash: BlockHash, block: int) -> None:
        self._hash = block_hash
        self._block = block
        self._lasting: dict[torch.device, tuple[list[_Place], Hasher]] = {}

    @torch.no_grad()
    def digests(
        self, given: Iterable[tuple[str, TensorSpec, torch.Tensor]], lasting: Collection[int]
    ) -> dict[str, bytes]:
        """The digest that each tensor gets when it travels as in its spec, by the given name.

        A device is waited for when all tensors are under way.

        Args:
            given: Tensors of any strides, dtype and device, each with a spec of the dtype that
                travels; at most a block of one is copied. Each may be freed once the next is
                taken.
            lasting: Addresses of tensors that stay: those of them that are given are digested
                together, and their memory is held.
        """
        found: dict[str, bytes] = {}
        begun: list[tuple[Sequence[_Place], Callable[[], list[bytes]]]] = []
        together: dict[torch.device, tuple[list[_Place], list[torch.Tensor]]] = {}
        for name, spec, tensor in given:
            if not is_plain(tensor) or tensor.dtype != spec.torch_dtype:
                every = 0, spec.numel
                found[name] = tensor_digest(
                    copied_digests(tensor, spec, every, self._hash, self._block)
                )
                continue
            place = (name, tensor.data_ptr(), tensor.nbytes)
            if place[1] in lasting:
                places, tensors = together.setdefault(tensor.device, ([], []))
                places.append(place)
                tensors.append(tensor)
            else:
                begun.append(([place], self._hasher([tensor]).begin()))
        for device, (places, tensors) in together.items():
            known = self._lasting.get(device)
            if known is None or known[0] != places:
                known = self._lasting[device] = places, self._hasher(tensors)
            begun.append((places, known[1].begin()))
        for placed, result in begun:
            blocks = iter(result())
            for name, _, size in placed:
                found[name] = tensor_digest(list(islice(blocks, -(-size // self._block))))
        return found

    def _hasher(self, tensors: Iterable[torch.Tensor]) -> Hasher:
        runs = [flat(tensor).view(torch.uint8) for tensor in tensors]
        return Hasher(runs, self._hash, self._block)


class DigestTable:
    """The digest of every part of a model, or of those that come through one lane."""

    def __init__(self, manifest: WeightManifest, known: dict[str, bytes] | None = None) -> None:
        self.known = {} if known is None else known
        self._manifest = manifest
        self._open: list[bytes] = []

    def add(self, segments: Iterable[Segment], digests: Sequence[bytes], block_bytes: int) -> None:
        """Takes the block digests of segments, which come in order."""
        left = iter(digests)
        for segment in segments:
            blocks = -(-(segment.stop - segment.start) // block_bytes)
            self._open += islice(left, blocks)
            if segment.last:
                self.known[segment.spec.name] = tensor_digest(self._open)
                self._open = []

    def forget(self, segments: Iterable[Segment]) -> None:
        """These are about to be written."""
        for segment in segments:
            self.known.pop(segment.spec.name, None)

    def flat(self, mask: bytes | None = None) -> bytes:
        """The digests of all parts or of those with a 1 in ``mask``, zeros where unknown."""
        owned = self._manifest.owned if mask is None else compress(self._manifest.owned, mask)
        return b"".join(self.known.get(spec.name, _UNKNOWN) for spec in owned)

    def take(self, digests: bytes, mask: bytes, rank: int) -> None:
        """Takes what another table of a rank has as ``flat(mask)``."""
        names = [spec.name for spec in compress(self._manifest.owned, mask)]
        if len(digests) != len(names) * DIGEST_BYTES:
            raise RefitProtocolError(f"rank {rank} sent too few digests", rank=rank)
        for n, name in enumerate(names):
            self.known[name] = digests[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES]

    def digest(self, mask: bytes) -> str:
        """128-bit hash over the manifest, and the digests of the parts with a 1 in ``mask``."""
        found = self._manifest.digest.encode() + mask + self.flat(mask)
        return xxhash.xxh3_128_hexdigest(found)


def same(held: bytes, now: bytes) -> bytes:
    """A byte for each digest of a table, 1 for those that are ``held``; 0s if that is another's."""
    if len(held) != len(now):
        return bytes(len(now) // DIGEST_BYTES)
    pair = (np.frombuffer(digests, np.uint64).reshape(-1, 2) for digests in (held, now))
    found: bytes = np.equal(*pair).all(1).tobytes()
    return found


def copied_digests(
    tensor: torch.Tensor, spec: TensorSpec, run: tuple[int, int], block_hash: BlockHash, size: int
) -> list[bytes]:
    """The digests of a run of elements (the first, how many) in a spec's dtype, block by block."""
    (offset, count), dtype, found = run, spec.torch_dtype, list[bytes]()
    scratch = torch.empty(min(size // dtype.itemsize, count), dtype=dtype, device=tensor.device)
    for done in range(0, count, len(scratch)):
        some = scratch[: count - done]
        copy_run(some, tensor, offset + done)
        found += Hasher([some.view(torch.uint8)], block_hash, size).digests()
    return found
