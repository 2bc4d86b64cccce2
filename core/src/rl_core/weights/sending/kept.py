"""What a sender keeps from refit to refit: what it has committed, and memory for the next one."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, TypeVar

from rl_core.weights.connections import Connections
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.data.plan import DataMode
from rl_core.weights.protocol.frames import origin_of
from rl_core.weights.sending.shared_tensors import SharedTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from rl_core.interfaces.weights import WeightSource
    from rl_core.weights.connections import Connection
    from rl_core.weights.data.digests import BlockHash, DigestTable
    from rl_core.weights.data.parts import Partition
    from rl_core.weights.sending.packing import SenderBuckets
    from rl_core.weights.transports.base import Lane

__all__ = ["Kept"]

T = TypeVar("T")


class Kept:
    """Of one rank of a trainer.

    Attributes:
        token: The secret that messages are authenticated with.
        origin: Identifies this trainer.
        version: Last committed version, 0 at first.
        committed: Digests of what was committed last, if it was hashed.
        committed_hash: What they were made with.
        committed_parts: What they are of.
        moved: The tensors that engines read where they are.
        connections: Those of each transport that was used: of a RankEnd, on rank 0 a SenderEnd.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(32)
        self.origin = origin_of(self.token)
        self.version = 0
        self.committed: DigestTable | None = None
        self.committed_hash: BlockHash | None = None
        self.committed_parts: Partition | None = None
        self.moved = SharedTensors()
        self.connections: Connections[Any, SenderBuckets] = Connections()
        self._manifest: WeightManifest | None = None
        self._made: dict[Any, tuple[object, Any]] = {}

    def manifest_of(self, source: WeightSource) -> WeightManifest:
        """The source's manifest; the one of the last refit if nothing changed."""
        self._manifest = WeightManifest.of(source.specs(), self._manifest)
        return self._manifest

    def wire_of(self, manifest: WeightManifest, dtypes: Mapping[str, str]) -> WeightManifest:
        """The manifest in the dtypes that travel."""
        return self.same("wire", (manifest, dtypes), lambda: manifest.cast(dtypes))

    def same(self, what: Any, key: object, make: Callable[[], T]) -> T:
        """What the last refit made of this, if it made it of the same plain data; or makes it."""
        if what not in self._made or self._made[what][0] != key:
            self._made[what] = key, make()
        made: T = self._made[what][1]
        return made

    def lane(
        self,
        connection: Connection[Any],
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
        made: Lane = connection.end.lane(sizes.start, device, receivers, direct=direct)
        connection.lanes[mode, 0] = made
        return made

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
