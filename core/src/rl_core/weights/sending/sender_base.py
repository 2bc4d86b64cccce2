"""What a sender keeps from refit to refit: connections, memory."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from rl_core.errors import RefitError
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.data.plan import SLOTS, DataMode, TransferPlan, make_plan
from rl_core.weights.job import Endpoint, J, keep_two
from rl_core.weights.protocol.frames import origin_of
from rl_core.weights.sending.packing import SenderBuckets
from rl_core.weights.sending.shared_tensors import SharedTensors
from rl_core.weights.transports.base import NoLane

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from rl_core.interfaces.weights import WeightSource
    from rl_core.weights.data.digests import BlockHash, DigestTable
    from rl_core.weights.job import Runtime
    from rl_core.weights.transports.base import Lane, SenderEnd

_NO_LANE = NoLane()


class SenderBase(Endpoint[J]):
    """What a refit uses of its sender; one refit at a time does.

    Attributes:
        token: The secret that messages are authenticated with.
        origin: Identifies this trainer, for as long as this object lives.
        version: Last committed version, 0 at first.
        committed: Digests of what was committed last, if it was hashed.
        committed_hash: What they were made with.
        moved: The tensors that engines read where they are.
        ends: The sender's end of each transport that was used.
    """

    def __init__(self, name: str, runtime: Runtime | None) -> None:
        super().__init__(name, runtime)
        self.token = secrets.token_hex(32)
        self.origin = origin_of(self.token)
        self.version = 0
        self.committed: DigestTable | None = None
        self.committed_hash: BlockHash | None = None
        self.moved = SharedTensors()
        self.ends: dict[str, SenderEnd] = {}
        self._manifest: WeightManifest | None = None
        self._wire: WeightManifest | None = None
        self._lanes: dict[tuple[SenderEnd, DataMode], Lane] = {}
        self._buckets: dict[object, SenderBuckets] = {}

    def manifest_of(self, source: WeightSource) -> WeightManifest:
        """The source's manifest; the one of the last refit if nothing changed."""
        self._manifest = WeightManifest.of(source.specs(), self._manifest)
        return self._manifest

    def wire_of(self, manifest: WeightManifest, dtypes: Mapping[str, str]) -> WeightManifest:
        """The manifest in the dtypes that travel; the one of the last refit if nothing changed."""
        self._wire = manifest.cast(dtypes, self._wire)
        return self._wire

    def end(self, transport: str) -> SenderEnd:
        """This side's end of a transport.

        Raises:
            RefitError: It cannot be made, or the process has no room for connections. The end is
                then closed, so that none comes, unless a refit uses it.
        """
        if (cached := self.ends.get(transport)) is not None:
            try:
                cached.check_room()
            except RefitError:
                with self.between_refits() as idle:
                    if idle:
                        self.close_end(transport)
                raise
        else:
            self.ends[transport] = self.runtime.transport(transport).sender()
        return self.ends[transport]

    def close_end(self, transport: str) -> None:
        """Closes the end of a transport, if there is one, and its lanes."""
        if (cached := self.ends.pop(transport, None)) is not None:
            self._close_lanes([key for key in self._lanes if key[0] is cached])
            cached.close()

    def buckets(
        self,
        end: SenderEnd,
        wire: WeightManifest,
        bucket_bytes: int,
        mode: DataMode,
        *,
        skip: bytes,
        block_hash: BlockHash,
        device: torch.device,
        receivers: Sequence[str],
    ) -> SenderBuckets:
        """The buckets of a refit, and memory for them: those of the last refits, where they fit.

        Raises:
            RefitError: There is not enough memory.
        """
        key = (end, wire.digest, bucket_bytes, mode, skip, block_hash)
        cached = self._buckets.get(key)
        plan = cached.plan if cached is not None else None
        if plan is None:
            plan = make_plan(wire, bucket_bytes, mode, skip=skip, block=block_hash.block)
        lane = self._lane(end, plan, device, receivers, bucket_bytes)
        if cached is None or cached.lane is not lane:
            cached = SenderBuckets(plan, lane, block_hash)
        return keep_two(self._buckets, key, cached)

    def _lane(
        self,
        end: SenderEnd,
        plan: TransferPlan,
        device: torch.device,
        receivers: Sequence[str],
        bucket_bytes: int,
    ) -> Lane:
        """The lane at hand if it fits, so that memory is touched once."""
        if not plan.buckets:
            return _NO_LANE
        key, direct = (end, plan.mode), plan.mode is DataMode.DIRECT
        most = plan.lane_bytes if direct else max(plan.lane_bytes, SLOTS * bucket_bytes)
        lane = self._lanes.get(key)
        if lane is not None:
            fits = plan.lane_bytes <= lane.data.numel() <= most and lane.data.device == device
            if fits and lane.serves(receivers):
                return lane
            self._close_lanes([key])
        self._lanes[key] = end.lane(plan.lane_bytes, device, receivers, direct=direct)
        return self._lanes[key]

    def drop_lanes_after_failure(self) -> None:
        """Closes lanes that a receiver may still read which did not hear of the failure.

        What is written next goes elsewhere. The trainer's own memory (``direct``) stays: it cannot
        be taken from under the weights, and what is read there late is verified like all else.
        """
        self._close_lanes(
            [
                (end, mode)
                for (end, mode), lane in self._lanes.items()
                if not (mode is DataMode.DIRECT and lane.reusable_after_failure)
            ]
        )

    def drop_moved_tensors(self) -> None:
        """As :meth:`release_weights`, for the refit that is running."""
        self.moved = SharedTensors()
        self._close_lanes([key for key in self._lanes if key[1] is DataMode.DIRECT])

    def _close_lanes(self, keys: list[tuple[SenderEnd, DataMode]]) -> None:
        for key in keys:
            self._lanes.pop(key).close()
        if keys:
            self._buckets.clear()  # views would keep the memory
