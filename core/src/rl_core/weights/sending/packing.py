"""The sender's bytes: tensors are copied into a lane, unless they live there."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import torch

from rl_core.errors import ManifestMismatchError
from rl_core.weights.data.digests import Hasher, copy_run
from rl_core.weights.data.manifest import dtype_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.interfaces.weights import TensorSpec, WeightSource
    from rl_core.weights.data.digests import BlockHash, DigestTable
    from rl_core.weights.data.plan import TransferPlan
    from rl_core.weights.transports.base import Lane


class SenderBuckets:
    """The buckets of a plan in the sender's lane.

    Views and hashers are made once for each bucket, and used by all refits with this plan.
    """

    def __init__(self, plan: TransferPlan, lane: Lane, block_hash: BlockHash) -> None:
        self.plan = plan
        self.lane = lane
        self.block_hash = block_hash
        self._views: dict[int, list[torch.Tensor]] = {}
        self._hashers: dict[int, Hasher] = {}

    def views(self, index: int) -> list[torch.Tensor]:
        """The segments of a bucket, of the dtypes that travel: whole tensors, or 1-D parts."""
        if index not in self._views:
            segments = self.plan.buckets[index].segments
            self._views[index] = [
                segment.of(self.lane.data).view(segment.spec.shape if segment.whole else -1)
                for segment in segments
            ]
        return self._views[index]

    def digests(self, index: int) -> list[bytes]:
        """The digests of a bucket's blocks, as they are now."""
        if index not in self._hashers:
            segments, size = self.plan.buckets[index].segments, self.plan.block_bytes
            runs = [self.lane.data[s.start : s.stop] for s in segments]
            self._hashers[index] = Hasher(runs, self.block_hash, size)
        return self._hashers[index].digests()

    def detach(self) -> None:
        """Drops all views of the lane, so that its memory is unmapped."""
        self._views.clear()
        self._hashers.clear()


class Packer:
    """Puts the buckets of one refit into its lane, in order.

    Attributes:
        buckets: What goes where.
    """

    def __init__(
        self,
        buckets: SenderBuckets,
        tensors: Generator[tuple[TensorSpec, torch.Tensor]] | None,
        table: DigestTable | None,
    ) -> None:
        self.buckets = buckets
        self._tensors = tensors
        self._table = table
        self._tensor = torch.empty(0)

    @torch.no_grad()
    def put(self, index: int) -> bytes:
        """Makes a bucket ready in the lane."""
        buckets = self.buckets
        bucket = buckets.plan.buckets[index]
        if self._tensors is not None:
            for segment, view in zip(bucket.segments, buckets.views(index), strict=True):
                if segment.offset == 0:
                    _, self._tensor = next(self._tensors)
                if segment.whole:
                    view.copy_(self._tensor)
                else:
                    copy_run(view, self._tensor, segment.offset)
        found: list[bytes] = []
        if self._table is not None:
            found = buckets.digests(index)
            self._table.add(bucket, found, buckets.plan.block_bytes)
        buckets.lane.publish(bucket.start, bucket.stop)
        return b"".join(found)

    def close(self) -> None:
        """Reads nothing more from the source."""
        if self._tensors is not None:
            self._tensors.close()


def checked_tensors(
    source: WeightSource, specs: Sequence[TensorSpec]
) -> Generator[tuple[TensorSpec, torch.Tensor]]:
    """The source's tensors of these specs, in order. Closing it closes the source's iterator."""
    tensors = iter(source.tensors([spec.name for spec in specs]))
    nothing = ("nothing", torch.empty(0))
    try:
        for spec in specs:
            name, tensor = next(tensors, nothing)
            sound = name == spec.name and tensor.shape == spec.shape
            if not sound or tensor.dtype != dtype_of(spec):
                raise ManifestMismatchError(
                    f"the source yielded {name} {list(tensor.shape)} {tensor.dtype} where its "
                    f"specs declare {spec.name} {list(spec.shape)} {spec.dtype}",
                    fix="make WeightSource.tensors yield the tensors as its specs declare them",
                    misshaped=[spec.name],
                )
            yield spec, tensor
    finally:
        if isinstance(tensors, Generator):  # now, not when an error that holds it is forgotten
            tensors.close()
