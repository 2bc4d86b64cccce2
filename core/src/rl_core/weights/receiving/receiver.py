"""The engine's endpoint: takes refits, and knows whether the weights are whole."""

from __future__ import annotations

import concurrent.futures
import os
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import (
    CapabilityError,
    LifecycleError,
    RefitAborted,
    RefitCorrupted,
    RefitError,
    RefitProtocolError,
    WeightsTornError,
)
from rl_core.interfaces.weights import WeightSink
from rl_core.weights.connections import Connection, Connections, keep_two
from rl_core.weights.data.digests import BlockHash, DigestTable, TensorHasher
from rl_core.weights.data.manifest import WeightManifest, compare
from rl_core.weights.data.parts import Partition
from rl_core.weights.data.plan import ALIGN, DataMode, make_plan
from rl_core.weights.engine_lock import EngineLock, exclusively
from rl_core.weights.job import Endpoint, Job
from rl_core.weights.options import DEFAULT_DEADLINE_S, check_deadline
from rl_core.weights.protocol.frames import Channel, write_hello
from rl_core.weights.protocol.handshake import trainer_of
from rl_core.weights.protocol.messages import Hello, Ready
from rl_core.weights.protocol.receiver_session import ReceiverSession
from rl_core.weights.protocol.session import Attach, Effect, Install, Load, Publish, Send
from rl_core.weights.protocol.timing import TICK_S
from rl_core.weights.receiving.loading import (
    Loader,
    Places,
    ReceiverBuckets,
    ReceiverLanes,
    kept_of,
    settle,
)
from rl_core.weights.receiving.staging import StagedSink
from rl_core.weights.transports.base import CPU, NoLane, ReceiverEnd
from rl_core.weights.transports.cuda import visible_gpus
from rl_core.weights.transports.ipc import boot_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_core.interfaces.weights import Box
    from rl_core.weights.data.parts import Layout
    from rl_core.weights.data.plan import TransferPlan
    from rl_core.weights.engine_lock import Lock
    from rl_core.weights.job import Runtime
    from rl_core.weights.protocol.handshake import SenderInfo
    from rl_core.weights.protocol.messages import Offer, Prepare
    from rl_core.weights.transports.base import Lane

__all__ = ["ReceiveJob", "RefitReceiver"]

#: Seconds between looks at whether the trainer still has the memory that is mapped here.
_LOOK_S = 5.0
#: Seconds between two looks at a lane until its bytes arrive.
_PAUSE_S = 0.0002
#: Seconds in which a sender that closed its memory is heard, because it may have given up.
_LAST_WORD_S = 0.5


