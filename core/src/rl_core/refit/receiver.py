"""The engine's endpoint: takes refits, and knows whether the weights are whole."""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from rl_core.errors import (
    ConfigError,
    LifecycleError,
    RefitAborted,
    RefitProtocolError,
    WeightsTornError,
)
from rl_core.futures import spawn
from rl_core.interfaces.weights import TensorSpec  # noqa: TC001 - msgspec resolves it
from rl_core.refit.manifest import WeightManifest, compare
from rl_core.refit.messages import PROTOCOL, Codec, FromSender, Handles, Hello, Prepare, Process
from rl_core.refit.packing import Unpacker
from rl_core.refit.plan import group_plan, make_plan
from rl_core.refit.sender import DEFAULT_DEADLINE_S, TICK_S
from rl_core.refit.session import (
    Attach,
    Effect,
    Install,
    Load,
    Publish,
    ReceiverSession,
    Send,
)
from rl_core.refit.transports.ipc import IpcClient, remove_channel
from rl_core.refit.transports.memory import SharedRegion
from rl_core.refit.transports.process import is_alive, this_process

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Iterable

    from rl_core.interfaces.weights import WeightSink
    from rl_core.refit.messages import RegionRef

__all__ = ["RefitReceiver"]

T = TypeVar("T")


class _Channel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    address: str
    token: str
    pid: int
    started: str
    namespace: str

    @property
    def process(self) -> Process:
        return Process(self.pid, self.started, self.namespace)


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


