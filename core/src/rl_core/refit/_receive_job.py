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
from rl_core.refit._job import Endpoint, Job
from rl_core.refit._layout import keep_two
from rl_core.refit._loading import Loader, Route
from rl_core.refit._staging import StagedSink
from rl_core.refit.frames import Channel, write_hello
from rl_core.refit.hashing import BlockHash
from rl_core.refit.manifest import compare
from rl_core.refit.messages import Hello
from rl_core.refit.plan import make_plan
from rl_core.refit.session import (
    Attach,
    Effect,
    Install,
    Load,
    Phase,
    Publish,
    ReceiverSession,
    Send,
)
from rl_core.refit.timing import TICK_S
from rl_core.refit.transports.cuda import visible_gpus
from rl_core.refit.turns import leave_line, wait_in_line

if TYPE_CHECKING:
    from rl_core.refit._introduction import Trainer
    from rl_core.refit._receiver_state import ReceiverState
    from rl_core.refit.messages import Offer, Prepare
    from rl_core.refit.plan import TransferPlan
    from rl_core.refit.transports.base import Lane, ReceiverEnd

__all__ = ["ReceiveJob"]

#: Seconds between two looks at a lane whose bytes have not arrived.
_PAUSE_S = 0.0002


class ReceiveJob(Job[ReceiverSession]):
    """One refit of a receiver.

    Args:
        endpoint: The receiver whose refits take turns.
        state: What it keeps from refit to refit.
        transport: Name of the transport that the sender uses.
        trainer: Who sends, and what.
        deadline_s: Seconds that it may take.
        refit_id: What the sender was told, too; empty if nothing.

    Attributes:
        earlier: A refit that was waiting when this one was asked for, and may take its place.
        summary: What it did, once it is committed.
    """

    def __init__(
        self,
        endpoint: Endpoint[Any],
        state: ReceiverState,
        transport: str,
        trainer: Trainer,
        deadline_s: float,
        refit_id: str,
    ) -> None:
        nonce = secrets.token_bytes(16)
        session = ReceiverSession(
            Hello(state.id, state.name, os.getpid(), nonce, refit_id),
            manifest=trainer.manifest.digest,
            dtypes=trainer.dtypes,
            holds=self._holds,
            gpus=visible_gpus(state.device),
            deadline_s=deadline_s,
            clock=endpoint.runtime.clock,
        )
        super().__init__(session, endpoint, refit_id)
        self.transport = transport
        self.trainer = trainer
        self.earlier: ReceiveJob | None = None
        self.summary: dict[str, Any] = {}
        self._state = state
        self._end: ReceiverEnd
        self._channel = Channel(trainer.token, nonce, "receiver")
        self._loads: deque[Load] = deque()
        self._plan: TransferPlan
        self._lane: Lane | None = None
        self._loader: Loader | None = None
        self._sink: WeightSink | None = None
        self._locked = False
        self._epoch = state.epoch
        self._tore = False

    def refit(self) -> dict[str, Any]:
        """See :meth:`Job.refit`."""
        session, state = self.session, self._state
        earlier, self.earlier = self.earlier, None
        if earlier is not None and earlier.session.phase is Phase.COMMITTED:
            return earlier.summary  # the earlier call took the refit that this one was for
        self._end = state.end(self.transport, self.trainer)
        try:
            if self._meet():
                self._end.connect(self.trainer.addresses[self.transport])
                self.perform(session.start())
                self.endpoint.runtime.drive(self)
        finally:
            try:
                self._release()
            finally:
                self._end.disconnect()
        if session.error is not None:
            state.drop_broken_lanes()
            state.remove_stale_channels(self.trainer)
            raise session.error
        self.summary = {
            "version": state.version,
            "bytes": self._plan.nbytes,
            "seconds": sum(session.phase_seconds.values()),
            "name": state.name,
        }
        return self.summary

    def release_resources(self) -> None:
        """See :meth:`Job.release_resources`."""
        self._lane = self._loader = self._sink = None
        self._loads.clear()

    def _meet(self) -> bool:
        """Waits for the sender where that comes first; False if the session ended meanwhile."""
        meeting = self._state.meeting(self._end, self.session.remaining_s)
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
                session.touch()
                self._state.check_epoch(self._epoch)
                self._state.publish(version)
                self._state.known = self._loader.table.known
                # Before the sender is told, which may free the memory at once.
                self._state.unmap_trainer_memory()
                self._sink = None
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
        session, lock = self.session, self._state.lock
        session.held_up = "generation"
        try:
            while not wait_in_line(lock, TICK_S):
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

    def _attach(self, prepare: Prepare, offer: Offer) -> int:
        """Derives the plan, attaches to the lane and opens the sink; the plan's buckets."""
        state, wire = self._state, self.trainer.wire
        if len(prepare.skip) not in (0, len(wire.owned)):
            raise RefitProtocolError("the sender skips tensors of another model", phase="PREPARE")
        token, private = self.trainer.token, self._end.private
        block_hash = BlockHash.named(prepare.hash, private=private, token=token)
        if offer.delta:  # what it said to hold is not sent
            state.check_epoch(self._epoch)
        self._epoch = state.epoch  # before the sink is made: that is of this epoch, or a later one
        routes, sink = state.routes, state.sink_for(self.refit_id)
        expected = state.manifest_of(sink)
        size, direct, skip = prepare.bucket_bytes, prepare.direct, prepare.skip
        key = (wire.digest, expected.digest, size, direct, skip, block_hash, offer.isolation)
        route = routes.get(key)
        plan = self._plan = (
            make_plan(wire, size, direct=direct, skip=skip, block=block_hash.block)
            if route is None
            else route.plan
        )
        if plan.digest != prepare.plan:
            raise RefitProtocolError("the two sides derive different plans", phase="PREPARE")
        state.handles.give_up()
        self._lane = state.lane(self._end, plan, prepare.lane, torch.device(sink.device))
        if offer.kv_scales and type(sink).scale_kv is WeightSink.scale_kv:
            sink.scale_kv(offer.kv_scales)  # refuses, and nothing was touched
        if route is None:
            compare(wire, expected)
        known, touch = state.known, self._touch
        if offer.isolation == "staged":
            if offer.kv_scales:
                raise CapabilityError(
                    "key/value scales cannot be taken back, so they do not travel with a staged "
                    "refit",
                    fix='use isolation="quiesced"',
                    capability="staged",
                )
            sent = {wire.owned[index].name for index in plan.sent}
            names = {spec.name for spec in expected.owned if wire.root(spec.name) in sent}
            sink = StagedSink(sink, names, state.version, state.second_copy, self._touch)
            # A second copy may be written at any time, and is not what the engine has.
            known, touch = dict(known), lambda: None
        sink.begin(offer.version)
        self._sink = sink
        if route is None or not route.fits(sink, self._lane.data):
            route = Route(sink, wire, expected, plan, self._lane.data, block_hash)
        keep_two(routes, key, route)
        self._loader = Loader(route, verify=offer.verify, known=known, touch=touch)
        return len(plan.buckets)

    def _install(self, offer: Offer, digest: str) -> None:
        """Finishes the sink and verifies what is there."""
        self.session.at = ""
        assert self._sink is not None
        assert self._loader is not None
        self._state.check_epoch(self._epoch)
        try:
            self._loader.check_sealed(digest)
            if offer.kv_scales:
                self._touch()  # also where no tensor was sent
                self._sink.scale_kv(offer.kv_scales)
            self._sink.finish(offer.version)
            _settle(self._sink)
            if offer.verify == "installed":
                self._loader.check_installed()
        except RefitCorrupted:
            self._state.known = {}  # who knows what else is not as it was thought to be
            raise

    def _holds(self) -> bytes:
        """The digests of what the engine is known to have, in the trainer's order."""
        self._epoch = self._state.epoch
        return DigestTable(self.trainer.wire, self._state.known).flat

    def _touch(self) -> None:
        self.session.touch()
        if not self._state.torn:
            self._state.torn = self._tore = True

    def _release(self) -> None:
        """Tells the sink of a failure, and lets the engine generate again if it may."""
        try:
            if self._sink is not None:
                self._sink.fail()
                _settle(self._sink)
                untouched = self._epoch == self._state.epoch
                if isinstance(self._sink, StagedSink) and self._tore and untouched:
                    self._state.torn = False  # all is as it was
        except Exception as error:
            self._state.forget()
            raise WeightsTornError(
                f"{self._state.name}: the engine could not be told of a refit that failed: "
                f"{type(error).__name__}: {error}",
                fix="refit again",
                phase=self.session.phase.value,
            ) from error
        finally:
            try:
                self._state.unmap_trainer_memory()
            finally:
                if self._locked:
                    self._state.lock.release()


def _settle(sink: WeightSink) -> None:
    """Waits until what was written is there: engines compute on streams of their own."""
    device = torch.device(sink.device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
