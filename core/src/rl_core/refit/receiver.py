"""The engine's endpoint: takes refits, and knows whether the weights are whole."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from rl_core.errors import LifecycleError, RefitAborted, RefitProtocolError, WeightsTornError
from rl_core.interfaces.weights import TensorSpec  # noqa: TC001 - msgspec resolves it
from rl_core.refit.jobs import DEFAULT_DEADLINE_S, TICK_S, Endpoint, Job, exclusively
from rl_core.refit.manifest import WeightManifest, compare
from rl_core.refit.messages import (
    PROTOCOL,
    Codec,
    FromSender,
    Handles,
    Hello,
    Offer,
    Prepare,
    Process,
)
from rl_core.refit.packing import Unpacker
from rl_core.refit.plan import group_plan, make_plan
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
from rl_core.refit.transports.ipc import IpcClient, remove_channel
from rl_core.refit.transports.memory import SharedRegion
from rl_core.refit.transports.process import is_alive, this_process

if TYPE_CHECKING:
    import concurrent.futures
    import threading
    from collections.abc import Callable

    from rl_core.interfaces.weights import WeightSink
    from rl_core.refit.messages import RegionRef

__all__ = ["RefitReceiver"]

T = TypeVar("T")


class _Channel(Process, frozen=True, forbid_unknown_fields=True):
    address: str
    token: str


class _Info(msgspec.Struct, frozen=True):
    protocol: Literal[1]
    digest: str
    tensors: tuple[TensorSpec, ...]
    channel: _Channel


class _HandleInfo(msgspec.Struct, frozen=True):
    protocol: Literal[1]
    frame: bytes


def _convert(given: object, kind: type[T], origin: str) -> T:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise RefitProtocolError(
            f"this is not what refit protocol {PROTOCOL} hands over: {error}",
            fix=f"pass what the policy's {origin} returned",
            phase="DISCOVER",
        ) from error


@dataclass(frozen=True, slots=True)
class _Trainer:
    """What ``prepare`` learnt of the other side."""

    manifest: WeightManifest
    channel: _Channel
    dtypes: dict[str, str]


class RefitReceiver(Endpoint["_Receiving"]):
    """Takes weights into an engine; one for the engine's whole life.

    Args:
        sink: Where to write; called once for each refit.
        name: How errors on the other side call this one.
        lock: Held while the engine generates, and by a refit while it writes.
        on_commit: Called with the new version before it serves; drops caches.

    Attributes:
        torn: True while the weights are neither old nor new.
    """

    def __init__(
        self,
        sink: Callable[[], WeightSink],
        *,
        name: str,
        lock: threading.RLock,
        on_commit: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(name)
        self.torn = False
        self._sink = sink
        self._lock = lock
        self._on_commit = on_commit
        self._id = secrets.token_hex(16)
        self._trainer: _Trainer | None = None
        self._region: SharedRegion | None = None
        self._taking: _Taking | None = None
        self._taken = ""  # the last refit by handles that is over
        self._waited: _Receiving | None = None

    def check(self) -> None:
        """Raises unless the weights are whole.

        Raises:
            WeightsTornError: A refit failed, or a refit by handles is not complete.
        """
        if self.torn:
            raise WeightsTornError(
                f"{self.name}: the weights are partly of version {self.version} and partly newer",
                fix="refit again; the engine needs no restart",
                version=self.version,
            )

    def prepare(self, info: dict[str, Any]) -> None:
        """Takes what the sender's ``prepare`` returned.

        Raises:
            RefitProtocolError: It is not such a dict, or of another protocol version.
            ManifestMismatchError: The tensors are not those of the engine; nothing was touched.
        """
        self.check_open()
        theirs = _convert(info, _Info, "prepare_refit_info()")
        manifest = WeightManifest(theirs.tensors)
        if manifest.digest != theirs.digest:
            raise RefitProtocolError(
                f"{self.name}: the trainer's tensors do not have the digest that came with them",
                phase="DISCOVER",
            )
        sink = self._sink()
        dtypes = compare(manifest, WeightManifest.of(sink.specs()), casts=sink.casts)
        trainer = _Trainer(manifest, theirs.channel, dtypes)
        for job in self.waiting():
            if job.trainer != trainer:
                job.cancelled = "the engine was prepared for other tensors or another trainer"
        self._trainer = trainer
        self._waited = self._last_waiting()

    def receive_ipc(
        self, *, deadline_s: float = DEFAULT_DEADLINE_S, **unknown: Any
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts to take one refit from the sender that ``prepare`` was told of.

        Args:
            deadline_s: Seconds for the whole refit, the wait for the sender included.
            **unknown: Refused.

        Returns:
            A future of a dict with ``version``, ``bytes``, ``seconds`` and ``name``.

        Raises:
            LifecycleError: ``prepare`` was not called.
        """
        job = _Receiving(self, self._known_trainer(), deadline_s)
        job.before, self._waited = self._waited or self._last_waiting(), None
        return self.start(job, unknown)

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
        frame = _convert(handles, _HandleInfo, "get_weights_ipc_handles(keys)").frame
        message = Codec[Handles](Handles, trainer.channel.token).decode(frame)
        with (
            exclusively(self.turn, DEFAULT_DEADLINE_S, f"{self.name}: the refit before this one"),
            exclusively(self._lock, DEFAULT_DEADLINE_S, f"{self.name}: generation"),
        ):
            self.check_open()
            self._take(trainer, message)
        return True

    def let_go(self) -> None:
        """See :meth:`Endpoint.let_go`."""
        if self._region is not None:
            self._region.close()
            self._region = None
        if self._trainer is not None and not is_alive(self._trainer.channel):
            remove_channel(self._trainer.channel.address)

    def _take(self, trainer: _Trainer, message: Handles) -> None:
        if message.session == self._taken:
            raise RefitAborted(
                f"{self.name}: the refit of these handles is over",
                fix="begin another with prepare_weights_for_ipc",
                phase="TRANSFER",
            )
        if self._taking is not None and self._taking.session != message.session:
            self._give_up_taking()
        taking = self._taking = self._taking or _Taking(self, trainer, message)
        try:
            if taking.load(message, self._attach(message.region)):
                taking.sink.finish(message.version)
                self._publish(message.version)
                self._taking, self._taken = None, message.session
        except BaseException:
            self._give_up_taking()
            raise

    def _give_up_taking(self) -> None:
        """Ends a refit by handles that is not complete, and will not be."""
        taking, self._taking = self._taking, None
        if taking is not None:
            self._taken = taking.session
            taking.sink.fail()

    def _last_waiting(self) -> _Receiving | None:
        return next((job for job in reversed(self.waiting()) if not job.cancelled), None)

    def _known_trainer(self) -> _Trainer:
        self.check_open()
        if self._trainer is None:
            raise LifecycleError(
                f"{self.name}: no trainer is known",
                fix="call prepare_refit_info(policy.prepare_refit_info()) first",
            )
        return self._trainer

    def _attach(self, ref: RegionRef) -> SharedRegion:
        """The sender's shared memory, mapped once for as long as it stays the same."""
        if self._region is None or self._region.ref != ref:
            if self._region is not None:
                self._region.close()
                self._region = None
            self._region = SharedRegion.attach(ref)
        return self._region

    def _publish(self, version: int) -> None:
        if self._on_commit is not None:
            self.torn = True  # until the caches of the old weights are gone
            self._on_commit(version)
        self.version = version
        self.torn = False

    def tear(self) -> None:
        """The next write makes the weights neither old nor new."""
        self.torn = True


