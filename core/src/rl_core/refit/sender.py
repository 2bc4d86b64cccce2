"""The trainer's endpoint: hands its tensors to any number of engines, refit after refit."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.errors import CapabilityError, ConfigError, LifecycleError, RefitProtocolError
from rl_core.refit.driver import RefitReport
from rl_core.refit.jobs import DEFAULT_BUCKET_BYTES, DEFAULT_DEADLINE_S, Endpoint, Job, exclusively
from rl_core.refit.manifest import WeightManifest
from rl_core.refit.messages import (
    PROTOCOL,
    Codec,
    FromReceiver,
    Handles,
    Hello,
    Offer,
    Prepare,
)
from rl_core.refit.packing import Packer
from rl_core.refit.plan import TransferPlan, group_plan, make_plan
from rl_core.refit.session import (
    VERIFY_LEVELS,
    Effect,
    MakePlan,
    Pack,
    Phase,
    Send,
    SenderSession,
    bucket_digest,
)
from rl_core.refit.transports.ipc import IpcServer
from rl_core.refit.transports.memory import SharedRegion
from rl_core.refit.transports.process import is_alive, this_process

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable

    from rl_core.interfaces.weights import WeightSource

__all__ = ["RefitSender"]

#: Environment variable: a directory in memory for peers in another PID namespace.
SHM_DIR = "RL_CORE_SHM_DIR"
#: Buffers of one bucket each: one is packed while the other is loaded.
SLOTS = 2


@dataclass(frozen=True, slots=True)
class _Options:
    receivers: int
    version: int
    verify: str
    isolation: str
    bucket_bytes: int
    deadline_s: float

    def check(self) -> None:
        if self.isolation == "staged":
            raise CapabilityError(
                "isolation='staged' is not offered: no second copy of the weights is kept",
                fix='use isolation="quiesced"',
            )
        legal = {
            "verify": self.verify in VERIFY_LEVELS,
            "isolation": self.isolation == "quiesced",
            "receivers": self.receivers >= 1,
            "version": self.version >= 1,
            "deadline_s": self.deadline_s > 0,
        }
        for key, ok in legal.items():
            if not ok:
                raise ConfigError(
                    f"refit: {key}={getattr(self, key)!r} is not legal",
                    fix=f"verify is one of {VERIFY_LEVELS}; numbers are positive",
                    key=key,
                )


class RefitSender(Endpoint["_Sending"]):
    """Sends a trainer's weights; one for the trainer's whole life.

    Sockets and buffers are made at the first use and kept. Refits run one after another; those
    that still wait for their receivers are given up when the next is asked for.

    Args:
        source: Gives the tensors as they are now; called once for each refit.
        name: How errors on the other side call this one.
    """

    def __init__(self, source: Callable[[], WeightSource], *, name: str) -> None:
        super().__init__(name)
        self._source = source
        self._token = secrets.token_hex(32)
        self._channel: IpcServer | None = None
        self._region: SharedRegion | None = None
        self._digests: tuple[str, dict[str, bytes]] = ("", {})
        self._handing: _Handing | None = None

    # -- the transport of today -----------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Describes every tensor and where to fetch them, for the engine's ``prepare``."""
        self.check_open()
        manifest = WeightManifest.of(self._source().specs())
        return {
            "protocol": PROTOCOL,
            "digest": manifest.digest,
            "tensors": manifest.to_info(),
            "channel": {
                "address": self._bind().address,
                "token": self._token,
                **msgspec.structs.asdict(this_process()),
            },
        }

    def stream_ipc(
        self,
        *,
        receivers: int = 1,
        version: int | None = None,
        verify: str = "wire",
        isolation: str = "quiesced",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        deadline_s: float = DEFAULT_DEADLINE_S,
        **unknown: Any,
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts one refit.

        Args:
            receivers: Engines that must take part; all commit or none.
            version: Of the new weights, also one that goes back; the last one plus 1 if None.
            verify: ``"none"``; ``"wire"``: every bucket is hashed on both sides; ``"installed"``:
                besides, the engine reads its tensors back before the commit.
            isolation: ``"quiesced"``: engines do not generate while they are written to.
            bucket_bytes: Size of each of the two buffers at most.
            deadline_s: Seconds for the whole refit.
            **unknown: Refused.

        Returns:
            A future of :class:`RefitReport` as a dict.

        Raises:
            ConfigError: An option is unknown or not legal.
            CapabilityError: ``isolation="staged"``.
        """
        self.check_open()
        for job in self.waiting():
            job.cancelled = "a newer refit was asked for"
        if version is None:
            going = [job.options.version for job in list(self.jobs) if not job.cancelled]
            version = max([self.version, *going[-1:]]) + 1
        options = _Options(receivers, version, verify, isolation, bucket_bytes, deadline_s)
        options.check()
        return self.start(_Sending(self, self._source(), options), unknown)

    # -- the handles of old ---------------------------------------------------------------------

    def groups(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> list[list[str]]:
        """Begins a refit by handles: names in groups that fit a bucket (or of one larger tensor).

        Aliases and empty tensors are not listed: nothing is sent for them.
        """
        self.check_open()
        if self._handing is not None:
            self._handing.region.close()
        manifest = WeightManifest.of(self._source().specs())
        self._handing = _Handing(manifest, self.version + 1, bucket_bytes)
        return self._handing.groups

    def handles(self, keys: list[str]) -> dict[str, Any]:
        """Hands one group over; valid until the next call.

        Args:
            keys: One of :meth:`groups`.

        Returns:
            A dict for the engine's ``load_handles``, free of pickle.

        Raises:
            LifecycleError: :meth:`groups` was not called.
            ConfigError: A key is not a tensor of the model.
        """
        self.check_open()
        if self._handing is None:
            raise LifecycleError(
                f"{self.name}: handles were asked for before groups",
                fix="call prepare_weights_for_ipc first",
            )
        if unknown := sorted(set(keys) - self._handing.left):
            raise ConfigError(
                f"{self.name}: {unknown[0]!r} is not a tensor that is left to hand over",
                fix="pass each group of prepare_weights_for_ipc once",
                key=unknown[0],
            )
        with exclusively(self.turn, DEFAULT_DEADLINE_S, f"{self.name}: a running refit"):
            message = self._handing.hand_over(self._source(), keys)
        if not self._handing.left:
            self.version = max(self.version, self._handing.version)
        return {"protocol": PROTOCOL, "frame": Codec[Handles](Handles, self._token).encode(message)}

    # -- what is held ---------------------------------------------------------------------------

    def let_go(self) -> None:
        """See :meth:`Endpoint.let_go`."""
        handed = self._handing.region if self._handing else None
        for held in (self._channel, self._region, handed):
            if held is not None:
                held.close()
        self._channel = self._region = self._handing = None

    def _bind(self) -> IpcServer:
        if self._channel is None:
            self._channel = IpcServer()
        return self._channel

    def _buffers(self, nbytes: int) -> SharedRegion:
        """Shared memory of that size: the one at hand if it fits, so that it is touched once."""
        region = self._region
        if region is None or region.ref.nbytes != nbytes or not region.anonymous:
            if region is not None:
                region.close()
            self._region = None
            region = self._region = SharedRegion.create(nbytes, directory=os.environ.get(SHM_DIR))
        return region


class _Handing:
    """A refit by handles in progress."""

    def __init__(self, manifest: WeightManifest, version: int, bucket_bytes: int) -> None:
        self.manifest = manifest
        self.version = version
        self.session = secrets.token_hex(16)
        self.left = {spec.name for spec in manifest.owned}
        self.groups: list[list[str]] = []
        for bucket in make_plan(manifest, bucket_bytes).buckets:
            before = self.groups[-1][-1:] if self.groups else []
            # Pieces of a split tensor come together.
            names = [s.spec.name for s in bucket.segments if [s.spec.name] != before]
            if names:
                self.groups.append(names)
        largest = max((group_plan(manifest, g).slot_bytes for g in self.groups), default=1)
        self.region = SharedRegion.create(largest, directory=os.environ.get(SHM_DIR))

    def hand_over(self, source: WeightSource, keys: list[str]) -> Handles:
        """Packs some tensors into the buffer."""
        plan = group_plan(self.manifest, keys)
        part = WeightManifest(tuple(s.spec for b in plan.buckets for s in b.segments))
        if plan.slot_bytes > self.region.ref.nbytes:
            raise ConfigError(
                f"{len(keys)} tensors of {plan.slot_bytes} bytes are more than a group holds",
                fix="pass one group of prepare_weights_for_ipc at a time",
                key="keys",
            )
        packer = Packer(source, part, hashed=True)
        parts = [
            d for b in plan.buckets for d in packer.pack(b, self.region.data, self.region.view)
        ]
        self.left -= set(keys)
        return Handles(
            self.session,
            self.manifest.digest,
            self.version,
            tuple(spec.name for spec in part.tensors),
            self.region.ref,
            bucket_digest(self.session, 0, parts),
        )


class _Sending(Job[SenderSession]):
    """One refit over ``ipc``."""

    def __init__(self, sender: RefitSender, source: WeightSource, options: _Options) -> None:
        self.options = options
        self._sender = sender
        self._source = source
        self._manifest = WeightManifest.of(source.specs())
        offer = Offer(
            secrets.token_hex(16),
            PROTOCOL,
            sender.name,
            options.version,
            self._manifest.digest,
            options.verify,
            options.isolation,
        )
        session = SenderSession(offer, receivers=options.receivers, deadline_s=options.deadline_s)
        super().__init__(session, sender)
        self._codec = Codec[FromReceiver](FromReceiver, sender._token)
        self._channel = sender._bind()

    def refit(self) -> dict[str, Any]:
        """See :meth:`Job.refit`."""
        self.drive()
        if self.session.phase is Phase.COMMITTED:
            report = self._report()
            self._sender.version = self.options.version
            self._sender._digests = (self._plan.digest, self._packer.digests)
        if self.session.error is not None:
            raise self.session.error
        return report.as_dict()

    def pump(self, timeout_s: float) -> None:
        """See :meth:`Job.pump`."""
        for key, frame in self._channel.receive(timeout_s):
            if self.cancelled:
                return  # whoever says hello now means the next refit, and says it again
            try:
                message = self._codec.decode(frame)
            except RefitProtocolError as error:
                self.perform(self.session.corrupted(key, error))
                continue
            if isinstance(message, Hello) and not is_alive(message.process):
                continue  # it said so before it died, in a refit that is over
            self.perform(self.session.receive(key, message))

    def lost_peers(self) -> list[Effect]:
        """See :meth:`Job.lost_peers`."""
        dead = [key for key, hello in self.session.peers.items() if not is_alive(hello.process)]
        return self.session.lost(dead[0], "died") if dead else []

    def do(self, effect: Effect) -> list[Effect]:
        """See :meth:`Job.do`."""
        match effect:
            case Send(message, to):
                frame = self._codec.encode(message)
                keys = list(self.session.peers) if to is None else [to]
                gone = [key for key in keys if not self._channel.send(key, frame)]
                if gone:
                    self.pump(0.0)  # why it went may be here already
                return [following for key in gone for following in self.session.forget(key)]
            case MakePlan(dtypes):
                return self.session.planned(self._make_plan(dtypes))
            case Pack(index):
                return self.session.packed(index, self._pack(index))
        return []

    def _make_plan(self, dtypes: dict[str, str]) -> Prepare:
        self._casts = len(dtypes)
        self._wire = self._manifest.cast(dtypes)
        self._plan: TransferPlan = make_plan(self._wire, self.options.bucket_bytes)
        hashed = self.options.verify != "none"
        self._packer = Packer(self._source, self._manifest, hashed=hashed)
        self._slots = min(SLOTS, len(self._plan.buckets))
        if self._slots:
            self._region = self._sender._buffers(self._slots * self._plan.slot_bytes)
        return Prepare(
            self.session.offer.session,
            self._plan.digest,
            self.options.bucket_bytes,
            len(self._plan.buckets),
            self._slots,
            self._plan.slot_bytes,
            self._region.ref if self._slots else None,
            self.session.remaining_s,
        )

    def _pack(self, index: int) -> str:
        if index == 0:
            self._region.unlink()  # all receivers have it
        slot = self._region.slot(index % self._slots, self._plan.slot_bytes)
        parts = self._packer.pack(self._plan.buckets[index], *slot)
        return bucket_digest(self.session.offer.session, index, parts) if parts else ""

    def _report(self) -> RefitReport:
        phases, nbytes = self.session.phase_seconds, self._wire.nbytes
        seconds = sum(phases.values())
        plan, before = self._sender._digests
        same = before if plan == self._plan.digest else {}
        unchanged = sum(same.get(k) == v for k, v in self._packer.digests.items())
        return RefitReport(
            version=self.options.version,
            bytes=nbytes,
            seconds=seconds,
            gb_per_s=nbytes / seconds / 1e9,
            phases=phases,
            extra_memory_bytes=self._slots * self._plan.slot_bytes,
            tensors=len(self._wire.owned),
            unchanged=None if self.options.verify == "none" else unchanged,
            cast=self._casts,
            buckets=len(self._plan.buckets),
            receivers=self.options.receivers,
            verify=self.options.verify,
            isolation=self.options.isolation,
        )
