"""The engine's endpoint: takes refits, and knows whether the weights are whole."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import LifecycleError, RefitAborted, RefitProtocolError, WeightsTornError
from rl_core.futures import spawn
from rl_core.refit._handles import HandleReceiver, HandleSets
from rl_core.refit._introduction import frame_of, trainer_of
from rl_core.refit._job import Endpoint
from rl_core.refit._receive_job import ReceiveJob
from rl_core.refit.frames import read_handles
from rl_core.refit.hashing import BlockHash
from rl_core.refit.manifest import WeightManifest, compare
from rl_core.refit.options import DEFAULT_DEADLINE_S, check_deadline
from rl_core.refit.plan import DataMode
from rl_core.refit.transports import find_transport
from rl_core.refit.transports.base import CPU, NoLane
from rl_core.refit.turns import exclusively

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Mapping

    from rl_core.interfaces.weights import WeightSink
    from rl_core.refit._introduction import Trainer
    from rl_core.refit._loading import ReceiverBuckets
    from rl_core.refit.plan import TransferPlan
    from rl_core.refit.transports.base import Lane, ReceiverEnd
    from rl_core.refit.turns import Lock

__all__ = ["RefitReceiver"]

#: Seconds between looks at whether the trainer whose memory is mapped still has it.
_LOOK_S = 5.0


class RefitReceiver(Endpoint[ReceiveJob]):
    """Takes weights into an engine; one for the engine's whole life.

    Args:
        sink: Makes what is written to; called once for each refit, and for a description that no
            refit follows.
        name: How errors on the other side call this one.
        lock: Held while the engine generates, and by a refit while it writes.
        on_commit: Called with the new version before it serves; drops caches.

    Attributes:
        id: Tells this receiver from all others.
        version: Last committed version, 0 at first.
        torn: True while the weights are neither old nor new.
        outside_changes: How often something besides refits changed the weights. A refit in which
            that happens cannot commit, and takes nothing of it back.
        known: Digests, by name, of the tensors that the engine is known to have.
        device: Where the engine's tensors were when it was prepared.
        handle_sets: Refits by handles.
        second_copy: Memory of staged refits, kept between them.
        ends: By transport, where its sender is and this side's end.
        buckets: Those of the last two kinds of refit.
    """

    def __init__(
        self,
        sink: Callable[[], WeightSink],
        *,
        name: str,
        lock: Lock,
        on_commit: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(name)
        self.id = secrets.token_hex(16)
        self.new_sink = sink
        self.lock = lock
        self.on_commit = on_commit
        self.version = 0
        self.torn = False
        self.outside_changes = 0
        self.known: dict[str, bytes] = {}
        self.device = CPU
        self.handle_sets = HandleSets()
        self.second_copy: dict[str, torch.Tensor] = {}
        self.ends: dict[str, tuple[Mapping[str, Any], ReceiverEnd]] = {}
        self.buckets: dict[object, ReceiverBuckets] = {}
        self._trainer: Trainer | None = None
        self._looked = 0.0
        self._earlier: ReceiveJob | None = None
        self._prepared: tuple[str, int, WeightSink] | None = None  # refit, changes, its sink
        self._expected: WeightManifest | None = None
        self._meetings: dict[ReceiverEnd, concurrent.futures.Future[None]] = {}
        self._lanes: dict[tuple[ReceiverEnd, DataMode], Lane] = {}

    # -- what the engine has ----------------------------------------------------------------------

    def check(self) -> None:
        """Raises unless the weights are whole.

        Raises:
            WeightsTornError: A refit failed, or a refit by handles is not complete.
        """
        with self.between_refits() as idle:
            if idle and time.monotonic() >= self._looked + _LOOK_S:
                self._looked = time.monotonic()
                self._unmap_abandoned_memory()
        if self.torn:
            raise WeightsTornError(
                f"{self.name}: the weights are partly of version {self.version} and partly newer, "
                "or were dropped",
                fix="refit again; the engine needs no restart",
                version=self.version,
            )

    def forget(self) -> None:
        """The engine's weights were changed by something else: a delta must not rely on them."""
        self.outside_changes += 1
        self.known = {}

    def dropped(self) -> None:
        """The engine's weights are gone: it is torn until a full refit commits."""
        self.torn = True
        self.forget()

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

    def publish(self, version: int) -> None:
        """The weights are whole, and of this version."""
        if self.on_commit is not None:
            self.torn = True  # until the caches of the old weights are gone
            self.on_commit(version)
        self.version = version
        self.torn = False

    # -- refits -----------------------------------------------------------------------------------

    def prepare(self, info: dict[str, Any]) -> None:
        """Takes what the sender's ``prepare`` returned.

        Raises:
            RefitProtocolError: It is not such a dict, or of another protocol version.
            ManifestMismatchError: The tensors are not those of the engine; nothing was touched.
        """
        self.check_open()
        changes = self.outside_changes
        sink = self.new_sink()
        match = partial(compare, expected=self.manifest_of(sink), casts=sink.casts)
        trainer = trainer_of(info, match, self._trainer)
        self.device = torch.device(sink.device)
        self._prepared = str(info.get("refit_id")), changes, sink
        for job in self.waiting():
            if job.trainer != trainer:
                job.supersede("the engine was prepared for other tensors or another trainer")
        before, self._trainer = self._trainer, trainer
        if before is not None and before.token != trainer.token:
            # The earlier trainer may have died after its last refit, so that nobody cleaned up.
            self.remove_leftovers(before)
            with self.between_refits() as idle:  # what a running refit uses, the next replaces
                for transport, (address, _) in list(self.ends.items()):
                    if idle and address == before.channels.get(transport):
                        self.disconnect(transport)
        self._earlier = self._last_waiting()

    def open(
        self, transport: str, deadline_s: float, address: dict[str, Any], **options: Any
    ) -> concurrent.futures.Future[None]:
        """Goes to where a sender listens on a transport, anew if it did before.

        Returns:
            A future that is done when the sender was found.
        """
        self.check_open()
        for job in self.waiting():
            if job.transport == transport:
                job.supersede(f"the transport {transport} is opened anew")
        check_deadline(deadline_s)
        with exclusively(self.turn, deadline_s, f"{self.name}: a running refit"):
            end = self._connect(transport, address, options)
        return self.meeting(end, deadline_s)

    def receive(
        self,
        *,
        transport: str = "ipc",
        deadline_s: float = DEFAULT_DEADLINE_S,
        refit_id: str = "",
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts to take one refit from the sender that ``prepare`` was told of.

        Args:
            transport: Name of the transport that the sender uses.
            deadline_s: Seconds for the whole refit, the wait for the sender included.
            refit_id: What the sender was told, too; empty if it was told nothing.

        Returns:
            A future of a dict with ``version``, ``bytes``, ``seconds`` and ``name``.

        Raises:
            LifecycleError: ``prepare`` was not called, or the sender does not offer the transport.
        """
        trainer = self._known_trainer()
        check_deadline(deadline_s)
        try:
            trainer.channel(transport, self.name)
        except LifecycleError as error:
            if transport in self.ends:  # the sender may wait for us there
                self.ends[transport][1].refuse(str(error))
            raise
        job = ReceiveJob(self, transport, trainer, deadline_s, refit_id)
        if refit_id:
            for older in self.waiting():
                if not older.refit_id:  # those with one are told by the sender what became of it
                    older.supersede("a newer refit was asked for")
        else:
            # Calls without ids are matched as they come: one that was waiting may
            # take the refit that this one is meant for, and both then report it.
            earlier, self._earlier = self._earlier or self._last_waiting(), None
            if earlier is not None and earlier.trainer == trainer:
                job.earlier = earlier
        return self.start(job)

    # -- the older handle-based interface ---------------------------------------------------------

    def load_handles(self, handles: dict[str, Any]) -> bool:
        """Loads one group of tensors; the version moves with the call that completes the set.

        In between the engine does not generate: it is torn.

        Args:
            handles: What the sender's ``handles`` returned.

        Returns:
            True.

        Raises:
            RefitProtocolError: They are malformed or not from the sender that ``prepare`` knows.
            RefitCorrupted: The bytes are not those the sender packed.
        """
        trainer = self._known_trainer()
        message = read_handles(frame_of(handles), trainer.token)
        with (
            exclusively(self.turn, DEFAULT_DEADLINE_S, f"{self.name}: the refit before this one"),
            exclusively(self.lock, DEFAULT_DEADLINE_S, f"{self.name}: generation"),
        ):
            self.check_open()
            sets = self.handle_sets
            sets.admit(message, trainer.token, self.name)
            try:
                tear = partial(setattr, self, "torn", True)
                current = sets.current = sets.current or HandleReceiver(
                    self.new_sink(),
                    trainer,
                    message,
                    self.outside_changes,
                    known=self.known,
                    touch=tear,
                )
                end = self.end("ipc", trainer)
                lane = self._attach(end, DataMode.HANDLES, message.lane, CPU)
                block_hash = BlockHash.choose(CPU, private=end.private, token=trainer.token)
                complete = current.load(message, lane, block_hash)
                self.check_unchanged(current.epoch)
                if complete:
                    current.sink.finish(message.version)
                    self.publish(message.version)
                    sets.end()
                    self.give_up_handles()
            except BaseException:
                self.give_up_handles()
                raise
        return True

    def _last_waiting(self) -> ReceiveJob | None:
        return next((job for job in reversed(self.waiting()) if not job.cancelled), None)

    def _known_trainer(self) -> Trainer:
        self.check_open()
        if self._trainer is None:
            raise LifecycleError(
                f"{self.name}: no trainer is known",
                fix="call prepare_refit_info(policy.prepare_refit_info()) first",
            )
        return self._trainer

    # -- what is kept from refit to refit ----------------------------------------------------------

    def sink_for(self, refit_id: str) -> WeightSink:
        """The sink that was compared with the trainer of a refit, or a new one."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[:2] == (refit_id, self.outside_changes):
            return prepared[2]
        return self.new_sink()

    def manifest_of(self, sink: WeightSink) -> WeightManifest:
        """The sink's manifest; the one that is known if nothing changed."""
        self._expected = WeightManifest.of(sink.specs(), self._expected)
        return self._expected

    def end(self, transport: str, trainer: Trainer) -> ReceiverEnd:
        """This side's end of a transport; it takes the place of one to another sender.

        Raises:
            LifecycleError: The trainer does not offer it.
        """
        address = trainer.channel(transport, self.name)
        known = self.ends.get(transport)
        if known is not None and known[0].items() <= address.items():
            self.ends[transport] = address, known[1]  # it may have been opened with less
            return known[1]
        return self._connect(transport, address, {})

    def _connect(
        self, transport: str, address: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ReceiverEnd:
        """A new end in the place of the one that there may be."""
        self.disconnect(transport)
        end = find_transport(transport).receiver(address, **options)
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
            known = spawn(self.name, lambda: end.rendezvous(deadline_s))
            self._meetings[end] = known
        return known

    def remove_leftovers(self, trainer: Trainer | None) -> None:
        """Removes what a trainer that was killed left behind on transports not used here."""
        for transport, address in trainer.channels.items() if trainer else ():
            if transport not in self.ends or self.ends[transport][0] != address:
                find_transport(transport).remove_leftovers(address)

    def lane(
        self, end: ReceiverEnd, plan: TransferPlan, ref: Mapping[str, Any], device: torch.device
    ) -> Lane:
        """This side of the lane that a plan is for.

        Raises:
            RefitProtocolError: It is not there, or too small.
        """
        if not plan.buckets:
            return NoLane()
        lane = self._attach(end, plan.mode, ref, device)
        if lane.data.numel() < plan.lane_bytes:
            raise RefitProtocolError("the sender's memory is smaller than the plan needs")
        return lane

    def _attach(
        self, end: ReceiverEnd, mode: DataMode, ref: Mapping[str, Any], device: torch.device
    ) -> Lane:
        """This side of the sender's lane, attached once for as long as it stays the same."""
        known = self._lanes.get((end, mode))
        if known is not None and known.ref == ref:
            return known
        if known is not None:
            self._close_lanes([(end, mode)])
        lane = self._lanes[end, mode] = end.attach(ref, self.id, device)
        return lane

    def unmap_trainer_memory(self) -> None:
        """Closes lanes in the trainer's own memory, if it could not be freed otherwise."""
        direct = self._direct_lanes().items()
        self._close_lanes([key for key, lane in direct if lane.borrows])

    def _unmap_abandoned_memory(self) -> None:
        """Closes lanes in the memory of a trainer that has ended: they may be its whole model."""
        direct = self._direct_lanes().items()
        if left := [key for key, lane in direct if lane.abandoned()]:
            self._close_lanes(left)
            self.remove_leftovers(self._trainer)

    def _direct_lanes(self) -> dict[tuple[ReceiverEnd, DataMode], Lane]:
        return {key: lane for key, lane in self._lanes.items() if key[1] is DataMode.DIRECT}

    def drop_broken_lanes(self) -> None:
        """After a failure: closes lanes that it may have broken."""
        lanes = self._lanes.items()
        self._close_lanes([key for key, lane in lanes if not lane.outlives_failure])

    def release_weights(self) -> None:
        """Drops what refits keep of the engine's tensors, so that their memory can be freed.

        A refit that is under way ends: the tensors that it knows may not be the engine's any more.
        Its thread goes on with the dicts that it has, and what they hold is dropped with it.
        """
        self.outside_changes += 1
        self._prepared = None
        self.buckets = {}
        self.second_copy = {}
        with self.between_refits() as idle:
            if idle:
                self.give_up_handles()

    def give_up_handles(self) -> None:
        """Ends a set of handles that is not complete, and unmaps the trainer's memory for it."""
        try:
            self.handle_sets.give_up()
        finally:
            self._close_lanes([key for key in self._lanes if key[1] is DataMode.HANDLES])

    def release_resources(self) -> None:
        """Closes everything. Idempotent."""
        self.release_weights()
        try:
            self.give_up_handles()
        finally:
            self.remove_leftovers(self._trainer)
            for transport in list(self.ends):
                self.disconnect(transport)

    def _close_lanes(self, keys: list[tuple[ReceiverEnd, DataMode]]) -> None:
        """Closes this side of lanes, and drops all views of them."""
        if keys:
            for buckets in self.buckets.values():
                buckets.detach()
            self.buckets.clear()
        for key in keys:
            self._lanes.pop(key).close()
