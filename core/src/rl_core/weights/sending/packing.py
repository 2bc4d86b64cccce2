"""The sender's bytes: tensors are copied into a lane, unless they live there."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import torch

from rl_core.errors import LoopWarning, ManifestMismatchError, TrainingError
from rl_core.weights.data.digests import Hasher, copied_digests
from rl_core.weights.data.parts import Part, box_of, narrowed, sizes_of
from rl_core.weights.data.runs import copy_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rl_core.interfaces.weights import Piece, TensorSpec, WeightSource
    from rl_core.weights.data.digests import BlockHash, DigestTable
    from rl_core.weights.data.manifest import WeightManifest
    from rl_core.weights.data.parts import Partition
    from rl_core.weights.data.plan import Segment, TransferPlan
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
            if any(segment.strides for segment in segments):
                return [digest for s in segments for digest in self._digests_of(s)]
            runs = [self.lane.data[s.start : s.stop] for s in segments]
            self._hashers[index] = Hasher(runs, self.block_hash, size)
        return self._hashers[index].digests()

    def _digests_of(self, segment: Segment) -> list[bytes]:
        """The digests of one segment's blocks, each of which is copied if it has strides."""
        data, size = self.lane.data, self.plan.block_bytes
        if not segment.strides:
            return Hasher([data[segment.start : segment.stop]], self.block_hash, size).digests()
        part, run = segment.part_in(data), (segment.offset, segment.elements)
        return copied_digests(part, segment.spec, run, self.block_hash, size)

    def detach(self) -> None:
        """Drops all views of the lane, so that its memory is unmapped."""
        self._views.clear()
        self._hashers.clear()


class Packer:
    """Puts the buckets of one refit into its lane, in order.

    Args:
        buckets: What goes where.
        parts: The parts that go, in their order, with their elements; None if they are in the lane.
        table: Takes the digests; None if nothing is verified.
        readers: The ids of the receivers, with the ``reads`` of their ``LaneInfo``.
    """

    def __init__(
        self,
        buckets: SenderBuckets,
        parts: Generator[tuple[TensorSpec, torch.Tensor]] | None,
        table: DigestTable | None,
        readers: Mapping[str, bytes],
    ) -> None:
        self.buckets = buckets
        self._readers = readers
        self._parts = parts
        self._table = table
        self._part = torch.empty(0)

    @torch.no_grad()
    def put(self, index: int) -> bytes:
        """Makes a bucket ready in the lane."""
        buckets = self.buckets
        bucket = buckets.plan.buckets[index]
        if self._parts is not None:
            for segment, view in zip(bucket.segments, buckets.views(index), strict=True):
                if segment.offset == 0:
                    _, self._part = next(self._parts)
                if segment.whole:
                    view.copy_(self._part)
                else:
                    copy_run(view, self._part, segment.offset)
        found: list[bytes] = []
        if self._table is not None:
            found = buckets.digests(index)
            self._table.add(bucket.segments, found, buckets.plan.block_bytes)
        found_runs = ((to, bucket.runs(reads)) for to, reads in self._readers.items())
        runs = {to: its for to, its in found_runs if its is not None}
        buckets.lane.publish(bucket.start, bucket.stop, runs)
        return b"".join(found)

    def close(self) -> None:
        """Reads nothing more from the source."""
        if self._parts is not None:
            self._parts.close()


def sent_parts(
    source: WeightSource,
    parts: Partition,
    manifest: WeightManifest,
    sent: Iterable[int],
    pieces: Sequence[Piece] | None,
) -> Generator[tuple[TensorSpec, torch.Tensor]]:
    """The elements of parts in order, in the source's dtypes.

    Args:
        source: Gives whole tensors, if there are no pieces, and makes those pieces that have no
            tensor.
        parts: Of the tensors, in the dtypes that travel.
        manifest: The source's.
        sent: Indices of the parts.
        pieces: Of tensors that the source does not have whole.
    """
    owned = parts.manifest.owned
    if pieces is not None:
        places: dict[int, Piece] = {}
        for piece in pieces:
            if (index := parts.whole.index.get(piece.name)) is None:
                continue
            spec, tensor = manifest.by_name[piece.name], piece.tensor
            if tensor is not None and tensor.dtype != spec.torch_dtype:
                raise ManifestMismatchError(
                    f"{spec.name}: a piece of the weight source is {tensor.dtype}, not "
                    f"{spec.dtype}",
                    fix="make its pieces() give tensors of the declared dtypes",
                    mistyped=[spec.name],
                )
            for part in parts.of_box(index, piece.box):
                places[part] = piece
        sent = list(sent)
        made = {places[n].name: places[n].box for n in sent if places[n].tensor is None}
        specs = [
            msgspec.structs.replace(manifest.by_name[name], shape=sizes_of(box))
            for name, box in made.items()
        ]
        with closing(checked_tensors(source, specs)) as given:
            last = ""
            for part in sent:
                name, box, tensor = places[part]
                if tensor is None and name != last:
                    last, now = name, next(given)[1]
                yield owned[part], narrowed(now if tensor is None else tensor, box, owned[part])
        return
    of: dict[str, list[TensorSpec]] = {}
    for one in (owned[part] for part in sent):
        of.setdefault(one.of if isinstance(one, Part) else one.name, []).append(one)
    with closing(checked_tensors(source, [manifest.by_name[name] for name in of])) as given:
        for spec, tensor in given:
            for one in of[spec.name]:
                yield one, narrowed(tensor, box_of(spec), one) if isinstance(one, Part) else tensor


def check_finite(
    given: Iterable[tuple[TensorSpec, torch.Tensor]], action: str, version: int
) -> None:
    """Warns of NaN and infinity in what is going to be sent.

    Args:
        given: The parts that are going to be sent.
        action: ``check_finite`` of :class:`~rl_core.weights.options.SendOptions`.
        version: Of the refit.

    Raises:
        TrainingError: There is some, and ``action`` is ``"refuse"``.
    """
    # A sum is as good, and reads each element once. Torch has none for floats of 8 bits.
    found = [  # no loop: an error must not hold the last tensor
        f"{part.name} ({count})"
        for part, tensor in given
        if tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.sum().isfinite()
        if (count := int((~tensor.isfinite()).sum()))  # or only the sum is too large
    ]
    text = f"version {version} has NaN or infinity, with the number of elements: {', '.join(found)}"
    if found and action == "refuse":
        fix = 'load a checkpoint before it; check_finite="warn" sends it nevertheless'
        raise TrainingError(text, fix=fix)
    if found:
        warnings.warn(text, LoopWarning, stacklevel=3)


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
            if not sound or tensor.dtype != spec.torch_dtype:
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
