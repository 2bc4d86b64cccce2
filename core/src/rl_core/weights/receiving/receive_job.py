"""One refit, as the engine performs it."""

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
    RefitCorrupted,
    RefitError,
    RefitProtocolError,
    WeightsTornError,
)
from rl_core.interfaces.weights import WeightSink
from rl_core.weights.data.digests import BlockHash, DigestTable
from rl_core.weights.data.manifest import compare
from rl_core.weights.data.plan import DataMode, make_plan
from rl_core.weights.engine_lock import EngineLock
from rl_core.weights.job import Job, keep_two
from rl_core.weights.protocol.frames import Channel, write_hello
from rl_core.weights.protocol.messages import Hello
from rl_core.weights.protocol.receiver_session import ReceiverSession
from rl_core.weights.protocol.session import Attach, Effect, Install, Load, Phase, Publish, Send
from rl_core.weights.protocol.timing import TICK_S
from rl_core.weights.receiving.loading import Loader, ReceiverBuckets, settle
from rl_core.weights.receiving.staging import StagedSink
from rl_core.weights.transports.cuda import visible_gpus

if TYPE_CHECKING:
    from rl_core.weights.data.plan import TransferPlan
    from rl_core.weights.engine_lock import Lock
    from rl_core.weights.protocol.handshake import SenderInfo
    from rl_core.weights.protocol.messages import Offer, Prepare
    from rl_core.weights.receiving.receiver_base import ReceiverBase
    from rl_core.weights.transports.base import Lane, ReceiverEnd

#: Seconds between two looks at a lane until its bytes arrive.
_PAUSE_S = 0.0002
#: Seconds in which a sender that closed its memory is heard, because it may have given up.
_LAST_WORD_S = 0.5


