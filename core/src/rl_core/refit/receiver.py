"""The engine's endpoint: takes refits, and knows whether the weights are whole."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import LifecycleError, RefitAborted, RefitProtocolError, WeightsTornError
from rl_core.futures import spawn
from rl_core.refit._handles import HandleSets, Taking
from rl_core.refit._introduction import frame_of, trainer_of
from rl_core.refit._job import Endpoint, exclusively
from rl_core.refit._loading import Route
from rl_core.refit._receive_job import Receiving
from rl_core.refit.frames import read_handles
from rl_core.refit.hashing import BlockHash
from rl_core.refit.manifest import WeightManifest, compare
from rl_core.refit.options import DEFAULT_DEADLINE_S, check_deadline
from rl_core.refit.plan import Planner
from rl_core.refit.transports import find_transport
from rl_core.refit.transports.base import CPU, NoLane

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Mapping

    from rl_core.interfaces.weights import WeightSink
    from rl_core.refit._introduction import Trainer
    from rl_core.refit.messages import Handles
    from rl_core.refit.plan import TransferPlan
    from rl_core.refit.transports.base import Lane, ReceiverEnd
    from rl_core.refit.turns import Lock

__all__ = ["RefitReceiver"]

#: Seconds between looks at whether the trainer whose memory is mapped still has it.
_LOOK_S = 5.0


class RefitReceiver(Endpoint["Receiving"]):
    """Takes weights into an engine; one for the engine's whole life.

    Args:
        sink: Where to write; called once for each refit, and for a description that none follows.
        name: How errors on the other side call this one.
        lock: Held while the engine generates, and by a refit while it writes.
        on_commit: Called with the new version before it serves; drops caches.

    Attributes:
        torn: True while the weights are neither old nor new.
        epoch: Counts what happened to the weights besides refits; a refit in which it moves cannot
            commit, and takes nothing of it back.
        known: Digests, by name, of the tensors that the engine is known to have.
        id: Tells this receiver from all others.
        planner: Keeps the last plans.
        device: Where the engine's tensors were when it was prepared.
        sets: Refits by handles.
        second_copy: Memory of staged refits, kept between them.
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
        self.torn = False
        self.epoch = 0
        self.known: dict[str, bytes] = {}
        self.id = secrets.token_hex(16)
        self.planner = Planner()
        self.second_copy: dict[str, torch.Tensor] = {}
        self.device = CPU
        self.lock = lock
        self.new_sink = sink
        self._on_commit = on_commit
        self._trainer: Trainer | None = None
        self._expected: WeightManifest | None = None
        self._prepared: tuple[str, int, WeightSink] | None = None  # refit, epoch, what it was told
        self._matched: tuple[WeightManifest | None, WeightManifest | None] = (None, None)
        self._ends: dict[str, tuple[Mapping[str, Any], ReceiverEnd]] = {}
        self._lanes: dict[tuple[ReceiverEnd, bool], Lane] = {}
        self._meetings: dict[ReceiverEnd, concurrent.futures.Future[None]] = {}
        self._route: Route | None = None
        self._looked = 0.0
        self.sets = HandleSets()
        self._waited: Receiving | None = None

    def check(self) -> None:
        """Raises unless the weights are whole.

        Raises:
            WeightsTornError: A refit failed, or a refit by handles is not complete.
        """
        self._let_go_of_the_dead()
        if self.torn:
            raise WeightsTornError(
                f"{self.name}: the weights are partly of version {self.version} and partly newer, "
                "or were dropped",
                fix="refit again; the engine needs no restart",
                version=self.version,
            )

    def forget(self) -> None:
        """The engine's weights were changed by something else: a delta must not rely on them."""
        self.epoch += 1
        self.known = {}

    def dropped(self) -> None:
        """The engine's weights are gone: it is torn until a full refit commits."""
        self.torn = True
        self.forget()

    # -- refits -----------------------------------------------------------------------------------

    def prepare(self, info: dict[str, Any]) -> None:
        """Takes what the sender's ``prepare`` returned.

        Raises:
            RefitProtocolError: It is not such a dict, or of another protocol version.
            ManifestMismatchError: The tensors are not those of the engine; nothing was touched.
        """
        self.check_open()
        sink = self.new_sink()
        self.device = torch.device(sink.device)
        match = partial(compare, expected=self.manifest_of(sink), casts=sink.casts)
        trainer = trainer_of(info, match, self._trainer)
        self._prepared = str(info.get("refit_id")), self.epoch, sink
        for job in self.waiting():
            if job.trainer != trainer:
                job.supersede("the engine was prepared for other tensors or another trainer")
        before, self._trainer = self._trainer, trainer
        if before is not None and before.token != trainer.token:
            self._part_from(before)
        self._waited = self._last_waiting()

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
        meeting = spawn(f"{transport}-{self.name}", lambda: end.rendezvous(deadline_s))
        self._meetings[end] = meeting
        return meeting

    def meeting(self, end: ReceiverEnd, deadline_s: float) -> concurrent.futures.Future[None]:
        """A future that is done when the sender is found; what failed before is tried again."""
        known = self._meetings.get(end)
        if known is None or (known.done() and known.exception() is not None):
            known = spawn(self.name, lambda: end.rendezvous(deadline_s))
            self._meetings[end] = known
        return known

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
            if transport in self._ends:  # the sender may wait for us there
                self._ends[transport][1].refuse(str(error))
            raise
        job = Receiving(self, transport, trainer, deadline_s, refit_id)
        if refit_id:
            for older in self.waiting():
                if not older.refit_id:  # those with one are told by the sender what became of it
                    older.supersede("a newer refit was asked for")
        else:
            before, self._waited = self._waited or self._last_waiting(), None
            if before is not None and before.trainer == trainer:
                job.before = before
        return self.start(job)

    # -- the handles of old -----------------------------------------------------------------------

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
            self._take(trainer, message)
        return True

    def _take(self, trainer: Trainer, message: Handles) -> None:
        sets = self.sets
        sets.admit(message, trainer.token, self.name)
        try:
            tear = partial(setattr, self, "torn", True)
            taking = sets.current = sets.current or Taking(
                self.new_sink(), trainer, message, self.epoch, known=self.known, touch=tear
            )
            end = self.end("ipc")
            lane = self._attach(end, False, message.lane, CPU)
            block_hash = BlockHash.choose(CPU, private=end.private, token=trainer.token)
            complete = taking.load(message, lane, block_hash)
            self.check_epoch(taking.epoch)
            if complete:
                taking.sink.finish(message.version)
                self.publish(message.version)
                sets.end()
        except BaseException:
            sets.give_up()
            raise

    # -- what is held, and asked for by the refits ------------------------------------------------

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

    def sink_for(self, refit_id: str) -> WeightSink:
        """The sink that was compared with the trainer of a refit, or a new one."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[:2] == (refit_id, self.epoch):
            return prepared[2]
        return self.new_sink()

    def manifest_of(self, sink: WeightSink) -> WeightManifest:
        """The sink's manifest, the one that is known if nothing changed."""
        self._expected = WeightManifest.of(sink.specs(), self._expected)
        return self._expected

    def check_match(self, wire: WeightManifest, expected: WeightManifest) -> None:
        """Compares a trainer's manifest, in the dtypes that travel, with the engine's.

        Raises:
            ManifestMismatchError: They differ.
        """
        if self._matched[0] is not wire or self._matched[1] is not expected:
            compare(wire, expected)
            self._matched = (wire, expected)

    def lane(
        self, end: ReceiverEnd, plan: TransferPlan, ref: Mapping[str, Any], device: torch.device
    ) -> Lane:
        """The lane that a plan is for.

        Raises:
            RefitProtocolError: It is not there, or too small.
        """
        if not plan.buckets:
            return NoLane()
        lane = self._attach(end, plan.direct, ref, device)
        if lane.data.numel() < plan.lane_bytes:
            raise RefitProtocolError("the sender's memory is smaller than the plan needs")
        return lane

    def route(
        self,
        sink: WeightSink,
        wire: WeightManifest,
        expected: WeightManifest,
        plan: TransferPlan,
        lane: Lane,
        block_hash: BlockHash,
    ) -> Route:
        """The way from a lane into a sink: the one that is known, if nothing was moved."""
        known = self._route
        if known is None or not known.leads(sink, wire, expected, plan, lane.data, block_hash):
            known = self._route = Route(sink, wire, expected, plan, lane.data, block_hash)
        return known

    def let_go_of_weights(self) -> None:
        """Drops what refits keep of the engine's tensors, so that their memory can be freed.

        A refit that is under way ends: the tensors that it knows may not be the engine's any more.
        """
        self.epoch += 1
        self._route = self._prepared = None
        self.second_copy = {}

    def give_back(self) -> None:
        """Lets go of the trainer's own memory, if it could not be freed otherwise."""
        for key in [key for key, lane in self._lanes.items() if key[1] and lane.borrows]:
            self._detach(key)

    def drop_broken_lanes(self) -> None:
        """After a failure: lets go of lanes that it may have broken."""
        for key, lane in list(self._lanes.items()):
            if not lane.outlives_failure:
                self._detach(key)

    def _part_from(self, trainer: Trainer) -> None:
        """Lets go of a trainer that another one has replaced, and of its memory.

        What a refit that is still running uses, the refit after it replaces.
        """
        self.clear_away(trainer)
        with self.between_refits() as idle:
            for transport, (address, _) in list(self._ends.items()):
                if idle and address == trainer.channels.get(transport):
                    self._disconnect(transport)

    def clear_away(self, trainer: Trainer | None = None) -> None:
        """Removes what a trainer that was killed left behind on transports not used here."""
        trainer = trainer or self._trainer
        for transport, address in trainer.channels.items() if trainer else ():
            if transport not in self._ends or self._ends[transport][0] != address:
                find_transport(transport).receiver(address).close()

    def _let_go_of_the_dead(self) -> None:
        """Unmaps a trainer's own memory once nobody else has it: it may be the whole model."""
        with self.between_refits() as idle:
            if not idle or time.monotonic() < self._looked + _LOOK_S:
                return
            self._looked = time.monotonic()
            for key in [k for k, lane in self._lanes.items() if k[1] and lane.abandoned()]:
                self._detach(key)
                self.clear_away()

    def publish(self, version: int) -> None:
        """The weights are whole, and of this version."""
        if self._on_commit is not None:
            self.torn = True  # until the caches of the old weights are gone
            self._on_commit(version)
        self.version = version
        self.torn = False

    def let_go(self) -> None:
        """See :meth:`Endpoint.let_go`."""
        self.let_go_of_weights()
        self.clear_away()
        for transport in list(self._ends):
            self._disconnect(transport)

    def _attach(
        self, end: ReceiverEnd, direct: bool, ref: Mapping[str, Any], device: torch.device
    ) -> Lane:
        """This side of the sender's lane, attached once for as long as it stays the same."""
        known = self._lanes.get((end, direct))
        if known is not None and known.ref == ref:
            return known
        if known is not None:
            self._lanes.pop((end, direct)).close()
        lane = self._lanes[end, direct] = end.attach(ref, self.id, device)
        return lane

    def end(self, transport: str, trainer: Trainer | None = None) -> ReceiverEnd:
        """This side's end of a transport; it takes the place of one to another sender.

        Args:
            transport: Its name.
            trainer: Whose; the one that is known last if None.

        Raises:
            LifecycleError: The trainer does not offer it, or none is known.
        """
        address = (trainer or self._known_trainer()).channel(transport, self.name)
        known = self._ends.get(transport)
        if known is not None and known[0].items() <= address.items():
            self._ends[transport] = address, known[1]  # it may have been opened with less
            return known[1]
        return self._connect(transport, address, {})

    def _connect(
        self, transport: str, address: Mapping[str, Any], options: Mapping[str, Any]
    ) -> ReceiverEnd:
        self._disconnect(transport)
        end = find_transport(transport).receiver(address, **options)
        self._ends[transport] = address, end
        return end

    def _disconnect(self, transport: str) -> None:
        if transport in self._ends:
            _, end = self._ends.pop(transport)
            self._meetings.pop(end, None)
            for key in [key for key in self._lanes if key[0] is end]:
                self._detach(key)
            end.close()

    def _detach(self, key: tuple[ReceiverEnd, bool]) -> None:
        """Lets go of this side of a lane, and of all views of it."""
        if self._route is not None:
            self._route.let_go()
            self._route = None
        self._lanes.pop(key).close()

    def _last_waiting(self) -> Receiving | None:
        return next((job for job in reversed(self.waiting()) if not job.cancelled), None)

    def _known_trainer(self) -> Trainer:
        self.check_open()
        if self._trainer is None:
            raise LifecycleError(
                f"{self.name}: no trainer is known",
                fix="call prepare_refit_info(policy.prepare_refit_info()) first",
            )
        return self._trainer