class _Taking:
    """A refit by handles in progress."""

    def __init__(self, receiver: RefitReceiver, trainer: _Trainer, message: Handles) -> None:
        if message.manifest != trainer.manifest.digest:
            raise RefitAborted(
                "the trainer's tensors are no longer those that were checked",
                fix="pass the policy's prepare_refit_info() to the engine again",
                phase="PREPARE",
            )
        self.session = message.session
        self.sink = receiver._sink()
        self.sink.begin(message.version)
        self._manifest = trainer.manifest
        self._unpacker = Unpacker(
            self.sink,
            trainer.manifest,
            WeightManifest.of(self.sink.specs()),
            session=message.session,
            verify="wire",
            touch=receiver.tear,
        )
        self._left = {spec.name for spec in trainer.manifest.owned}

    def load(self, message: Handles, region: SharedRegion) -> bool:
        """Writes one group; True once all are there."""
        keys = set(message.keys)
        plan = group_plan(self._manifest, message.keys)
        found = {segment.spec.name for b in plan.buckets for segment in b.segments}
        if found != keys or plan.slot_bytes > region.ref.nbytes:
            raise RefitProtocolError("handles of tensors that are not in the manifest")
        for bucket in plan.buckets:
            self._unpacker.load(0, bucket, region.data, region.view, message.digest)
        self._left -= keys
        return not self._left


