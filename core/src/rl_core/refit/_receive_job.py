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
    RefitProtocolError,
    WeightsTornError,
)
from rl_core.interfaces.weights import WeightSink
from rl_core.refit._digests import DigestTable
from rl_core.refit._job import TICK_S, Job
from rl_core.refit._loading import Loader
from rl_core.refit._staging import StagedSink
from rl_core.refit.frames import Channel, write_hello
from rl_core.refit.hashing import BlockHash
from rl_core.refit.messages import Hello
from rl_core.refit.session import (
    Announced,
    Attach,
    Effect,
    Install,
    Load,
    Phase,
    Publish,
    ReceiverSession,
    Send,
)
from rl_core.refit.transports.cuda import visible_gpus
from rl_core.refit.turns import leave_line

if TYPE_CHECKING:
    from rl_core.refit._introduction import Trainer
    from rl_core.refit.manifest import WeightManifest
    from rl_core.refit.messages import Offer, Prepare
    from rl_core.refit.plan import TransferPlan
    from rl_core.refit.receiver import RefitReceiver
    from rl_core.refit.transports.base import Lane, ReceiverEnd

__all__ = ["Receiving"]

#: Seconds between two looks at a lane whose bytes have not arrived.
_PAUSE_S = 0.0002


class Receiving(Job[ReceiverSession]):
    """One refit.

    Args:
        receiver: Whose.
        transport: Name of what it is received over.
        trainer: Who sends, and what.
        deadline_s: Seconds that it may take.
        refit_id: What the sender was told, too; empty if nothing.

    Attributes:
        before: A refit that was waiting when this one was asked for, and may take its place.
        summary: What it did, once it is committed.
    """

    def __init__(
        self,
        receiver: RefitReceiver,
        transport: str,
        trainer: Trainer,
        deadline_s: float,
        refit_id: str,
    ) -> None:
        nonce = secrets.token_bytes(16)
        session = ReceiverSession(
            Hello(receiver.id, receiver.name, os.getpid(), nonce, refit_id),
            manifest=trainer.manifest.digest,
            dtypes=trainer.dtypes,
            holds=self._holds,
            gpus=visible_gpus(receiver.device),
            deadline_s=deadline_s,
        )
        super().__init__(session, receiver, refit_id)
        self.transport = transport
        self.trainer = trainer
        self.before: Receiving | None = None
        self.summary: dict[str, Any] = {}
        self._receiver = receiver
        self._end: ReceiverEnd
        self._channel = Channel(trainer.token, nonce, "receiver")
        self._loads: deque[Load] = deque()
        self._plan: TransferPlan
        self._lane: Lane | None = None
        self._loader: Loader | None = None
        self._sink: WeightSink | None = None
        self._locked = False
        self._epoch = receiver.epoch
        self._tore = False

    def refit(self) -> dict[str, Any]:
        """See :meth:`Job.refit`."""
        session, receiver = self.session, self._receiver
        before, self.before = self.before, None
        if before is not None and before.session.phase is Phase.COMMITTED:
            return before.summary  # the call before took the refit that this one was for
        self._end = receiver.end(self.transport, self.trainer)
        try:
            if self._meet():
                self._end.connect(self.trainer.channels[self.transport])
                self.perform(session.start())
                self.drive()
        finally:
            try:
                self._release()
            finally:
                self._end.disconnect()
        if session.error is not None:
            receiver.drop_broken_lanes()
            receiver.clear_away()
            raise session.error
        self.summary = {
            "version": receiver.version,
            "bytes": self._plan.nbytes,
            "seconds": sum(session.phase_seconds.values()),
            "name": receiver.name,
        }
        return self.summary

    def let_go(self) -> None:
        """See :meth:`Job.let_go`."""
        self._lane = self._loader = self._sink = None
        self._loads.clear()

    def _meet(self) -> bool:
        """Waits for the sender where that comes first; False if the session ended meanwhile."""
        meeting = self._receiver.meeting(self._end, self.session.remaining_s)
        while not meeting.done():
            if self.given_up or not self.session.remaining_s:
                self.look()
                return False
            concurrent.futures.wait([meeting], TICK_S)
        meeting.result()
        return True

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
        if self._loads and not self.session.phase.terminal:
            self.perform(self._load_next())

    def lost_peers(self) -> list[Effect]:
        """See :meth:`Job.lost_peers`."""
        return self.session.lost("died or does not answer") if self._end.lost() else []

    def do(self, effect: Effect) -> list[Effect]:
        """See :meth:`Job.do`."""
        session = self.session
        match effect:
            case Send(Hello() as hello):
                self._end.send(write_hello(hello, self.trainer.token))
            case Send(message):
                self._end.send(self._channel.encode(message))
            case Attach(prepare, offer):
                if offer.isolation == "staged" or self._quiesce():
                    return session.attached(self._attach(prepare, offer))
            case Announced(index):
                bucket = self._plan.buckets[index]
                assert self._lane is not None
                self._lane.expect(bucket.start, bucket.stop)
            case Load():
                self._loads.append(effect)
            case Install(offer, digest):
                if self._locked or self._quiesce():
                    return session.installed(self._install(offer, digest))
            case Publish(version):
                self._publish(version)
                return session.published()
        return []

    def _load_next(self) -> list[Effect]:
        """Loads the first bucket that waits, once its bytes are here."""
        load = self._loads[0]
        assert self._lane is not None
        assert self._loader is not None
        self.session.at = self._plan.buckets[load.index].name
        try:
            if not self._lane.arrived():
                time.sleep(_PAUSE_S)
                return []
            self._loads.popleft()
            self._loader.load(load.index, load.digests)
            self._lane.release()
        except BaseException as error:  # the session tells the sender, and ends with it
            return self.session.fail(error)
        return self.session.loaded(load.index)

    # -- what is done with it ---------------------------------------------------------------------

    def _quiesce(self) -> bool:
        """Waits for the engine to stop generating; False if the session ended meanwhile."""
        session, lock = self.session, self._receiver.lock
        session.held_up = "generation"
        try:
            while not lock.acquire(timeout=TICK_S):
                self.pump(0.0)
                self.look()
                if session.phase.terminal:
                    return False
            self._locked = True
        finally:
            session.held_up = ""
            if not self._locked:
                leave_line(lock)
        return True

    def _attach(self, prepare: Prepare, offer: Offer) -> str:
        """Derives the plan, attaches to the lane and opens the sink; the plan's digest."""
        receiver, trainer = self._receiver, self.trainer
        wire = trainer.manifest.cast(trainer.dtypes)
        if len(prepare.skip) not in (0, len(wire.owned)):
            raise RefitProtocolError("the sender skips tensors of another model", phase="PREPARE")
        block_hash = BlockHash.named(prepare.hash, private=self._end.private, token=trainer.token)
        self._plan = plan = receiver.planner.plan(
            wire,
            prepare.bucket_bytes,
            direct=prepare.direct,
            skip=prepare.skip,
            block=block_hash.block,
        )
        if plan.digest != prepare.plan or len(plan.buckets) != prepare.buckets:
            raise RefitProtocolError("the two sides derive different plans", phase="PREPARE")
        receiver.sets.give_up()
        if offer.delta:  # what it said to hold is not sent
            receiver.check_epoch(self._epoch)
        self._epoch = receiver.epoch
        sink = receiver.sink_for(self.refit_id)
        device = torch.device(sink.device)
        self._lane = receiver.lane(self._end, plan, prepare.lane, device)
        if offer.kv_scales and type(sink).scale_kv is WeightSink.scale_kv:
            sink.scale_kv(offer.kv_scales)  # refuses, and nothing was touched
        expected = receiver.manifest_of(sink)
        receiver.check_match(wire, expected)
        known, touch = receiver.known, self._touch
        if offer.isolation == "staged":
            sink, known, touch = self._staged(sink, wire, expected), dict(known), _nothing
        sink.begin(offer.version)
        self._sink = sink
        route = receiver.route(sink, wire, expected, plan, self._lane, block_hash)
        self._loader = Loader(route, verify=offer.verify, known=known, touch=touch)
        return plan.digest

    def _staged(
        self, sink: WeightSink, wire: WeightManifest, expected: WeightManifest
    ) -> StagedSink:
        if self.session.offer is not None and self.session.offer.kv_scales:
            raise CapabilityError(
                "key/value scales cannot be taken back, so they do not travel with a staged refit",
                fix='use isolation="quiesced"',
                capability="staged",
            )
        sent = {wire.owned[index].name for index in self._plan.sent}
        names = {spec.name for spec in expected.owned if wire.root(spec.name) in sent}
        receiver = self._receiver
        return StagedSink(sink, names, receiver.version, receiver.second_copy, self._touch)

    def _install(self, offer: Offer, digest: str) -> str:
        """Finishes the sink and verifies what is there; the digest of all of it."""
        self.session.at = ""
        assert self._sink is not None
        assert self._loader is not None
        self._receiver.check_epoch(self._epoch)
        try:
            found = self._loader.check_sealed(digest)
            if offer.kv_scales:
                self._touch()  # also where no tensor was sent
                self._sink.scale_kv(offer.kv_scales)
            self._sink.finish(offer.version)
            _settle(self._sink)
            if offer.verify == "installed":
                self._loader.check_installed()
        except RefitCorrupted:
            self._receiver.known = {}  # who knows what else is not as it was thought to be
            raise
        return found

    def _publish(self, version: int) -> None:
        assert self._loader is not None
        self.session.touch()
        self._receiver.check_epoch(self._epoch)
        self._receiver.publish(version)
        self._receiver.known = self._loader.table.known
        self._receiver.give_back()  # before the sender is told: it may free the memory at once
        self._sink = None

    def _holds(self) -> bytes:
        """The digests of what the engine is known to have, in the trainer's order."""
        self._epoch = self._receiver.epoch
        wire = self.trainer.manifest.cast(self.trainer.dtypes)
        return DigestTable(wire, self._receiver.known).flat

    def _touch(self) -> None:
        self.session.touch()
        if not self._receiver.torn:
            self._receiver.torn = self._tore = True

    def _release(self) -> None:
        """Tells the sink of a failure, and lets the engine generate again if it may."""
        try:
            if self._sink is not None:
                self._sink.fail()
                _settle(self._sink)
                untouched = self._epoch == self._receiver.epoch
                if isinstance(self._sink, StagedSink) and self._tore and untouched:
                    self._receiver.torn = False  # all is as it was
        except Exception as error:
            self._receiver.forget()
            raise WeightsTornError(
                f"{self._receiver.name}: the engine could not be told of a refit that failed: "
                f"{type(error).__name__}: {error}",
                fix="refit again",
                phase=self.session.phase.value,
            ) from error
        finally:
            self._receiver.give_back()
            if self._locked:
                self._receiver.lock.release()


def _settle(sink: WeightSink) -> None:
    """Waits until what was written is there: engines compute on streams of their own."""
    device = torch.device(sink.device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _nothing() -> None:
    """A second copy may be written at any time."""
