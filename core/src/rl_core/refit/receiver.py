"""The engine's endpoint: takes refits, and knows whether the weights are whole."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from rl_core.errors import (
    LifecycleError,
    RefitAborted,
    RefitProtocolError,
    WeightsTornError,
)
from rl_core.futures import spawn
from rl_core.interfaces.weights import TensorSpec  # noqa: TC001 - msgspec resolves it
from rl_core.refit.handles import Taking
from rl_core.refit.hashing import BlockHash
from rl_core.refit.jobs import Endpoint, exclusively
from rl_core.refit.loading import Route
from rl_core.refit.manifest import WeightManifest, compare
from rl_core.refit.messages import PROTOCOL, Codec, Handles
from rl_core.refit.options import DEFAULT_DEADLINE_S
from rl_core.refit.plan import Planner
from rl_core.refit.receiving import Receiving
from rl_core.refit.transports import find_transport
from rl_core.refit.transports.base import CPU, NoLane

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Mapping

    import torch

    from rl_core.interfaces.weights import WeightSink
    from rl_core.refit.plan import TransferPlan
    from rl_core.refit.transports.base import Lane, ReceiverEnd

__all__ = ["RefitReceiver", "Trainer"]

T = TypeVar("T")


class _Info(msgspec.Struct, frozen=True):
    protocol: Literal[2]
    digest: str
    tensors: tuple[TensorSpec, ...]
    token: str
    channels: dict[str, dict[str, Any]]


class _HandleInfo(msgspec.Struct, frozen=True):
    protocol: Literal[2]
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
class Trainer:
    """What ``prepare`` learnt of the other side."""

    manifest: WeightManifest
    token: str
    channels: dict[str, dict[str, Any]]
    dtypes: dict[str, str]


class Lock(Protocol):
    """What a receiver asks of a lock; one of :mod:`threading` will do."""

    def acquire(self, *, timeout: float = ...) -> bool:
        """Whether it was had in time."""

    def release(self) -> None:
        """Gives it back."""


class RefitReceiver(Endpoint["Receiving"]):
    """Takes weights into an engine; one for the engine's whole life.

    Args:
        sink: Where to write; called for each refit, and to look at what there is.
        name: How errors on the other side call this one.
        lock: Held while the engine generates, and by a refit while it writes.
        on_commit: Called with the new version before it serves; drops caches.

    Attributes:
        torn: True while the weights are neither old nor new.
        known: Digests, by name, of the tensors that the engine is known to have.
        id: Tells this receiver from all others.
        planner: Keeps the last plans.
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
        self.known: dict[str, bytes] = {}
        self.id = secrets.token_hex(16)
        self.planner = Planner()
        self.second_copy: dict[str, torch.Tensor] = {}
        self.lock = lock
        self.new_sink = sink
        self._on_commit = on_commit
        self._trainer: Trainer | None = None
        self._expected: WeightManifest | None = None
        self._matched: tuple[WeightManifest | None, WeightManifest | None] = (None, None)
        self._ends: dict[str, tuple[dict[str, Any], ReceiverEnd]] = {}
        self._lanes: dict[tuple[ReceiverEnd, bool], Lane] = {}
        self._meetings: dict[ReceiverEnd, concurrent.futures.Future[None]] = {}
        self._route: Route | None = None
        self._taking: Taking | None = None
        self._taken = ""  # the last refit by handles that is over
        self._waited: Receiving | None = None

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

    def forget(self) -> None:
        """The engine's weights were changed by something else: a delta must not rely on them."""
        self.known = {}

    # -- refits -----------------------------------------------------------------------------------

    def prepare(self, info: dict[str, Any]) -> None:
        """Takes what the sender's ``prepare`` returned.

        Raises:
            RefitProtocolError: It is not such a dict, or of another protocol version.
            ManifestMismatchError: The tensors are not those of the engine; nothing was touched.
        """
        self.check_open()
        sink = self.new_sink()
        expected = self.manifest_of(sink)
        theirs = _convert(info, _Info, "prepare_refit_info()")
        known = None if self._trainer is None else self._trainer.manifest
        manifest = WeightManifest.of(theirs.tensors, known)
        if manifest.digest != theirs.digest:
            raise RefitProtocolError(
                f"{self.name}: the trainer's tensors do not have the digest that came with them",
                phase="DISCOVER",
            )
        dtypes = compare(manifest, expected, casts=sink.casts)
        trainer = Trainer(manifest, theirs.token, theirs.channels, dtypes)
        for job in self.waiting():
            if job.trainer != trainer:
                job.cancelled = "the engine was prepared for other tensors or another trainer"
        if self._trainer is not None and self._trainer.channels != trainer.channels:
            self.clear_away()  # the one before may be dead, which its last refit saw too early
        self._trainer = trainer
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
                job.cancelled = f"the transport {transport} is opened anew"
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
        self, *, transport: str = "ipc", deadline_s: float = DEFAULT_DEADLINE_S
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts to take one refit from the sender that ``prepare`` was told of.

        Args:
            transport: Name of the transport that the sender uses.
            deadline_s: Seconds for the whole refit, the wait for the sender included.

        Returns:
            A future of a dict with ``version``, ``bytes``, ``seconds`` and ``name``.

        Raises:
            LifecycleError: ``prepare`` was not called, or the sender does not offer the transport.
        """
        trainer = self._known_trainer()
        self._address(trainer, transport)
        job = Receiving(self, transport, trainer, deadline_s)
        job.before, self._waited = self._waited or self._last_waiting(), None
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
        frame = _convert(handles, _HandleInfo, "get_weights_ipc_handles(keys)").frame
        message = Codec[Handles](Handles, trainer.token).decode(frame)
        with (
            exclusively(self.turn, DEFAULT_DEADLINE_S, f"{self.name}: the refit before this one"),
            exclusively(self.lock, DEFAULT_DEADLINE_S, f"{self.name}: generation"),
        ):
            self.check_open()
            self._take(trainer, message)
        return True

    def _take(self, trainer: Trainer, message: Handles) -> None:
        if message.session == self._taken:
            raise RefitAborted(
                f"{self.name}: the refit of these handles is over",
                fix="begin another with prepare_weights_for_ipc",
                phase="TRANSFER",
            )
        if self._taking is not None and self._taking.session != message.session:
            self.give_up_handles()
        if self._taking is None:
            sink, manifest = self.new_sink(), trainer.manifest
            self._taking = Taking(sink, manifest, message, known=self.known, touch=self._tear)
        try:
            end = self.end("ipc")
            lane = self._attach(end, False, message.lane, CPU)
            block_hash = BlockHash.choose(CPU, private=end.private, token=trainer.token)
            if self._taking.load(message, lane, block_hash):
                self._taking.sink.finish(message.version)
                self.publish(message.version)
                self._taking, self._taken = None, message.session
        except BaseException:
            self.give_up_handles()
            raise

    def give_up_handles(self) -> None:
        """Ends a refit by handles that is not complete, and will not be."""
        taking, self._taking = self._taking, None
        if taking is not None:
            self._taken = taking.session
            taking.sink.fail()

    # -- what is held, and asked for by the refits ------------------------------------------------

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
        """Drops what refits keep of the engine's tensors, so that their memory can be freed."""
        self._route = None
        self.second_copy = {}

    def give_back(self) -> None:
        """Lets go of the trainer's own memory, if it could not be freed otherwise."""
        for key in [key for key, lane in self._lanes.items() if key[1] and lane.borrows]:
            if self._route is not None:
                self._route.let_go()
                self._route = None
            self._lanes.pop(key).close()

    def drop_broken_lanes(self) -> None:
        """After a failure: lets go of lanes that it may have broken."""
        for key, lane in list(self._lanes.items()):
            if not lane.outlives_failure:
                self._lanes.pop(key).close()

    def clear_away(self) -> None:
        """Removes what a trainer that was killed left behind on transports not used here."""
        channels = {} if self._trainer is None else self._trainer.channels
        for transport, address in channels.items():
            if transport not in self._ends:
                find_transport(transport).receiver(address).close()

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

    def _tear(self) -> None:
        self.torn = True

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
        address = self._address(trainer or self._known_trainer(), transport)
        known = self._ends.get(transport)
        if known is not None and known[0] == address:
            return known[1]
        return self._connect(transport, address, {})

    def _address(self, trainer: Trainer, transport: str) -> dict[str, Any]:
        if transport not in trainer.channels:
            raise LifecycleError(
                f"{self.name}: the trainer offers {', '.join(trainer.channels)}, not {transport}",
                fix="open it on both sides (init_collective), then prepare_refit_info again",
            )
        return trainer.channels[transport]

    def _connect(
        self, transport: str, address: dict[str, Any], options: dict[str, Any]
    ) -> ReceiverEnd:
        self._disconnect(transport)
        end = find_transport(transport).receiver(address, **options)
        self._ends[transport] = (address, end)
        return end

    def _disconnect(self, transport: str) -> None:
        if transport in self._ends:
            _, end = self._ends.pop(transport)
            self._meetings.pop(end, None)
            for key in [key for key in self._lanes if key[0] is end]:
                self._lanes.pop(key).close()
            end.close()

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