class RefitReceiver:
    """Takes weights into an engine; one for the engine's whole life.

    Args:
        sink: Where to write; called once for each refit.
        name: How errors on the other side call this one.
        lock: Held while the engine generates, and by a refit while it writes.
        on_commit: Called with the new version before it serves; drops caches.

    Attributes:
        version: Of the weights that serve; moves only on commit.
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
        self.version = 0
        self.torn = False
        self._sink = sink
        self._name = name
        self._lock = lock
        self._on_commit = on_commit
        self._id = secrets.token_hex(16)
        self._trainer: _Trainer | None = None
        self._region: SharedRegion | None = None
        self._taking: _Taking | None = None
        self._turn = threading.Lock()
        self._job: _Receiving | None = None
        self._closed = False

    def check(self) -> None:
        """Raises unless the weights are whole.

        Raises:
            WeightsTornError: A refit failed, or a refit by handles is not complete.
        """
        if self.torn:
            raise WeightsTornError(
                f"{self._name}: the weights are partly of version {self.version} and partly newer",
                fix="refit again; the engine needs no restart",
                version=self.version,
            )

    def prepare(self, info: dict[str, Any]) -> None:
        """Takes what the sender's ``prepare`` returned.

        Raises:
            RefitProtocolError: It is not such a dict, or of another protocol version.
            ManifestMismatchError: The tensors are not those of the engine; nothing was touched.
        """
        self._check_open()
        theirs = _convert(info, _Info, "prepare_refit_info()")
        manifest = WeightManifest(theirs.tensors)
        if manifest.digest != theirs.digest:
            raise RefitProtocolError(
                f"{self._name}: the trainer's tensors do not have the digest that came with them",
                phase="DISCOVER",
            )
        sink = self._sink()
        dtypes = compare(manifest, WeightManifest.of(sink.specs()), casts=sink.casts)
        self._trainer = _Trainer(manifest, theirs.channel, dtypes)

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
        if unknown:
            key = next(iter(unknown))
            raise ConfigError(f"refit: unknown option {key!r}", fix="use deadline_s", key=key)
        trainer = self._known_trainer()
        if self._job is not None:
            self._job.supersede()
        job = self._job = _Receiving(self, trainer, deadline_s)
        return spawn(f"refit-{self._name}", job.run)

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
        with self._turn, self._lock:
            self._check_open()
            if self._taking is None or self._taking.session != message.session:
                if self._taking is not None:
                    self._taking.sink.fail()
                self._taking = _Taking(self, trainer, message)
            try:
                complete = self._taking.load(message, self._attach(message.region))
                if complete:
                    self._taking.sink.finish(message.version)
                    self._publish(message.version)
                    self._taking = None
            except BaseException:
                if self._taking is not None:
                    self._taking.sink.fail()
                    self._taking = None
                raise
        return True

    def close(self) -> None:
        """Ends a running refit and lets go of sockets and shared memory. Idempotent."""
        self._closed = True
        if self._job is not None:
            self._job.cancel.set()
        with self._turn:
            if self._region is not None:
                self._region.close()
                self._region = None
        if self._trainer is not None and not is_alive(self._trainer.channel.process):
            remove_channel(self._trainer.channel.address)

    def _check_open(self) -> None:
        if self._closed:
            raise LifecycleError(f"{self._name}: the receiver is closed", fix="build a new backend")

    def _known_trainer(self) -> _Trainer:
        self._check_open()
        if self._trainer is None:
            raise LifecycleError(
                f"{self._name}: no trainer is known",
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

    def _tear(self) -> None:
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
            touch=receiver._tear,
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


class _Receiving:
    """One refit over ``ipc``: performs the session's effects."""

    def __init__(self, receiver: RefitReceiver, trainer: _Trainer, deadline_s: float) -> None:
        self.cancel = threading.Event()
        self._receiver = receiver
        self._trainer = trainer
        self._until = time.monotonic() + deadline_s
        self._session: ReceiverSession | None = None
        self._sink: WeightSink | None = None
        self._locked = False

    def supersede(self) -> None:
        """Gives up if nothing was written yet."""
        if self._session is None or not self._session.touched:
            self.cancel.set()

    def run(self) -> dict[str, Any]:
        """Runs the refit to its end; a summary, or its error raised."""
        receiver = self._receiver
        remaining = max(0.0, self._until - time.monotonic())
        if not receiver._turn.acquire(timeout=remaining):
            raise RefitAborted(
                f"{receiver._name}: the refit before this one did not end in time",
                fix="raise deadline_s, or find out why that one hangs",
                phase="DISCOVER",
            )
        try:
            receiver._check_open()
            return self._run(receiver)
        finally:
            receiver._turn.release()

    def _run(self, receiver: RefitReceiver) -> dict[str, Any]:
        channel, started = self._trainer.channel, time.monotonic()
        self._client = IpcClient(channel.address)
        self._codec = Codec[FromSender](FromSender, channel.token)
        session = self._session = ReceiverSession(
            Hello(PROTOCOL, receiver._id, receiver._name, this_process()),
            manifest=self._trainer.manifest.digest,
            dtypes=self._trainer.dtypes,
            deadline_s=max(0.0, self._until - time.monotonic()),
        )
        try:
            self._loop(session)
        finally:
            self._release()
            self._client.close()
        if session.error is not None:
            if not is_alive(channel.process):
                remove_channel(channel.address)
            raise session.error
        return {
            "version": receiver.version,
            "bytes": self._wire.nbytes,
            "seconds": time.monotonic() - started,
            "name": receiver._name,
        }

    def _loop(self, session: ReceiverSession) -> None:
        self._perform(session, session.start())
        watch = 0.0
        while not session.phase.terminal:
            self._pump(session, TICK_S)
            if time.monotonic() >= watch:
                watch = time.monotonic() + TICK_S
                self._perform(session, self._watch(session))

    def _pump(self, session: ReceiverSession, timeout_s: float) -> None:
        frame = self._client.receive(timeout_s)
        if frame is None:
            return
        try:
            effects = session.receive(self._codec.decode(frame))
        except RefitProtocolError as error:
            effects = session.fail(error)
        self._perform(session, effects)

    def _watch(self, session: ReceiverSession) -> list[Effect]:
        if self.cancel.is_set():
            closed = self._receiver._closed
            why = "the receiver was closed" if closed else "a newer refit was asked for"
            return session.fail(RefitAborted(f"{session.phase}: {why}"))
        if not is_alive(self._trainer.channel.process):
            return session.lost("died")
        return session.tick()

    def _perform(self, session: ReceiverSession, effects: Iterable[Effect]) -> None:
        for effect in effects:
            try:
                following = self._do(session, effect)
            except Exception as error:  # the session tells the sender and ends with it
                following = session.fail(error)
            self._perform(session, following)

    def _do(self, session: ReceiverSession, effect: Effect) -> list[Effect]:
        match effect:
            case Send(message):
                self._client.send(self._codec.encode(message))
            case Attach(prepare, version):
                if not self._quiesce(session):
                    return []
                return session.attached(self._attach(session, prepare, version))
            case Load(index, digest):
                start = index % self._prepare.slots * self._prepare.slot_bytes
                data = self._region.data[start : start + self._prepare.slot_bytes]
                view = self._region.view[start : start + self._prepare.slot_bytes]
                self._unpacker.load(index, self._plan.buckets[index], data, view, digest)
                return session.loaded(index)
            case Install():
                assert self._sink is not None
                assert session.offer is not None
                self._sink.finish(session.offer.version)
                if session.offer.verify == "installed":
                    self._unpacker.check_installed(self._plan.slot_bytes)
                return session.installed()
            case Publish(version):
                session.touch()
                self._receiver._publish(version)
                self._sink = None
                return session.published()
        return []

    def _quiesce(self, session: ReceiverSession) -> bool:
        """Waits for the engine to stop generating; False if the session ended meanwhile."""
        while not self._receiver._lock.acquire(timeout=TICK_S):
            self._pump(session, 0.0)
            self._perform(session, self._watch(session))
            if session.phase.terminal:
                return False
        self._locked = True
        return True

    def _attach(self, session: ReceiverSession, prepare: Prepare, version: int) -> str:
        """Derives the plan, maps the buffers and opens the sink; the plan's digest."""
        assert session.offer is not None
        receiver = self._receiver
        self._prepare = prepare
        self._wire = self._trainer.manifest.cast(self._trainer.dtypes)
        self._plan = make_plan(self._wire, prepare.bucket_bytes)
        layout = (len(self._plan.buckets), self._plan.slot_bytes)
        if layout != (prepare.buckets, prepare.slot_bytes):
            return self._plan.digest
        if prepare.region is not None:
            if prepare.region.nbytes < prepare.slots * prepare.slot_bytes:
                raise RefitProtocolError("the buffers are smaller than the plan needs")
            self._region = receiver._attach(prepare.region)
        sink = receiver._sink()
        expected = WeightManifest.of(sink.specs())
        compare(self._wire, expected)
        sink.begin(version)
        self._sink = sink
        self._unpacker = Unpacker(
            sink,
            self._wire,
            expected,
            session=session.offer.session,
            verify=session.offer.verify,
            touch=self._touch,
        )
        return self._plan.digest

    def _touch(self) -> None:
        assert self._session is not None
        self._session.touch()
        self._receiver.torn = True

    def _release(self) -> None:
        """Tells the sink of a failure, and lets the engine generate again if it may."""
        try:
            if self._sink is not None:
                self._sink.fail()
        finally:
            if self._locked:
                self._receiver._lock.release()
