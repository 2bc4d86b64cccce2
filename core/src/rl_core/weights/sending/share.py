"""What one rank of a trainer gives in one refit: its pieces, and the lane that they go through."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import RefitError
from rl_core.weights.connections import keep_two
from rl_core.weights.data.digests import DigestTable, TensorHasher
from rl_core.weights.data.parts import LanePlaces, layout_of, lying
from rl_core.weights.data.plan import ALIGN, SLOTS, DataMode, make_plan
from rl_core.weights.sending.packing import Packer, SenderBuckets, check_finite, sent_parts
from rl_core.weights.transports.base import NoLane

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from rl_core.errors import RLError
    from rl_core.interfaces.weights import Piece, TensorSpec, WeightSource
    from rl_core.weights.connections import Connection
    from rl_core.weights.data.digests import BlockHash
    from rl_core.weights.data.parts import Layout, Partition
    from rl_core.weights.sending.kept import Kept
    from rl_core.weights.transports.base import Lane

__all__ = ["Share"]

_NO_LANE = NoLane()


class Share:
    """One rank's side of the bytes, for one refit.

    Args:
        kept: From refit to refit.
        source: Of this rank; it is closed once.

    Attributes:
        manifest: The source's.
        layout: The boxes of its pieces; set by :meth:`look`, as what follows.
        own: The device of the tensors.
        parts: What is sent are some of these; set by who knows it, as what follows.
        hash: Of the digests.
        connection: Which the lane will be on.
        device: Where.
        readers: For whom, as of :class:`Packer`.
        buckets: What is sent; set by :meth:`prepare`.
    """

    buckets: SenderBuckets
    layout: Layout
    own: torch.device
    _pieces: Sequence[Piece] | None
    _lying: list[Any]
    connection: Connection[Any]
    device: torch.device
    readers: Mapping[str, bytes]
    parts: Partition
    hash: BlockHash

    def __init__(self, kept: Kept, source: WeightSource) -> None:
        self.manifest = kept.manifest_of(source)
        self.source = source
        self._kept = kept
        self._packer: Packer | None = None
        self._closed = False

    def look(self) -> None:
        """Takes the pieces as they are now.

        Raises:
            ManifestMismatchError: One is not in its tensor.
        """
        # By the name that tensors give it.
        self.own = torch.empty(0, device=self.source.device).device
        if self.own.type == "cuda":
            torch.cuda.synchronize(self.own)  # an optimizer may step on another stream
        pieces = self._pieces = self.source.pieces()
        self._lying = lying(pieces or ())
        of = (self.manifest, pieces is None, self._lying)
        make = partial(layout_of, self.manifest, pieces, sends=True)
        self.layout = self._kept.same("layout", of, make)

    @property
    def extra_bytes(self) -> int:
        """Bytes of memory that were made for the lane."""
        buckets = self.buckets
        return 0 if buckets.plan.mode is DataMode.DIRECT else buckets.lane.data.numel()

    def move(self, casts: int, *, wanted: bool) -> str:
        """Moves the tensors to memory that receivers read; why not, if that is not possible.

        Args:
            casts: Tensors that the engines want in another dtype.
            wanted: Nothing else is: memory that lacked before is tried to be had again.

        Raises:
            RefitError: It is wanted, and memory lacks.
        """
        end, moved, pieces = self.connection.end, self._kept.moved, self._pieces
        if not end.reads_memory or end.reason_not_shareable:
            return end.reason_not_shareable or "the transport does not share memory"
        if casts:
            return f"the engine wants {casts} tensors in another dtype"
        if pieces is None:
            return "the weight source computes its tensors during the refit"
        if not pieces:
            return ""  # this rank has nothing
        lane = self.connection.lanes.get((DataMode.DIRECT, 0))
        same = moved.lane is lane and lane.data.device == self.device
        if same and moved.lie_there(self.manifest, self._lying):
            return ""
        if not wanted and moved.lacked[0] is self.manifest:
            return moved.lacked[1]

        def lane_of(nbytes: int, anew: bool) -> Lane:
            if anew:
                self._kept.connections.close_lanes(lambda mode, _: mode is DataMode.DIRECT)
            sizes = range(nbytes, nbytes + 1)
            how = (DataMode.DIRECT, sizes, self.device, [*self.readers])
            return self._kept.lane(self.connection, *how)

        try:
            others = self.source.memory_users()
            return moved.move(self.manifest, pieces, others, self.device, lane_of)
        except (RefitError, torch.OutOfMemoryError) as error:
            cause = str(error).splitlines()[0]
            reason = f"the tensors cannot be moved to memory that engines read: {cause}"
            self._kept.drop_moved_tensors()
            self._kept.moved.lacked = self.manifest, reason
            if wanted:
                raise RefitError(
                    f"refit: mode='direct' is not possible: {reason}",
                    fix='use mode="auto" or mode="packed", or free memory: as much as the '
                    "largest tensor needs on the CPU, as all tensors need on a GPU",
                ) from error
            return reason

    def places(self, mode: DataMode) -> LanePlaces:
        """Where the parts are, if they are in a direct lane."""
        if mode is DataMode.PACKED:
            return LanePlaces()
        return self._kept.moved.places(self.parts, self._pieces or ())

    def prepare(
        self,
        mode: DataMode,
        bucket_bytes: int,
        skip: bytes,
        table: DigestTable | None,
        action: str,
        version: int,
    ) -> SenderBuckets:
        """Makes the buckets of all parts but those with a 1 in ``skip``, and memory for them.

        Args:
            mode: Of the lane.
            bucket_bytes: Size of a bucket.
            skip: A byte for each part.
            table: Takes the digests; None if nothing is verified.
            action: What follows if a part is not finite: ``check_finite`` of the options.
            version: Of the refit, for the warning or the error.
        """
        buckets = self.buckets = self._make(mode, bucket_bytes, skip)
        sent = self.parts, buckets.plan.sent
        if action != "off":
            check_finite(self._given(*sent), action, version)
        given = self._given(*sent) if mode is DataMode.PACKED else None
        self._packer = Packer(buckets, given, table, self.readers)
        return buckets

    def _given(
        self, parts: Partition, sent: Iterable[int]
    ) -> Generator[tuple[TensorSpec, torch.Tensor]]:
        cut = self._pieces if self.layout else None
        return sent_parts(self.source, parts, self.manifest, sent, cut)

    def put(self, index: int) -> bytes:
        """Puts a bucket into the lane; the digests of its blocks."""
        assert self._packer is not None, "there is a plan"
        return self._packer.put(index)

    def digests(
        self, mode: DataMode, bucket_bytes: int, parts: Partition, mask: bytes
    ) -> DigestTable:
        """Those of the parts with a 1 in ``mask`` as they are now, in the dtypes that travel."""
        table = DigestTable(parts.manifest)
        if mode is DataMode.DIRECT and parts is self.parts and 0 not in mask:
            whole = self._make(mode, bucket_bytes, b"")
            for index, part in enumerate(whole.plan.buckets):
                table.add(part.segments, whole.digests(index), whole.plan.block_bytes)
            return table
        block = min(self.hash.block, bucket_bytes // ALIGN * ALIGN)
        # Only tensors that stay can be hashed together on a device.
        fold, pieces = self.hash.kind == "fold", self._pieces or ()
        lasting = {p.tensor.data_ptr() for p in pieces if fold and p.tensor is not None}
        mine = [index for index, here in enumerate(mask) if here]
        with closing(self._given(parts, mine)) as given:
            named = ((spec.name, spec, tensor) for spec, tensor in given)
            table.known.update(TensorHasher(self.hash, block).digests(named, lasting))
        return table

    def close(self, failure: RLError | None = None) -> None:
        """Closes the source once; if that fails, raises RefitError, or notes it in ``failure``."""
        if self._closed:
            return
        self._closed = True
        if self._packer is not None:
            self._packer.close()
        vars(self).pop("buckets", None)
        self._packer = self._pieces = None  # or views that the next refit makes anew would stay
        try:
            self.source.close()
        except Exception as error:
            name = type(self.source).__name__
            text = f"{name} could not be closed: {type(error).__name__}: {error}"
            if failure is None:
                raise RefitError(text, fix="correct WeightSource.close") from error
            failure.add_note(text)

    def _make(self, mode: DataMode, bucket_bytes: int, skip: bytes) -> SenderBuckets:
        """The buckets of a refit, and memory for them: those of the last refits, where they fit."""
        kept, parts, how, at = self._kept, self.parts, self.hash, self.places(mode)
        key = (self.connection, parts.manifest.digest, bucket_bytes, mode, skip, how, at)
        cached = kept.connections.buckets.get(key)
        plan = cached.plan if cached else make_plan(parts, bucket_bytes, mode, skip, how.block, at)
        lane = kept.moved.lane if plan.buckets else _NO_LANE
        if plan.buckets and mode is DataMode.PACKED:
            sizes = range(plan.lane_bytes, 1 + max(plan.lane_bytes, SLOTS * bucket_bytes))
            lane = kept.lane(self.connection, mode, sizes, self.device, [*self.readers])
        if cached is None or cached.lane is not lane:
            cached = SenderBuckets(plan, lane, how)
        return keep_two(kept.connections.buckets, key, cached)