class ReceiveJob(Job[ReceiverSession]):
    """One refit of a receiver.

    Args:
        endpoint: The receiver that performs it.
        transport: Name of the transport that the sender uses.
        trainer: Who sends, and what.
        deadline_s: Seconds that it may take.
        refit_id: As the sender's call has it; empty if that names none.
        lock: Held while it writes; the endpoint's by default.

    Attributes:
        earlier: A refit that was waiting when this one was requested, and may take its place.
        summary: What it did, once it is committed.
    """

    endpoint: ReceiverBase[Any]

    def __init__(
        self,
        endpoint: ReceiverBase[Any],
        transport: str,
        trainer: SenderInfo,
        deadline_s: float,
        refit_id: str,
        lock: Lock | None = None,
    ) -> None:
        nonce = secrets.token_bytes(16)
        session = ReceiverSession(
            Hello(endpoint.id, endpoint.name, os.getpid(), nonce, refit_id),
            manifest=trainer.manifest.digest,
            dtypes=trainer.dtypes,
            holds=self._holds,
            gpus=visible_gpus(endpoint.device),
            deadline_s=deadline_s,
            clock=endpoint.runtime.clock,
        )
        super().__init__(session, endpoint, refit_id, endpoint.device)
        self.transport = transport
        self.trainer = trainer
        self.earlier: ReceiveJob | None = None
        self.summary: dict[str, Any] = {}
        self._end: ReceiverEnd
        self._channel = Channel(trainer.token, nonce, "receiver")
        self._loads: deque[Load] = deque()
        self._plan: TransferPlan
        self._lane: Lane | None = None
        self._loader: Loader | None = None
        self._sink: WeightSink | None = None
        self._lock = lock or endpoint.lock
        self._locked = False
        self._tore = False
        # The count of outside changes at the time of Ready, and at the time of Attach.
        self._changes_when_told: int
        self._changes: int

    def refit(self) -> dict[str, Any]:
        session, receiver = self.session, self.endpoint
        earlier, self.earlier = self.earlier, None
        if earlier is not None and earlier.session.phase is Phase.COMMITTED:
            return earlier.summary  # the earlier call took the refit that this one was for
        before = {"origin": receiver.origin, "version": receiver.version}
        self._end = receiver.end(self.transport, self.trainer)
        try:
            meeting = receiver.meeting(self._end, session.remaining_s)
            while not meeting.done() and not self.given_up and session.remaining_s:
                concurrent.futures.wait([meeting], TICK_S)
            if not meeting.done():
                self.look()
            else:
                meeting.result()
                self._end.connect(self.trainer.addresses[self.transport])
                self.perform(session.start())
                self.endpoint.runtime.drive(self)
        finally:
            try:
                self._release()
            finally:
                self._end.disconnect()
        if session.error is not None:
            receiver.drop_broken_lanes()
            receiver.remove_leftovers(self.trainer)
            raise session.error
        self.summary = {
            "version": receiver.version,
            "origin": receiver.origin,
            "replaced": before if before["origin"] not in (0, receiver.origin) else None,
            "bytes": self._plan.nbytes,
            "seconds": sum(session.phase_seconds.values()),
            "name": receiver.name,
        }
        return self.summary

    def release_resources(self) -> None:
        self._lane = self._loader = self._sink = None
        self._loads.clear()

    # -- what arrives -----------------------------------------------------------------------------

    def pump(self, timeout_s: float) -> None:
        """Takes every message that is there, then loads one bucket.

        What follows is thus on its way while a bucket is loaded, and the end of the refit is known
        before another one is written.
        """
        frame = self._end.receive(0.0 if self._loads else timeout_s)
        while frame is not None:
            try:
                effects = self.session.receive(self._channel.decode(frame))
            except RefitProtocolError as error:
                effects = self.session.fail(error)
            self.perform(effects)
            frame = None if self.session.phase.terminal else self._end.receive(0.0)
        if not self._loads or self.session.phase.terminal:
            return
        load = self._loads[0]
        assert self._lane is not None
        assert self._loader is not None
        self.session.at = self._plan.buckets[load.index].name
        try:
            if not self._lane.arrived():
                time.sleep(_PAUSE_S)
                return
            self._loads.popleft()
            self._loader.load(load.index, load.digests)
            self._lane.release()
        except BaseException as error:  # the session tells the sender, and ends with it
            effects = self.session.fail(error)
        else:
            effects = self.session.loaded(load.index)
        self.perform(effects)

    def lost_peers(self) -> list[Effect]:
        return self.session.lost("died or does not answer") if self._end.lost() else []

    def do(self, effect: Effect) -> list[Effect]:
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
            case Load(index):
                bucket = self._plan.buckets[index]
                assert self._lane is not None
                self._lane.expect(bucket.start, bucket.stop)
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
                self.endpoint.known = self._loader.table.known
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

    def _attach(self, prepare: Prepare, offer: Offer) -> int:
        """Derives the plan, attaches to the lane and opens the sink; the plan's buckets."""
        receiver, wire = self.endpoint, self.trainer.wire
        skip, bucket_bytes = prepare.skip, prepare.bucket_bytes
        if len(skip) not in (0, len(wire.owned)):
            raise RefitProtocolError("the sender skips tensors of another model", phase="PREPARE")
        block_hash = BlockHash.named(
            prepare.hash, private=self._end.private, token=self.trainer.token
        )
        if offer.delta:  # the sender leaves out what Ready listed as held
            receiver.check_unchanged(self._changes_when_told)
        # Before the sink is made, which knows of these changes, or of later ones as well.
        self._changes = receiver.outside_changes
        kept, sink = receiver.buckets, receiver.sink_for(self.refit_id)
        expected = receiver.manifest_of(sink)
        mode = DataMode.DIRECT if prepare.direct else DataMode.PACKED
        key = (
            wire.digest, expected.digest, bucket_bytes, mode, skip, block_hash, offer.isolation
        )  # fmt: skip
        buckets = kept.get(key)
        if buckets is None:
            plan = make_plan(wire, bucket_bytes, mode, skip=skip, block=block_hash.block)
        else:
            plan = buckets.plan
        self._plan = plan
        if plan.digest != prepare.plan:
            raise RefitProtocolError("the two sides derive different plans", phase="PREPARE")
        try:
            self._lane = receiver.lane(self._end, plan, prepare.lane, torch.device(sink.device))
        except RefitError:
            self.pump(_LAST_WORD_S)  # a sender that gives up sends that before it closes its memory
            raise
        self._lane.ends = self.session.deadline
        if buckets is None:
            compare(wire, expected)
        known, mark_torn = receiver.known, self._mark_torn
        if offer.isolation == "staged":
            sent = {wire.owned[index].name for index in plan.sent}
            names = {spec.name for spec in expected.owned if wire.root(spec.name) in sent}
            sink = StagedSink(sink, names, receiver.version, receiver.second_copy, self._mark_torn)
            # A second copy may be written at any time, and is not what the engine has.
            known, mark_torn = dict(known), lambda: None
        if offer.kv_scales and isinstance(sink, StagedSink):
            raise CapabilityError(
                "key/value scales cannot be taken back, so they do not travel with a staged refit",
                fix='use isolation="quiesced"',
                capability="staged",
            )
        if offer.kv_scales and type(sink).scale_kv is WeightSink.scale_kv:
            raise CapabilityError(
                f"{type(sink).__name__} takes no key/value scales",
                fix="refit without kv_scales, or implement WeightSink.scale_kv",
                capability="kv_scales",
            )
        if offer.verify == "installed" and type(sink).read is WeightSink.read:
            sink.read(())  # raises now, and not when all was written
        sink.begin(offer.version)
        self._sink = sink
        if buckets is None or not buckets.fits(sink, self._lane.data):
            buckets = ReceiverBuckets(sink, wire, expected, plan, self._lane.data, block_hash)
        buckets.sink = sink
        keep_two(kept, key, buckets)
        self._loader = Loader(buckets, verify=offer.verify, known=known, mark_torn=mark_torn)
        return len(plan.buckets)

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

    def _holds(self) -> bytes:
        """The digests of what the engine is known to have, in the trainer's order."""
        self._changes_when_told = self.endpoint.outside_changes
        return DigestTable(self.trainer.wire, self.endpoint.known).flat

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
            self.endpoint.forget()
            raise WeightsTornError(
                f"{self.endpoint.name}: the engine's sink raised when a refit failed: "
                f"{type(error).__name__}: {error}",
                fix="refit again",
                phase=self.session.phase.value,
            ) from error
        finally:
            try:
                self.endpoint.unmap_trainer_memory()
            finally:
                if self._locked:
                    self._lock.release()
