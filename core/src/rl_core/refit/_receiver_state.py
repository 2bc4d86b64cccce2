"""What a receiver keeps from refit to refit: what the engine has, connections, and memory."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import RefitAborted, RefitProtocolError
from rl_core.refit._handles import HandleReceiver
from rl_core.refit.manifest import WeightManifest
from rl_core.refit.transports.base import CPU, NoLane

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Mapping

    from rl_core.interfaces.weights import WeightSink
    from rl_core.refit._introduction import Trainer
    from rl_core.refit._job import Runtime
    from rl_core.refit._loading import Route
    from rl_core.refit.plan import TransferPlan
    from rl_core.refit.transports.base import Lane, ReceiverEnd
    from rl_core.refit.turns import Lock

__all__ = ["ReceiverState"]


class ReceiverState:
    """Made once for an engine's whole life, and used by one refit at a time.

    Args:
        name: How errors on the other side call this receiver.
        new_sink: Makes a sink; called once for each refit.
        lock: Held while the engine generates, and by a refit while it writes.
        on_commit: Called with the new version before it serves; drops caches.
        runtime: Where its transports come from.

    Attributes:
        id: Tells this receiver from all others.
        version: Last committed version, 0 at first.
        torn: True while the weights are neither old nor new.
        epoch: Counts what happened to the weights besides refits; a refit in which it moves cannot
            commit, and takes nothing of it back.
        known: Digests, by name, of the tensors that the engine is known to have.
        device: Where the engine's tensors were when it was prepared.
        handles: Takes refits by handles.
        second_copy: Memory of staged refits, kept between them.
        ends: By transport, where its sender is and this side's end.
        routes: Ways from a lane to the engine's tensors, of the last refits.
    """

    def __init__(
        self,
        name: str,
        new_sink: Callable[[], WeightSink],
        lock: Lock,
        on_commit: Callable[[int], None] | None,
        runtime: Runtime,
    ) -> None:
        self._runtime = runtime
        self.id = secrets.token_hex(16)
        self.name = name
        self.new_sink = new_sink
        self.lock = lock
        self.on_commit = on_commit
        self.version = 0
        self.torn = False
        self.epoch = 0
        self.known: dict[str, bytes] = {}
        self.device = CPU
        self.handles = HandleReceiver()
        self.second_copy: dict[str, torch.Tensor] = {}
        self.ends: dict[str, tuple[Mapping[str, Any], ReceiverEnd]] = {}
        self._prepared: tuple[str, int, WeightSink] | None = None  # refit, epoch, what it was told
        self._expected: WeightManifest | None = None
        self._meetings: dict[ReceiverEnd, concurrent.futures.Future[None]] = {}
        self._lanes: dict[tuple[ReceiverEnd, bool], Lane] = {}
        self.routes: dict[object, Route] = {}

    # -- what the engine has ----------------------------------------------------------------------

    def forget(self) -> None:
        """The engine's weights were changed by something else: a delta must not rely on them."""
        self.epoch += 1
        self.known = {}

    def check_epoch(self, epoch: int) -> None:
        """Raises unless nothing but the refit that began at an epoch has changed the weights.

        Raises:
            RefitAborted: Something has.
        """
        if self.epoch != epoch:
            raise RefitAborted(
                f"{self.name}: the engine's weights were dropped or changed by something else "
                "during the refit",
                fix="refit again; the engine must stay as it is while a refit is under way",
            )

    def publish(self, version: int) -> None:
        """The weights are whole, and of this version."""
        if self.on_commit is not None:
            self.torn = True  # until the caches of the old weights are gone
            self.on_commit(version)
        self.version = version
        self.torn = False

    def keep_sink(self, refit_id: str, epoch: int, sink: WeightSink) -> None:
        """Keeps a sink, compared in this epoch, for the refit of this id."""
        self.device = torch.device(sink.device)
        self._prepared = refit_id, epoch, sink

    def sink_for(self, refit_id: str) -> WeightSink:
        """The sink that was compared with the trainer of a refit, or a new one."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[:2] == (refit_id, self.epoch):
            return prepared[2]
        return self.new_sink()

    def manifest_of(self, sink: WeightSink) -> WeightManifest:
        """The sink's manifest; the one that is known if nothing changed."""
        self._expected = WeightManifest.of(sink.specs(), self._expected)
        return self._expected

    # -- connections ------------------------------------------------------------------------------

    def end(self, transport: str, trainer: Trainer) -> ReceiverEnd:
        """This side's end of a transport; it takes the place of one to another sender.

        Raises:
            LifecycleError: The trainer does not offer it.
        """
        address = trainer.address_of(transport, self.name)
        known = self.ends.get(transport)
        if known is not None and known[0].items() <= address.items():
            self.ends[transport] = address, known[1]  # it may have been opened with less
            return known[1]
        return self.connect(transport, address, {})

    def connect(
        self, transport: str, address: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ReceiverEnd:
        """A new end in the place of the one that there may be."""
        self.disconnect(transport)
        end = self._runtime.transport(transport).receiver(address, **options)
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
        known = self._meetings.get(end)
        if known is None or (known.done() and known.exception() is not None):
            known = self._runtime.spawn(self.name, lambda: end.rendezvous(deadline_s))
            self._meetings[end] = known
        return known

    def remove_stale_channels(self, trainer: Trainer | None) -> None:
        """Removes what a trainer that was killed left behind on transports not used here."""
        for transport, address in trainer.addresses.items() if trainer else ():
            if transport not in self.ends or self.ends[transport][0] != address:
                self._runtime.transport(transport).receiver(address).close()

    # -- memory -----------------------------------------------------------------------------------

    def attach(
        self, end: ReceiverEnd, direct: bool, ref: Mapping[str, Any], device: torch.device
    ) -> Lane:
        """This side of the sender's lane, attached once for as long as it stays the same."""
        known = self._lanes.get((end, direct))
        if known is not None and known.ref == ref:
            return known
        if known is not None:
            self._close_lanes([(end, direct)])
        lane = self._lanes[end, direct] = end.attach(ref, self.id, device)
        return lane

    def lane(
        self, end: ReceiverEnd, plan: TransferPlan, ref: Mapping[str, Any], device: torch.device
    ) -> Lane:
        """The lane that a plan is for.

        Raises:
            RefitProtocolError: It is not there, or too small.
        """
        if not plan.buckets:
            return NoLane()
        lane = self.attach(end, plan.direct, ref, device)
        if lane.data.numel() < plan.lane_bytes:
            raise RefitProtocolError("the sender's memory is smaller than the plan needs")
        return lane

    def release_weights(self) -> None:
        """Drops what refits keep of the engine's tensors; a refit that is under way ends.

        That refit's thread goes on with the dict that it has, and what it keeps is dropped with it.
        """
        self.epoch += 1
        self._prepared = None
        self.routes = {}
        self.second_copy = {}

    def unmap_trainer_memory(self) -> None:
        """Closes lanes in the trainer's own memory, if it could not be freed otherwise."""
        self._close_lanes(
            [key for key, lane in self._lanes.items() if key[1] and lane.unmap_after_each_refit]
        )

    def unmap_abandoned_memory(self) -> bool:
        """Closes lanes in the memory of a trainer that has ended; whether there was one."""
        left = [key for key, lane in self._lanes.items() if key[1] and lane.sender_gone()]
        self._close_lanes(left)
        return bool(left)

    def drop_broken_lanes(self) -> None:
        """After a failure: closes lanes that it may have broken."""
        lanes = self._lanes.items()
        self._close_lanes([key for key, lane in lanes if not lane.reusable_after_failure])

    def close(self, trainer: Trainer | None) -> None:
        """Closes everything. Idempotent."""
        self.release_weights()
        self.remove_stale_channels(trainer)
        for transport in list(self.ends):
            self.disconnect(transport)

    def _close_lanes(self, keys: list[tuple[ReceiverEnd, bool]]) -> None:
        """Closes this side of lanes, and drops all views of them."""
        if keys:
            for route in self.routes.values():
                route.detach()
            self.routes.clear()
        for key in keys:
            self._lanes.pop(key).close()
