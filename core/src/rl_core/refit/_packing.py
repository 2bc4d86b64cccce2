"""The sender's side of the bytes: tensors into a lane, packed or at home there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from rl_core.errors import ManifestMismatchError
from rl_core.refit._digests import Digester, DigestTable, copy_run
from rl_core.refit.manifest import dtype_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.interfaces.weights import TensorSpec, WeightSource
    from rl_core.refit._digests import Window
    from rl_core.refit.hashing import BlockHash
    from rl_core.refit.manifest import WeightManifest
    from rl_core.refit.plan import Bucket
    from rl_core.refit.transports.base import Lane

__all__ = ["DirectPacker", "Packer", "SlotPacker", "digest_all", "take"]


def take(
    source: WeightSource, specs: Sequence[TensorSpec]
) -> Generator[tuple[TensorSpec, torch.Tensor]]:
    """The source's tensors of these specs, in order. Closing it closes the source's iterator.

    Raises:
        ManifestMismatchError: The source yields something else than its specs say.
    """
    tensors = iter(source.tensors([spec.name for spec in specs]))
    nothing = ("nothing", torch.empty(0))
    try:
        for spec in specs:
            name, tensor = next(tensors, nothing)
            sound = name == spec.name and tensor.shape == spec.shape
            if not sound or tensor.dtype != dtype_of(spec):
                raise ManifestMismatchError(
                    f"the source yielded {name} {list(tensor.shape)} {tensor.dtype} where its "
                    f"specs say {spec.name} {list(spec.shape)} {spec.dtype}",
                    fix="make WeightSource.tensors yield the asked names as declared",
                    misshaped=[spec.name],
                )
            yield spec, tensor
    finally:
        if isinstance(tensors, Generator):  # now, not when an error that holds it is forgotten
            tensors.close()


def digest_all(
    source: WeightSource,
    declared: WeightManifest,
    wire: WeightManifest,
    block_bytes: int,
    block_hash: BlockHash,
) -> DigestTable:
    """The digest of every tensor as it is now, in the dtype that travels."""
    table, digester = DigestTable(wire), Digester(block_bytes, block_hash, keep=False)
    lasting = (source.persistent() or {}) if block_hash.kind == "fold" else {}
    with torch.no_grad(), closing(take(source, declared.owned)) as taken:
        given = ((wire.by_name[s.name], tensor) for s, tensor in taken)
        table.known.update(digester.all(given, lasting))
    return table


class Packer(ABC):
    """Puts the buckets of one refit into a lane, in order.

    Args:
        window: What goes where.
        lane: The sender's end of the lane.
        table: Collects the digests of what is put; None if nothing is hashed.
    """

    def __init__(self, window: Window, lane: Lane, table: DigestTable | None) -> None:
        self._window = window
        self._lane = lane
        self._table = table

    def put(self, index: int) -> bytes:
        """Makes a bucket ready in the lane.

        Returns:
            The digests of its blocks, if they are hashed.

        Raises:
            ManifestMismatchError: The source yields something else than its specs say.
        """
        plan = self._window.plan
        bucket = plan.buckets[index]
        found: list[bytes] = []
        with torch.no_grad():
            self._fill(index, bucket)
            if self._table is not None:
                found = self._window.digests(index)
                self._table.add(bucket, found, plan.block_bytes)
        self._lane.publish(bucket.start, bucket.stop)
        return b"".join(found)

    def close(self) -> None:
        """Reads nothing more from the source."""

    @abstractmethod
    def _fill(self, index: int, bucket: Bucket) -> None:
        """Copies what is not there yet."""


class SlotPacker(Packer):
    """Copies tensors into slots that are used again and again; asks for each once, in order.

    Args:
        window: What goes where.
        lane: The sender's end of the lane.
        table: Collects the digests of what is put; None if nothing is hashed.
        source: The trainer's tensors.
        declared: The source's own manifest.
    """

    def __init__(
        self,
        window: Window,
        lane: Lane,
        table: DigestTable | None,
        source: WeightSource,
        declared: WeightManifest,
    ) -> None:
        super().__init__(window, lane, table)
        self._tensors = take(source, [declared.owned[index] for index in window.plan.sent])
        self._tensor = torch.empty(0)

    def _fill(self, index: int, bucket: Bucket) -> None:
        for segment, view in zip(bucket.segments, self._window.views(index), strict=True):
            if segment.offset == 0:
                _, self._tensor = next(self._tensors)
            if segment.whole:
                view.copy_(self._tensor)
            else:
                copy_run(view, self._tensor, segment.offset)

    def close(self) -> None:
        """See :meth:`Packer.close`."""
        self._tensors.close()


class DirectPacker(Packer):
    """The trainer's tensors live in the lane: there is nothing to copy."""

    def _fill(self, index: int, bucket: Bucket) -> None:
        pass
