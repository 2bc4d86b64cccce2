"""What a receiver keeps from refit to refit: what the engine has, connections, and memory."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from rl_core.errors import RefitAborted, RefitProtocolError
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.data.plan import DataMode
from rl_core.weights.job import Endpoint, J
from rl_core.weights.transports.base import CPU, NoLane

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Mapping

    import torch

    from rl_core.interfaces.weights import WeightSink
    from rl_core.weights.data.plan import TransferPlan
    from rl_core.weights.engine_lock import Lock
    from rl_core.weights.job import Runtime
    from rl_core.weights.protocol.handshake import SenderInfo
    from rl_core.weights.receiving.loading import ReceiverBuckets
    from rl_core.weights.transports.base import Lane, ReceiverEnd


class ReceiverBase(Endpoint[J]):
    """What a refit uses of its receiver; one refit at a time does.

    Args:
        name: How errors on the other side call this one.
        new_sink: Makes what is written to; called once for each refit.
        lock: Held while the engine generates, and by a refit while it writes.
        on_commit: Called with the new version before it serves; drops caches.
        runtime: What its refits take from outside, such as their clock.

    Attributes:
        id: Tells this receiver from all others.
        version: Last committed version, 0 at first.
        origin: Identifies the trainer of that version; 0 at first.
        torn: True while the weights are neither old nor new.
        outside_changes: How often something besides refits changed the weights. A refit in which
            that happens cannot commit, and takes nothing of it back.
        known: Digests, by name, of the tensors that the engine is known to have.
        device: Where the engine's tensors were when it was prepared.
        second_copy: Memory of staged refits, kept between them.
        ends: By transport, where its sender is and this side's end.
        buckets: Those of the last two kinds of refit.
    """

    def __init__(
        self,
        name: str,
        new_sink: Callable[[], WeightSink],
        lock: Lock,
        on_commit: Callable[[int], None] | None,
        runtime: Runtime | None,
    ) -> None:
        super().__init__(name, runtime)
        self.id = secrets.token_hex(16)
        self.new_sink = new_sink
        self.lock = lock
        self.on_commit = on_commit
        self.version = self.origin = 0
        self.torn = False
        self.outside_changes = 0
        self.known: dict[str, bytes] = {}
        self.device = CPU
        self.second_copy: dict[str, torch.Tensor] = {}
        self.ends: dict[str, tuple[Mapping[str, Any], ReceiverEnd]] = {}
        self.buckets: dict[object, ReceiverBuckets] = {}
        self._prepared: tuple[str, int, WeightSink] | None = None  # refit, changes, its sink
        self._expected: WeightManifest | None = None
        self._meetings: dict[ReceiverEnd, concurrent.futures.Future[None]] = {}
        self._lanes: dict[tuple[ReceiverEnd, DataMode], Lane] = {}

    # -- what the engine has ----------------------------------------------------------------------

    def forget(self) -> None:
        """The engine's weights were changed by something else: a delta must not rely on them."""
        self.outside_changes += 1
        self.known = {}

    def check_unchanged(self, since: int) -> None:
        """Raises unless refits alone have changed the weights.

        Args:
            since: What :attr:`outside_changes` was.

        Raises:
            RefitAborted: Something else has.
        """
        if self.outside_changes != since:
            raise RefitAborted(
                f"{self.name}: the engine's weights were dropped or changed by something else "
                "during the refit",
                fix="refit again; the engine must stay as it is while a refit is under way",
            )

    def publish(self, version: int, origin: int) -> None:
        """The weights are whole, and of this version of that trainer."""
        if self.on_commit is not None:
            self.torn = True  # until the caches of the old weights are dropped
            self.on_commit(version)
        self.version, self.origin = version, origin
        self.torn = False

    def sink_for(self, refit_id: str) -> WeightSink:
        """The sink that was compared with the trainer of a refit, or a new one."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[:2] == (refit_id, self.outside_changes):
            return prepared[2]
        return self.new_sink()

    def manifest_of(self, sink: WeightSink) -> WeightManifest:
        """The sink's manifest; the one of the last refit if nothing changed."""
        self._expected = WeightManifest.of(sink.specs(), self._expected)
        return self._expected

    def end(self, transport: str, trainer: SenderInfo) -> ReceiverEnd:
        """This side's end of a transport; it takes the place of one to another sender.

        Raises:
            LifecycleError: The trainer does not offer it.
        """
        address = trainer.address_of(transport, self.name)
        cached = self.ends.get(transport)
        if cached is not None and cached[0].items() <= address.items():
            self.ends[transport] = address, cached[1]  # it may have been opened with less
            return cached[1]
        return self._connect(transport, address, {})

    def _connect(
        self, transport: str, address: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ReceiverEnd:
        """A new end in the place of the one that there may be."""
        self.disconnect(transport)
        end = self.runtime.transport(transport).receiver(address, **options)
        self.ends[transport] = address, end
        return end

    def disconnect(self, transport: str) -> None:
        """Closes the end of a transport and its lanes."""
        if transport in self.ends:
            _, end = self.ends.pop(transport)
            self._meetings.pop(end, None)
            self._close_lanes([key for key in self._lanes if key[0] is end])
            end.close()

    def meeting(self, end: ReceiverEnd, deadline_s: float) -> concurrent.futures.Future[None]:
        """A future that is done when the sender is found; what failed before is tried again."""
        cached = self._meetings.get(end)
        if cached is None or (cached.done() and cached.exception() is not None):
            cached = self.runtime.spawn(self.name, lambda: end.rendezvous(deadline_s))
            self._meetings[end] = cached
        return cached

    def remove_leftovers(self, trainer: SenderInfo | None) -> None:
        """Removes what a trainer that was killed left behind on transports not used here."""
        for transport, address in trainer.addresses.items() if trainer else ():
            if transport not in self.ends or self.ends[transport][0] != address:
                self.runtime.transport(transport).remove_leftovers(address)

    # -- memory -----------------------------------------------------------------------------------

    def lane(
        self, end: ReceiverEnd, plan: TransferPlan, ref: Mapping[str, Any], device: torch.device
    ) -> Lane:
        """This side of the lane that a plan is for; attached once for as long as it stays the same.

        Raises:
            RefitProtocolError: It is not there, or too small.
        """
        if not plan.buckets:
            return NoLane()
        key = (end, plan.mode)
        if key in self._lanes and self._lanes[key].ref != ref:
            self._close_lanes([key])
        if key not in self._lanes:
            self._lanes[key] = end.attach(ref, self.id, device)
        lane = self._lanes[key]
        if lane.data.numel() < plan.lane_bytes:
            raise RefitProtocolError("the sender's memory is smaller than the plan needs")
        return lane

    def unmap_trainer_memory(self) -> None:
        """Closes lanes in the trainer's own memory, if it could not be freed otherwise."""
        direct = self._direct_lanes().items()
        self._close_lanes([key for key, lane in direct if lane.unmap_after_each_refit])

    def _direct_lanes(self) -> dict[tuple[ReceiverEnd, DataMode], Lane]:
        return {key: lane for key, lane in self._lanes.items() if key[1] is DataMode.DIRECT}

    def drop_broken_lanes(self) -> None:
        """After a failure: closes lanes that it may have broken."""
        lanes = self._lanes.items()
        self._close_lanes([key for key, lane in lanes if not lane.reusable_after_failure])

    def _close_lanes(self, keys: list[tuple[ReceiverEnd, DataMode]]) -> None:
        """Closes this side of lanes, and drops all views of them."""
        if keys:
            for buckets in self.buckets.values():
                buckets.detach()
            self.buckets.clear()
        for key in keys:
            self._lanes.pop(key).close()
