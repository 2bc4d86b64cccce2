"""What a sender keeps from refit to refit: connections, memory, and the last layouts of it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from rl_core.refit._layout import Layout, keep_two
from rl_core.refit._packing import Arena
from rl_core.refit.manifest import WeightManifest
from rl_core.refit.plan import SLOTS, TransferPlan, make_plan
from rl_core.refit.transports.base import NoLane

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from rl_core.interfaces.weights import WeightSource
    from rl_core.refit._digests import DigestTable
    from rl_core.refit._job import Runtime
    from rl_core.refit.hashing import BlockHash
    from rl_core.refit.transports.base import Lane, SenderEnd

__all__ = ["SenderState"]


class SenderState:
    """Made once for a trainer's whole life, and used by one refit at a time.

    Args:
        runtime: Where its transports come from.

    Attributes:
        token: The secret that messages are authenticated with.
        version: Last committed version, 0 at first.
        committed: Digests of what was committed last, if it was hashed.
        committed_hash: What they were made with.
        arena: Knows the tensors that engines read where they are.
        ends: The sender's end of each transport that was used.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.token = secrets.token_hex(32)
        self.version = 0
        self.committed: DigestTable | None = None
        self.committed_hash: BlockHash | None = None
        self.arena = Arena()
        self.ends: dict[str, SenderEnd] = {}
        self._manifest: WeightManifest | None = None
        self._wire: WeightManifest | None = None
        self._lanes: dict[tuple[SenderEnd, bool], Lane] = {}
        self._layouts: dict[object, Layout] = {}
        self._no_lane = NoLane()

    def manifest_of(self, source: WeightSource) -> WeightManifest:
        """The source's manifest; the one that is known if nothing changed."""
        self._manifest = WeightManifest.of(source.specs(), self._manifest)
        return self._manifest

    def wire_of(self, manifest: WeightManifest, dtypes: Mapping[str, str]) -> WeightManifest:
        """The manifest in the dtypes that travel; the one that is known if nothing changed."""
        self._wire = manifest.cast(dtypes, self._wire)
        return self._wire

    def end(self, transport: str) -> SenderEnd:
        """This side's end of a transport."""
        if transport not in self.ends:
            self.ends[transport] = self._runtime.transport(transport).sender()
        return self.ends[transport]

    def reopen(self, transport: str, options: Mapping[str, Any]) -> SenderEnd:
        """A new end in the place of the one that there may be."""
        if (known := self.ends.pop(transport, None)) is not None:
            self._close_lanes([key for key in self._lanes if key[0] is known])
            known.close()
        self.ends[transport] = self._runtime.transport(transport).sender(**options)
        return self.ends[transport]

    def layout(
        self,
        end: SenderEnd,
        wire: WeightManifest,
        bucket_bytes: int,
        *,
        direct: bool,
        skip: bytes,
        block_hash: BlockHash,
        device: torch.device,
        receivers: Sequence[str],
    ) -> Layout:
        """A plan and memory for it: what the last refits used, where that fits.

        Raises:
            RefitError: There is not enough memory.
        """
        key = (end, wire.digest, bucket_bytes, direct, skip, block_hash)
        known = self._layouts.get(key)
        plan = known.plan if known is not None else None
        if plan is None:
            block = block_hash.block
            plan = make_plan(wire, bucket_bytes, direct=direct, skip=skip, block=block)
        lane = self._lane(end, plan, device, receivers, bucket_bytes)
        if known is None or known.lane is not lane:
            known = Layout(plan, lane, block_hash)
        return keep_two(self._layouts, key, known)

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
            return self._no_lane
        key = (end, plan.direct)
        most = plan.lane_bytes if plan.direct else max(plan.lane_bytes, SLOTS * bucket_bytes)
        lane = self._lanes.get(key)
        if lane is not None:
            fits = plan.lane_bytes <= lane.data.numel() <= most and lane.data.device == device
            if fits and lane.serves(receivers):
                return lane
            self._close_lanes([key])
        self._lanes[key] = end.lane(plan.lane_bytes, device, receivers, direct=plan.direct)
        return self._lanes[key]

    def drop_lanes_after_failure(self) -> None:
        """Closes lanes that a receiver may still read which did not hear of the failure.

        What is written next goes elsewhere. The trainer's own memory (``direct``) stays: it cannot
        be taken from under the weights, and what is read there late is verified like all else.
        """
        lanes = self._lanes.items()
        self._close_lanes([k for k, lane in lanes if not (k[1] and lane.reusable_after_failure)])

    def release_weights(self) -> None:
        """Closes the memory that engines read the trainer's tensors in."""
        self.arena = Arena()
        self._close_lanes([key for key in self._lanes if key[1]])

    def close(self) -> None:
        """Closes everything. Idempotent."""
        self.release_weights()
        self._close_lanes(list(self._lanes))
        for end in self.ends.values():
            end.close()
        self.ends.clear()

    def _close_lanes(self, keys: list[tuple[SenderEnd, bool]]) -> None:
        for key in keys:
            self._lanes.pop(key).close()
        if keys:
            self._layouts.clear()  # views would keep the memory