class _Receiving(Job[ReceiverSession]):
    """One refit over ``ipc``."""

    def __init__(self, receiver: RefitReceiver, trainer: _Trainer, deadline_s: float) -> None:
        session = ReceiverSession(
            Hello(PROTOCOL, receiver._id, receiver.name, this_process()),
            manifest=trainer.manifest.digest,
            dtypes=trainer.dtypes,
            deadline_s=deadline_s,
        )
        super().__init__(session, receiver)
        self.trainer = trainer
        self.before: _Receiving | None = None
        self.summary: dict[str, Any] = {}
        self._receiver = receiver
        self._codec = Codec[FromSender](FromSender, trainer.channel.token)
        self._sink: WeightSink | None = None
        self._locked = False

    def refit(self) -> dict[str, Any]:
        """See :meth:`Job.refit`."""
        receiver, session, channel = self._receiver, self.session, self.trainer.channel
        before, self.before = self.before, None
        if before is not None and before.session.phase is Phase.COMMITTED:
            return before.summary  # the call before took the refit that this one was for
        self._client = IpcClient(channel.address)
        try:
            self.perform(session.start())
            self.drive()
        finally:
            try:
                self._release()
            finally:
                self._client.close()
        if session.error is not None:
            if not is_alive(channel):
                receiver.let_go()
            raise session.error
        self.summary = {
            "version": receiver.version,
            "bytes": self._wire.nbytes,
            "seconds": sum(session.phase_seconds.values()),
            "name": receiver.name,
        }
        return self.summary

    def pump(self, timeout_s: float) -> None:
        """See :meth:`Job.pump`."""
        frame = self._client.receive(timeout_s)
        if frame is None:
            return
        try:
            effects = self.session.receive(self._codec.decode(frame))
        except RefitProtocolError as error:
            effects = self.session.fail(error)
        self.perform(effects)

    def lost_peers(self) -> list[Effect]:
        """See :meth:`Job.lost_peers`."""
        return [] if is_alive(self.trainer.channel) else self.session.lost("died")

    def do(self, effect: Effect) -> list[Effect]:
        """See :meth:`Job.do`."""
        session = self.session
        match effect:
            case Send(message):
                self._client.send(self._codec.encode(message))
            case Attach(prepare, offer):
                if self._quiesce():
                    return session.attached(self._attach(prepare, offer))
            case Load(index, digest):
                slot = self._region.slot(index % self._prepare.slots, self._plan.slot_bytes)
                self._unpacker.load(index, self._plan.buckets[index], *slot, digest)
                return session.loaded(index)
            case Install(offer):
                assert self._sink is not None
                self._sink.finish(offer.version)
                if offer.verify == "installed":
                    self._unpacker.check_installed(self._plan.slot_bytes)
                return session.installed()
            case Publish(version):
                session.touch()
                self._receiver._publish(version)
                self._sink = None
                return session.published()
        return []

    def _quiesce(self) -> bool:
        """Waits for the engine to stop generating; False if the session ended meanwhile."""
        while not self._receiver._lock.acquire(timeout=TICK_S):
            self.pump(0.0)
            self.look()
            if self.session.phase.terminal:
                return False
        self._locked = True
        return True

    def _attach(self, prepare: Prepare, offer: Offer) -> str:
        """Derives the plan, maps the buffers and opens the sink; the plan's digest."""
        receiver = self._receiver
        self._prepare = prepare
        self._wire = self.trainer.manifest.cast(self.trainer.dtypes)
        self._plan = make_plan(self._wire, prepare.bucket_bytes)
        if self._plan.digest != prepare.plan or len(self._plan.buckets) != prepare.buckets:
            raise RefitProtocolError("the two sides derive different plans", phase="PREPARE")
        if prepare.region is not None:
            if prepare.region.nbytes < prepare.slots * self._plan.slot_bytes:
                raise RefitProtocolError("the buffers are smaller than the plan needs")
            self._region = receiver._attach(prepare.region)
        receiver._give_up_taking()
        sink = receiver._sink()
        expected = WeightManifest.of(sink.specs())
        compare(self._wire, expected)
        sink.begin(offer.version)
        self._sink = sink
        self._unpacker = Unpacker(
            sink,
            self._wire,
            expected,
            session=offer.session,
            verify=offer.verify,
            touch=self._touch,
        )
        return self._plan.digest

    def _touch(self) -> None:
        self.session.touch()
        self._receiver.tear()

    def _release(self) -> None:
        """Tells the sink of a failure, and lets the engine generate again if it may."""
        try:
            if self._sink is not None:
                self._sink.fail()
        finally:
            if self._locked:
                self._receiver._lock.release()
