"""What a sender keeps from refit to refit: what it has committed, and memory for the next one."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from rl_core.weights.connections import Connections, keep_two
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.data.plan import SLOTS, DataMode, make_plan
from rl_core.weights.protocol.frames import origin_of
from rl_core.weights.sending.packing import SenderBuckets
from rl_core.weights.sending.shared_tensors import SharedTensors
from rl_core.weights.transports.base import NoLane

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from rl_core.interfaces.weights import WeightSource
    from rl_core.weights.connections import Connection
    from rl_core.weights.data.digests import BlockHash, DigestTable
    from rl_core.weights.data.parts import LanePlaces, Partition
    from rl_core.weights.data.plan import TransferPlan
    from rl_core.weights.transports.base import Lane, SenderEnd

__all__ = ["Kept"]

_NO_LANE = NoLane()


class Kept:
    """Of one rank of a trainer.

    Attributes:
        token: The secret that messages are authenticated with.
        origin: Identifies this trainer.
        version: Last committed version, 0 at first.
        committed: Digests of what was committed last, if it was hashed.
        committed_hash: What they were made with.
        committed_parts: What they are of.
        parts: Those of the last refit.
        moved: The tensors that engines read where they are.
        connections: Those of each transport that was used.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(32)
        self.origin = origin_of(self.token)
        self.version = 0
        self.committed: DigestTable | None = None
        self.committed_hash: BlockHash | None = None
        self.committed_parts: Partition | None = None
        self.parts: Partition | None = None
        self.moved = SharedTensors()
        self.connections: Connections[SenderEnd, SenderBuckets] = Connections()
        self._manifest: WeightManifest | None = None
        self._wire: WeightManifest | None = None
        self._plans: dict[int, tuple[object, TransferPlan]] = {}

    def manifest_of(self, source: WeightSource) -> WeightManifest:
        """The source's manifest; the one of the last refit if nothing changed."""
        self._manifest = WeightManifest.of(source.specs(), self._manifest)
        return self._manifest

    def wire_of(self, manifest: WeightManifest, dtypes: Mapping[str, str]) -> WeightManifest:
        """The manifest in the dtypes that travel; the one of the last refit if nothing changed."""
        self._wire = manifest.cast(dtypes, self._wire)
        return self._wire

    def buckets(
        self,
        connection: Connection[SenderEnd],
        parts: Partition,
        bucket_bytes: int,
        mode: DataMode,
        *,
        skip: bytes,
        block_hash: BlockHash,
        device: torch.device,
        places: LanePlaces,
        receivers: Sequence[str],
    ) -> SenderBuckets:
        """The buckets of a refit, and memory for them: those of the last refits, where they fit."""
        kept = self.connections.buckets
        key = (connection, parts.manifest.digest, bucket_bytes, mode, skip, block_hash, places)
        cached = kept.get(key)
        plan = cached.plan if cached is not None else None
        if plan is None:
            size = block_hash.block
            plan = make_plan(parts, bucket_bytes, mode, skip=skip, block=size, places=places)
        lane = self.moved.lane if plan.buckets else _NO_LANE
        if plan.buckets and mode is DataMode.PACKED:
            sizes = range(plan.lane_bytes, 1 + max(plan.lane_bytes, SLOTS * bucket_bytes))
            lane = self.lane(connection, mode, sizes, device, receivers)
        if cached is None or cached.lane is not lane:
            cached = SenderBuckets(plan, lane, block_hash)
        return keep_two(kept, key, cached)

    def plan_of(
        self,
        rank: int,
        parts: Partition,
        bucket_bytes: int,
        mode: DataMode,
        skip: bytes,
        block: int,
        places: LanePlaces,
    ) -> TransferPlan:
        """What comes from another rank; the plan of the last refit, if it fits."""
        key = (parts.manifest.digest, bucket_bytes, mode, skip, block, places)
        if self._plans.get(rank, (None,))[0] != key:
            plan = make_plan(parts, bucket_bytes, mode, skip=skip, block=block, places=places)
            self._plans[rank] = key, plan
        return self._plans[rank][1]

    def lane(
        self,
        connection: Connection[SenderEnd],
        mode: DataMode,
        sizes: range,
        device: torch.device,
        receivers: Sequence[str],
    ) -> Lane:
        """The lane at hand if it has one of these sizes, so that memory is touched once."""
        lane = connection.lanes.get((mode, 0))
        if lane is not None:
            fits = lane.data.numel() in sizes and lane.data.device == device
            if fits and lane.serves(receivers):
                return lane
            self.connections.close_lanes(lambda _, other: other is lane)
        direct = mode is DataMode.DIRECT
        lane = connection.end.lane(sizes.start, device, receivers, direct=direct)
        connection.lanes[mode, 0] = lane
        return lane

    def drop_lanes_after_failure(self) -> None:
        """Closes lanes that a receiver may still read which did not hear of the failure.

        What is written next goes elsewhere. The trainer's own memory (``direct``) stays: it cannot
        be taken from under the weights, and what is read there late is verified like all else.
        """
        self.connections.close_lanes(
            lambda mode, lane: mode is not DataMode.DIRECT or not lane.reusable_after_failure
        )

    def drop_moved_tensors(self) -> None:
        """Closes the memory that engines read the trainer's tensors in."""
        self.moved = SharedTensors()
        self.connections.close_lanes(lambda mode, _: mode is DataMode.DIRECT)