class RefitReceiver(Endpoint["ReceiveJob"]):
    """Takes weights into an engine; one for the engine's whole life.

    Args:
        sink: Makes what is written to; called once for each refit, and for a description that no
            refit follows.
        name: How errors on the other side call this one.
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
        known: Digests, by name, of the parts that the engine is known to have.
        parts: What these are parts of.
        known_of: What the engine kept when they became known.
        expected: The manifest of the last sink.
        always_sent: Names of those that a delta does not leave out.
        device: Where the engine's tensors were when it was prepared.
        second_copy: Memory of staged refits, kept between them.
        connections: Those of each transport that was used.
    """

    def __init__(
        self,
        sink: Callable[[], WeightSink],
        *,
        name: str,
        lock: Lock,
        on_commit: Callable[[int], None] | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__(name, runtime)
        self.id = secrets.token_hex(16)
        self.lock = lock
        self.version = self.origin = 0
        self.torn = False
        self.outside_changes = 0
        self.known: dict[str, bytes] = {}
        self.parts: Partition | None = None
        self.known_of: tuple[Layout, WeightManifest | None] = {}, None
        self.always_sent: set[str] = set()
        self.device = CPU
        self.second_copy: dict[tuple[str, Box], torch.Tensor] = {}
        self.connections: Connections[ReceiverEnd, ReceiverLanes] = Connections()
        self._new_sink = sink
        self._on_commit = on_commit
        self._prepared: tuple[int, WeightSink] | None = None  # changes before, its sink
        self.expected: WeightManifest | None = None
        self._trainer: SenderInfo | None = None
        # By a trainer's token, the last refit that was requested by number: it offers none twice.
        self._taken: dict[str, int] = {}
        self._looked = 0.0

    # -- what the engine has ----------------------------------------------------------------------

    def check(self) -> None:
        """Raises unless the weights are whole; now and then unmaps memory of an ended trainer."""
        with self.between_refits() as idle:
            if idle and (now := self.runtime.clock()) >= self._looked + _LOOK_S:
                self._looked = now
                # A trainer that has ended: its own memory may be its whole model.
                if self.connections.close_lanes(
                    lambda mode, lane: mode is DataMode.DIRECT and lane.sender_gone()
                ):
                    self.remove_leftovers(self._trainer)
        if self.torn:
            raise WeightsTornError(
                f"{self.name}: the weights are partly of version {self.version} and partly newer, "
                "or were dropped",
                fix="call refit again; the engine needs no restart",
                version=self.version,
            )

    def forget(self) -> None:
        """The engine's weights were changed by something else: a delta must not rely on them."""
        self.outside_changes += 1
        self.known = {}

    def dropped(self) -> None:
        """The engine dropped its weights: it is torn until a full refit commits."""
        self.torn = True
        self.forget()

    def check_unchanged(self, since: int) -> None:
        """Raises unless refits alone have changed the weights."""
        if self.outside_changes != since:
            raise RefitAborted(
                f"{self.name}: the engine's weights were dropped or changed by something else "
                "during the refit",
                fix="call refit again; do not put the engine to sleep or load weights meanwhile",
            )

    def publish(self, version: int, origin: int) -> None:
        """The weights are whole, and of this version of that trainer."""
        if self._on_commit is not None:
            self.torn = True  # until the caches of the old weights are dropped
            self._on_commit(version)
        self.version, self.origin = version, origin
        self.torn = False

    # -- refits -----------------------------------------------------------------------------------

    def prepare(self, info: dict[str, Any]) -> None:
        """Takes what the sender's ``prepare`` returned."""
        self.check_open()
        changes = self.outside_changes
        sink = self._new_sink()

        def match(theirs: WeightManifest) -> tuple[dict[str, str], Layout]:
            expected = self.manifest_of(sink)
            dtypes = compare(theirs, expected, casts=sink.casts)
            return dtypes, kept_of(theirs, expected, sink.pieces())

        trainer = trainer_of(info, match, self._trainer)
        self.device = torch.device(sink.device)
        with self.asking:
            for job in self.waiting():
                job.superseded = "prepare_refit_info was called again"
            before, self._trainer = self._trainer, trainer
            self.number = max(info["number"] - 1, self._taken.get(trainer.token, 0))
            self._prepared = changes, sink
        if before is not None and before.token != trainer.token:
            # The earlier trainer may have died after its last refit, so that nobody cleaned up.
            self.remove_leftovers(before)
            with self.between_refits() as idle:  # what a running refit uses, the next replaces
                for transport, kept in list(self.connections.items()):
                    if idle and kept.address == before.addresses.get(transport):
                        self.connections.close(transport)

    def open(
        self, transport: str, deadline_s: float, address: dict[str, Any], **options: Any
    ) -> concurrent.futures.Future[None]:
        """Goes to where a sender listens on a transport, anew if it did before."""
        self.check_open()
        for job in self.waiting():
            if job.transport == transport:
                job.superseded = f"the transport {transport} was opened again"
        check_deadline(deadline_s)
        with exclusively(self.turn, deadline_s, f"{self.name}: a running refit"):
            connection = self._connect(transport, address, options)
        return self.find_sender(connection, deadline_s)

    def receive(
        self,
        *,
        transport: str = "ipc",
        deadline_s: float = DEFAULT_DEADLINE_S,
        number: int | None = None,
        lock: Lock | None = None,
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts to take one refit from the sender that ``prepare`` was given last.

        Earlier ones that still wait end.

        Args:
            transport: Name of the transport that the sender uses.
            deadline_s: Seconds for the whole refit, the wait for the sender included.
            number: Of the refit; that after the last one that was requested if None.
            lock: Held while this refit writes; the receiver's by default.
        """
        with self.asking:
            self.check_open()
            check_deadline(deadline_s)
            given, number = number, self.next_number(number)
            self.number = number
            if (trainer := self._trainer) is None:
                raise LifecycleError(
                    f"{self.name} does not know its trainer yet",
                    fix="call prepare_refit_info(policy.prepare_refit_info()) first",
                )
            if given is None:
                self._prepared = None  # it may be from long ago
            else:
                self._taken[trainer.token] = number
            try:
                trainer.address_of(transport, self.name)
            except LifecycleError as error:
                if transport in self.connections:  # the sender may wait for us there
                    self.connections[transport].end.refuse(str(error))
                raise
            return self.start(ReceiveJob(self, transport, trainer, deadline_s, number, lock))

    def awaits_generation(self, refit: concurrent.futures.Future[dict[str, Any]]) -> bool:
        """Whether a refit waits for the engine to stop generating."""
        return any(job.future is refit and job.session.held_up for job in list(self.jobs))

    # -- what is kept -----------------------------------------------------------------------------

    def sink(self) -> WeightSink:
        """The sink that was compared with the trainer's tensors for this refit, or a new one."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] == self.outside_changes:
            return prepared[1]
        return self._new_sink()

    def manifest_of(self, sink: WeightSink) -> WeightManifest:
        """The sink's manifest; the one of the last refit if nothing changed."""
        self.expected = WeightManifest.of(sink.specs(), self.expected)
        return self.expected

    def connection(self, transport: str, trainer: SenderInfo) -> Connection[ReceiverEnd]:
        """This side of a transport; it takes the place of one to another sender."""
        address = trainer.address_of(transport, self.name)
        kept = self.connections.get(transport)
        if kept is not None and kept.address.items() <= address.items():
            kept.address = address  # it may have been opened with less
            return kept
        return self._connect(transport, address, {})

    def _connect(
        self, transport: str, address: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Connection[ReceiverEnd]:
        """A new connection in the place of the one that there may be."""
        self.connections.close(transport)
        end = self.runtime.transport(transport).receiver(address, **options)
        made = self.connections[transport] = Connection(end, address)
        return made

    def find_sender(
        self, connection: Connection[ReceiverEnd], deadline_s: float
    ) -> concurrent.futures.Future[None]:
        """A future that is done when the sender is found; what failed before is tried again."""
        found = connection.found
        if found is None or (found.done() and found.exception() is not None):
            end = connection.end
            found = self.runtime.spawn(self.name, lambda: end.rendezvous(deadline_s))
            connection.found = found
        return found

    def remove_leftovers(self, trainer: SenderInfo | None) -> None:
        """Removes what a trainer that was killed left behind on transports not used here."""
        for transport, address in trainer.addresses.items() if trainer else ():
            kept = self.connections.get(transport)
            if kept is None or kept.address != address:
                self.runtime.transport(transport).remove_leftovers(address)

    def lane(
        self,
        connection: Connection[ReceiverEnd],
        plan: TransferPlan,
        rank: int,
        ref: Mapping[str, Any],
        device: torch.device,
    ) -> Lane:
        """This side of the lane of a rank, for a plan; attached once, while it stays the same."""
        if not plan.buckets:
            return NoLane()
        lane = connection.lanes.get((plan.mode, rank))
        if lane is None or lane.ref != ref:
            self.connections.close_lanes(lambda _, other: other is lane)
            lane = connection.end.attach(ref, self.id, device)
            connection.lanes[plan.mode, rank] = lane
        if lane.data.numel() < plan.lane_bytes:
            raise RefitProtocolError("the sender's shared memory is smaller than its plan needs")
        return lane

    def unmap_trainer_memory(self) -> None:
        """Closes lanes in the trainer's own memory, if it could not be freed otherwise."""
        self.connections.close_lanes(
            lambda mode, lane: mode is DataMode.DIRECT and lane.unmap_after_each_refit
        )

    def release_weights(self) -> None:
        """Drops what refits keep of the engine's tensors; ends one that is under way."""
        self.outside_changes += 1
        self._prepared = None
        self.connections.buckets = {}
        self.second_copy = {}

    def release_resources(self) -> None:
        """Closes everything. Idempotent."""
        self.release_weights()
        self.remove_leftovers(self._trainer)
        for transport in list(self.connections):
            self.connections.close(transport)


class ReceiveJob(Job[ReceiverSession]):
    """One refit of a receiver."""

    endpoint: RefitReceiver

    def __init__(
        self,
        endpoint: RefitReceiver,
        transport: str,
        trainer: SenderInfo,
        deadline_s: float,
        number: int,
        lock: Lock | None = None,
    ) -> None:
        nonce = secrets.token_bytes(16)
        session = ReceiverSession(
            Hello(endpoint.id, endpoint.name, os.getpid(), nonce, number),
            manifest=trainer.manifest.digest,
            ready=self._ready,
            deadline_s=deadline_s,
            clock=endpoint.runtime.clock,
        )
        super().__init__(session, endpoint, number, endpoint.device)
        self.transport = transport
        self.trainer = trainer
        self._connection: Connection[ReceiverEnd]
        self._end: ReceiverEnd
        self._channel = Channel(trainer.token, nonce, "receiver")
        self._loads: deque[Load] = deque()
        self._lanes: dict[int, Lane] = {}
        self._loader: Loader | None = None
        self._sink: WeightSink | None = None
        self._lock = lock or endpoint.lock
        self._locked = False
        self._tore = False
        # The count of outside changes at the time of Ready, and at the time of Attach.
        self._changes_when_told: int
        self._changes: int

    def refit(self) -> dict[str, Any]:  # noqa: D102
        session, receiver = self.session, self.endpoint
        before = {"origin": receiver.origin, "version": receiver.version}
        self._connection = receiver.connection(self.transport, self.trainer)
        self._end = self._connection.end
        try:
            found = receiver.find_sender(self._connection, session.remaining_s)
            while not found.done() and not self.given_up and session.remaining_s:
                concurrent.futures.wait([found], TICK_S)
                self.heard = time.monotonic()
            if not found.done():
                self.look()
            else:
                found.result()
                self._end.connect(self.trainer.addresses[self.transport])
                self.perform(session.start())
                self.endpoint.runtime.drive(self)
        finally:
            try:
                self._release()
            finally:
                self._end.disconnect()
        if session.error is not None:
            receiver.connections.close_lanes(lambda _, lane: not lane.reusable_after_failure)
            receiver.remove_leftovers(self.trainer)
            raise session.error
        return {
            "version": receiver.version,
            "origin": receiver.origin,
            "replaced": before if before["origin"] not in (0, receiver.origin) else None,
            "bytes": self._loader.nbytes if self._loader else 0,
            "seconds": sum(session.phase_seconds.values()),
            "name": receiver.name,
        }

    def release_resources(self) -> None:  # noqa: D102
        self._loader = self._sink = None
        self._lanes.clear()
        self._loads.clear()

    # -- what arrives -----------------------------------------------------------------------------

    def pump(self, timeout_s: float) -> None:
        """Takes every message that is there, then loads one bucket.

        What follows is thus on its way while a bucket is loaded, and the end of the refit is known
        before another one is written.
        """
        frame = self._end.receive(0.0 if self._loads else timeout_s)
        while frame is not None:
            if self.superseded and self.given_up:
                return  # or it would take part in a refit that is for the call after this one
            try:
                effects = self.session.receive(self._channel.decode(frame))
            except RefitProtocolError as error:
                effects = self.session.fail(error)
            self.perform(effects)
            frame = None if self.session.phase.terminal else self._end.receive(0.0)
        if not self._loads or self.session.phase.terminal:
            return
        assert self._loader is not None
        # Of each lane the first that was announced; a lane that is late holds up no other.
        load = self._loads[0]
        try:
            for load in {load.lane: load for load in reversed(self._loads)}.values():
                if self._lanes[load.lane].arrived():
                    break
            else:
                time.sleep(_PAUSE_S)
                return
            self.session.at = self._loader.lanes[load.lane].plan.buckets[load.index].name
            self._loads.remove(load)
            self._loader.load(load.index, load.digests, load.lane)
            self._lanes[load.lane].release()
        except BaseException as error:  # the session tells the sender, and ends with it
            effects = self.session.fail(error)
        else:
            effects = self.session.loaded(load.index, load.lane)
        self.perform(effects)

    def lost_peers(self) -> list[Effect]:  # noqa: D102
        return self.session.lost("has ended or does not answer") if self._end.lost() else []

    def do(self, effect: Effect) -> list[Effect]:  # noqa: D102
        session = self.session
        match effect:
            case Send(Hello() as hello):
                self._end.send(write_hello(hello, self.trainer.token))
            case Send(message):
                self._end.send(self._channel.encode(message))
            case Attach(prepare, offer):
                if offer.isolation != "staged" and not self._quiesce():
                    return []
                return session.attached(self._attach(prepare, offer))
            case Load(index, _, lane):
                assert self._loader is not None
                buckets = self._loader.lanes[lane]
                bucket = buckets.plan.buckets[index]
                runs = bucket.runs(buckets.reads)
                self._lanes[lane].expect(bucket.start, bucket.stop, runs)
                self._loads.append(effect)
            case Install(offer, digest):
                if self._locked or self._quiesce():
                    self._install(offer, digest)
                    return session.installed()
            case Publish(version):
                assert self._loader is not None
                session.mark_torn()
                self.endpoint.check_unchanged(self._changes)
                self.endpoint.publish(version, self.trainer.origin)
                self.endpoint.known = self._loader.known
                self._sink = None  # what follows cannot take the weights back
                # Before the Done: after it, the sender may free the memory at once.
                self.endpoint.unmap_trainer_memory()
                return session.published()
        return []

    # -- what is done with it ---------------------------------------------------------------------

    def _quiesce(self) -> bool:
        """Waits for the engine to stop generating; False if the session ended meanwhile."""
        session, lock = self.session, self._lock
        acquire = lock.acquire_keeping_place if isinstance(lock, EngineLock) else lock.acquire
        session.held_up = "generation"
        try:
            while not acquire(timeout=TICK_S):
                self.heard = time.monotonic()
                self.pump(0.0)
                self.look()
                if session.phase.terminal:
                    return False
            self._locked = True
        finally:
            session.held_up = ""
            if isinstance(lock, EngineLock) and not self._locked:
                lock.cancel_acquire()
        return True

    def _attach(self, prepare: Prepare, offer: Offer) -> dict[int, int]:
        """Derives the plans, attaches to the lanes and opens the sink; buckets of each plan."""
        receiver, wire = self.endpoint, self.trainer.wire
        parts = Partition.checked(wire, prepare.cuts, receiver.parts)
        for info in prepare.lanes.values():
            if not {len(info.skip), len(info.reads)} <= {0, len(parts.manifest.owned)}:
                raise RefitProtocolError(
                    "the sender's masks do not fit these tensors", phase="PREPARE"
                )
        block_hash = BlockHash.named(
            prepare.hash, private=self._end.private, token=self.trainer.token
        )
        if offer.delta:  # the sender leaves out what Ready listed as held
            receiver.check_unchanged(self._changes_when_told)
        # Before the sink is made, which knows of these changes, or of later ones as well.
        self._changes = receiver.outside_changes
        kept, sink = receiver.connections.buckets, receiver.sink()
        expected, keeps = receiver.manifest_of(sink), self.trainer.keeps
        if receiver.known_of != (keeps, expected):  # what was known is of other pieces
            receiver.known, receiver.known_of = {}, (keeps, expected)
            kept.clear()
        mode = DataMode.DIRECT if prepare.direct else DataMode.PACKED
        lanes = tuple((rank, info.plan, info.reads) for rank, info in prepare.lanes.items())
        how = (prepare.bucket_bytes, mode, block_hash, offer.isolation)
        key = (parts.manifest.digest, *how, lanes)
        lasting = kept.get(key)
        plans: dict[int, TransferPlan] = {}
        for rank, info in prepare.lanes.items():
            of = (parts, how[0], mode, info.skip, block_hash.block, info.places)
            plans[rank] = make_plan(*of) if lasting is None else lasting.lanes[rank].plan
            if plans[rank].digest != info.plan:
                raise RefitProtocolError(
                    "sender and receiver made different plans", phase="PREPARE"
                )
            try:
                self._lanes[rank] = receiver.lane(
                    self._connection, plans[rank], rank, info.ref, torch.device(sink.device)
                )
            except RefitError:
                self.pump(_LAST_WORD_S)  # a sender that gives up sends that before it closes memory
                raise
            self._lanes[rank].ends = self.session.deadline
        same = [it.places for it in kept.values() if it.places.parts is parts]
        if not same:
            compare(wire, expected)
        receiver.always_sent = {wire.root(name) for name in sink.always_sent}
        if parts is not receiver.parts:  # or digests of other parts would outlast what is written
            here = parts.manifest.by_name
            receiver.known = {n: d for n, d in receiver.known.items() if n in here}
            receiver.parts = parts
        known = receiver.known
        mark_torn = (lambda: None) if sink.double_buffered else self._mark_torn
        if offer.isolation == "staged" and not sink.double_buffered:
            reads = [(plan, prepare.lanes[rank].reads) for rank, plan in plans.items()]
            sent = {
                parts.tensor_of(i).name for plan, r in reads for i in plan.sent if not r or r[i]
            }
            names = {spec.name for spec in expected.owned if wire.root(spec.name) in sent}
            sink = StagedSink(sink, names, receiver.version, receiver.second_copy, self._mark_torn)
            # A second copy may be written at any time, and is not what the engine has.
            known, mark_torn = dict(known), lambda: None
        if offer.kv_scales and isinstance(sink, StagedSink):
            raise CapabilityError(
                "a staged refit cannot send key/value scales: the engine could not undo them",
                fix='use isolation="quiesced"',
                capability="staged",
            )
        # These raise now, and not when all was written.
        if offer.kv_scales:
            sink.scale_kv({})
        if offer.verify == "installed" and type(sink).read is WeightSink.read:
            sink.read(())
        sink.begin(offer.version)
        self._sink = sink
        data = {rank: lane.data for rank, lane in self._lanes.items()}
        if lasting is None or not lasting.fits(sink, data):
            places = next((it for it in same if it.serves(sink)), None)
            if places is None:
                pieces = sink.pieces()
                if kept_of(wire, expected, pieces) != keeps:
                    raise RefitAborted(
                        f"{receiver.name}: the engine keeps other pieces than it did when it was "
                        "prepared",
                        fix="call prepare_refit_info again, and refit",
                    )
                places = Places(sink, parts, expected, pieces)
            made = {
                rank: ReceiverBuckets(
                    places, plan, data[rank], block_hash, prepare.lanes[rank].reads
                )
                for rank, plan in plans.items()
            }
            hasher = TensorHasher(block_hash, min(block_hash.block, how[0] // ALIGN * ALIGN))
            lasting = ReceiverLanes(places, parts.mask(keeps), made, hasher)
        lasting.places.sink = sink
        keep_two(kept, key, lasting)
        self._loader = Loader(lasting, verify=offer.verify, known=known, mark_torn=mark_torn)
        return {rank: len(plan.buckets) for rank, plan in plans.items()}

    def _install(self, offer: Offer, digest: str) -> None:
        """Finishes the sink and verifies what is there."""
        self.session.at = ""
        assert self._sink is not None
        assert self._loader is not None
        self.endpoint.check_unchanged(self._changes)
        try:
            self._loader.check_sealed(digest)
            if offer.kv_scales:
                self._mark_torn()  # also where no tensor was sent
                self._sink.scale_kv(offer.kv_scales)
            self._sink.finish(offer.version)
            settle(self._sink)
            if offer.verify == "installed":
                self._loader.check_installed()
        except RefitCorrupted:
            self.endpoint.known = {}  # other digests may be wrong as well
            raise

    def _ready(self, offer: Offer) -> Ready:
        """What the engine wants, and the digests of what it is known to have."""
        receiver, trainer, holds, parts = self.endpoint, self.trainer, b"", None
        if offer.delta:
            self._changes_when_told = receiver.outside_changes
            parts = receiver.parts
            if parts is None or parts.whole.digest != trainer.wire.digest:
                parts = Partition(trainer.wire)
            sent = {
                part.name
                for index, part in enumerate(parts.manifest.owned)
                if parts.tensor_of(index).name in receiver.always_sent
            }
            sound = receiver.known_of == (trainer.keeps, receiver.expected)
            held = {n: d for n, d in receiver.known.items() if sound and n not in sent}
            holds = DigestTable(parts.manifest, held).flat()
        return Ready(
            offer.session,
            trainer.dtypes,
            holds,
            visible_gpus(receiver.device),
            {index: tuple(boxes) for index, boxes in trainer.keeps.items()},
            "" if parts is None else parts.manifest.digest,
            boot_id(),
        )

    def _mark_torn(self) -> None:
        self.session.mark_torn()
        if not self.endpoint.torn:
            self.endpoint.torn = self._tore = True

    def _release(self) -> None:
        """Tells the sink of a failure, and lets the engine generate again if it may."""
        try:
            if self._sink is not None:
                self._sink.fail()
                settle(self._sink)
                untouched = self._changes == self.endpoint.outside_changes
                if isinstance(self._sink, StagedSink) and self._tore and untouched:
                    self.endpoint.torn = False  # all is as it was
        except Exception as error:
            self.endpoint.dropped()
            raise WeightsTornError(
                f"{self.endpoint.name}: WeightSink.fail raised after a refit failed: "
                f"{type(error).__name__}: {error}",
                fix="call refit again",
                phase=self.session.phase.value,
            ) from error
        finally:
            for buckets in list(self.endpoint.connections.buckets.values()):
                buckets.drop_sink()
            try:
                self.endpoint.unmap_trainer_memory()
            finally:
                if self._locked:
                    self._lock.release()
