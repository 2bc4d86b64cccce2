"""The trainer's endpoint: hands its tensors to any number of engines, refit after refit."""

from __future__ import annotations

import concurrent.futures
import secrets
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_core.errors import (
    ConfigError,
    LifecycleError,
    ManifestMismatchError,
    RefitAborted,
    RefitError,
    RefitProtocolError,
)
from rl_core.plugins import hookspecs
from rl_core.ports import default_address, free_port
from rl_core.weights.connections import Connection, Connections, keep_two
from rl_core.weights.data.digests import DIGEST_BYTES, BlockHash, DigestTable, TensorHasher
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.data.parts import Partition, check_layout, layout_of
from rl_core.weights.data.plan import ALIGN, SLOTS, DataMode, make_plan
from rl_core.weights.engine_lock import exclusively
from rl_core.weights.job import Endpoint, Job
from rl_core.weights.options import DEFAULT_DEADLINE_S, SendOptions
from rl_core.weights.protocol.frames import Channel, origin_of, read_hello
from rl_core.weights.protocol.handshake import introduction
from rl_core.weights.protocol.messages import LaneInfo, Offer, Prepare
from rl_core.weights.protocol.sender_session import SenderSession
from rl_core.weights.protocol.session import Confirm, Effect, MakePlan, Pack, Phase, Send
from rl_core.weights.report import RefitReport
from rl_core.weights.sending.packing import Packer, SenderBuckets, sent_parts
from rl_core.weights.sending.shared_tensors import SharedTensors
from rl_core.weights.transports.base import NoLane, SenderEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_core.interfaces.weights import Piece, WeightSource
    from rl_core.weights.data.parts import Layout
    from rl_core.weights.data.plan import TransferPlan
    from rl_core.weights.job import Runtime
    from rl_core.weights.protocol.messages import Ready
    from rl_core.weights.transports.base import Lane

__all__ = ["RefitSender", "SendJob"]

#: The transport that every sender offers without an address from the user.
_LOCAL = "ipc"
#: Seconds between two events that tell of progress; short refits have none.
_PROGRESS_S = 1.0
_NO_LANE = NoLane()


class RefitSender(Endpoint["SendJob"]):
    """Sends a trainer's weights; one for the trainer's whole life.

    Sockets and buffers are made at the first use and kept. Refits run one after another; a
    new request supersedes those that still wait for their receivers.

    Args:
        source: Gives the tensors as they are now; called once for each refit, and for a description
            that no refit follows. Each one is closed once.
        name: How errors on the other side call this one.
        runtime: What its refits take from outside, such as their clock.

    Attributes:
        token: The secret that messages are authenticated with.
        origin: Identifies this trainer, for as long as this object lives.
        version: Last committed version, 0 at first.
        committed: Digests of what was committed last, if it was hashed.
        committed_hash: What they were made with.
        committed_parts: What they are of.
        parts: Those of the last refit.
        moved: The tensors that engines read where they are.
        connections: Those of each transport that was used.
    """

    def __init__(
        self, source: Callable[[], WeightSource], *, name: str, runtime: Runtime | None = None
    ) -> None:
        super().__init__(name, runtime)
        self.token = secrets.token_hex(32)
        self.origin = origin_of(self.token)
        self.version = 0
        self.committed: DigestTable | None = None
        self.committed_hash: BlockHash | None = None
        self.committed_parts: Partition | None = None
        self.parts: Partition | None = None
        self.moved = SharedTensors()
        self.connections: Connections[SenderEnd, SenderBuckets] = Connections()
        self._source = source
        self._described: WeightSource | None = None
        self._manifest: WeightManifest | None = None
        self._wire: WeightManifest | None = None

    # -- refits -----------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Describes every tensor and where to fetch them, for the engine's ``prepare``.

        The ``number`` in it is that of the next refit, which sends from the source that was
        described if it is given a number.
        """
        with self.asking:  # or else two callers would each make an end
            self.check_open()
            self._drop_described()
            self._described = self._source()
            manifest = self.manifest_of(self._described)
            with suppress(RefitError):  # who uses another transport does not need this one
                self.connection(_LOCAL)
            return {
                **introduction(manifest, self.token),
                "number": self.number + 1,
                "host": default_address(),
                "port": free_port(),
                "addresses": {name: dict(c.end.address) for name, c in self.connections.items()},
            }

    def names(self) -> list[str]:
        """The names of all tensors."""
        self.check_open()
        with closing(self._source()) as source:
            return [spec.name for spec in source.specs()]

    def open(
        self, transport: str, deadline_s: float, **options: Any
    ) -> concurrent.futures.Future[None]:
        """Opens a transport that needs an address to listen on; closes an earlier one first."""
        self.check_open()
        for job in self.waiting():
            if job.options.transport == transport:
                job.cancelled = f"the transport {transport} was opened again"
        with exclusively(self.turn, deadline_s, f"{self.name}: a running refit"):
            self.connections.close(transport)
            end = self.runtime.transport(transport).sender(**options)
            self.connections[transport] = Connection(end)
        return self.runtime.spawn(f"{transport}-{self.name}", lambda: end.rendezvous(deadline_s))

    def send(self, **options: Any) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts one refit."""
        with self.asking:
            self.check_open()
            chosen = SendOptions.of(options)
            number = self.number = self.next_number(chosen.number)
            try:
                connection = self.connection(chosen.transport)
            except RefitError as error:
                failed: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
                failed.set_exception(error)
                return failed
            begun = [job for job in self.jobs if job not in self.waiting()]
            # One that is committed counts at once, whatever its thread still has to do.
            going = [j.version for j in begun if j.session.phase not in (Phase.ABORTED, Phase.TORN)]
            following = max([self.version, *going[-1:]]) + 1
            version = chosen.version or following
            if chosen.number is None:  # the weights may have changed since
                self._drop_described()
            described, self._described = self._described, None
            source = self._source() if described is None else described
            try:
                job = SendJob(self, connection, source, chosen, version, number)
            except BaseException:
                source.close()
                raise
            return self.start(job)

    def _drop_described(self) -> None:
        described, self._described = self._described, None
        if described is not None:
            described.close()

    def connection(self, transport: str) -> Connection[SenderEnd]:
        """This side of a transport."""
        if (kept := self.connections.get(transport)) is not None:
            try:
                kept.end.check_room()
            except RefitError:
                with self.between_refits() as idle:
                    if idle:
                        self.connections.close(transport)
                raise
            return kept
        made = self.connections[transport] = Connection(self.runtime.transport(transport).sender())
        return made

    # -- what is kept -----------------------------------------------------------------------------

    def manifest_of(self, source: WeightSource) -> WeightManifest:
        """The source's manifest; the one of the last refit if nothing changed."""
        self._manifest = WeightManifest.of(source.specs(), self._manifest)
        return self._manifest

    def wire_of(self, manifest: WeightManifest, dtypes: Mapping[str, str]) -> WeightManifest:
        """The manifest in the dtypes that travel; the one of the last refit if nothing changed."""
        self._wire = manifest.cast(dtypes, self._wire)
        return self._wire

    def buckets(
        self,
        connection: Connection[SenderEnd],
        parts: Partition,
        bucket_bytes: int,
        mode: DataMode,
        *,
        skip: bytes,
        block_hash: BlockHash,
        device: torch.device,
        layout: Layout,
        receivers: Sequence[str],
    ) -> SenderBuckets:
        """The buckets of a refit, and memory for them: those of the last refits, where they fit."""
        kept = self.connections.buckets
        boxes = tuple((index, tuple(boxes)) for index, boxes in layout.items())
        key = (connection, parts.manifest.digest, bucket_bytes, mode, skip, block_hash, boxes)
        cached = kept.get(key)
        plan = cached.plan if cached is not None else None
        if plan is None:
            size = block_hash.block
            plan = make_plan(parts, bucket_bytes, mode, skip=skip, block=size, layout=layout)
        lane = self._lane(connection, plan, device, receivers, bucket_bytes)
        if cached is None or cached.lane is not lane:
            cached = SenderBuckets(plan, lane, block_hash)
        return keep_two(kept, key, cached)

    def _lane(
        self,
        connection: Connection[SenderEnd],
        plan: TransferPlan,
        device: torch.device,
        receivers: Sequence[str],
        bucket_bytes: int,
    ) -> Lane:
        """The lane at hand if it fits, so that memory is touched once."""
        if not plan.buckets:
            return _NO_LANE
        direct = plan.mode is DataMode.DIRECT
        most = plan.lane_bytes if direct else max(plan.lane_bytes, SLOTS * bucket_bytes)
        lane = connection.lanes.get((plan.mode, 0))
        if lane is not None:
            fits = plan.lane_bytes <= lane.data.numel() <= most and lane.data.device == device
            if fits and lane.serves(receivers):
                return lane
            self.connections.close_lanes(lambda _, other: other is lane)
        lane = connection.end.lane(plan.lane_bytes, device, receivers, direct=direct)
        connection.lanes[plan.mode, 0] = lane
        return lane

    def drop_lanes_after_failure(self) -> None:
        """Closes lanes that a receiver may still read which did not hear of the failure.

        What is written next goes elsewhere. The trainer's own memory (``direct``) stays: it cannot
        be taken from under the weights, and what is read there late is verified like all else.
        """
        self.connections.close_lanes(
            lambda mode, lane: mode is not DataMode.DIRECT or not lane.reusable_after_failure
        )

    def release_weights(self) -> None:
        """Closes the memory that engines read the trainer's tensors in.

        To be called when the tensors have left it (a trainer that gives its device away); the
        next direct refit moves them again. Waits for a refit that is running.
        """
        with exclusively(self.turn, DEFAULT_DEADLINE_S, f"{self.name}: a running refit"):
            self.drop_moved_tensors()

    def drop_moved_tensors(self) -> None:
        """As :meth:`release_weights`, for the refit that is running."""
        self.moved = SharedTensors()
        self.connections.close_lanes(lambda mode, _: mode is DataMode.DIRECT)

    def release_resources(self) -> None:  # noqa: D102
        self._drop_described()
        self.moved = SharedTensors()
        for transport in list(self.connections):
            self.connections.close(transport)


class SendJob(Job[SenderSession]):
    """One refit of a sender."""

    endpoint: RefitSender

    def __init__(
        self,
        endpoint: RefitSender,
        connection: Connection[SenderEnd],
        source: WeightSource,
        options: SendOptions,
        version: int,
        number: int,
    ) -> None:
        self.options = options
        self.version = version
        self._connection = connection
        self._end = connection.end
        self._source = source
        self._manifest = endpoint.manifest_of(source)
        offer = Offer(
            secrets.token_hex(16),
            endpoint.name,
            version,
            self._manifest.digest,
            options.verify,
            options.isolation,
            options.delta,
            dict(options.kv_scales),
        )
        session = SenderSession(
            offer,
            number=number,
            receivers=options.receivers,
            deadline_s=options.deadline_s,
            clock=endpoint.runtime.clock,
        )
        super().__init__(session, endpoint, number, torch.device(source.device))
        self._channels: dict[str, Channel] = {}
        self._unreachable: list[str] = []
        self._table: DigestTable | None = None
        self._packer: Packer | None = None
        self._fallback: str | None = None
        # What receivers want decides on these; they are set with the plan.
        self._casts: int
        self._wire: WeightManifest
        self._pieces: Sequence[Piece] | None
        self._layout: Layout
        self._parts: Partition
        self._keeps: dict[str, bytes]  # by connection
        self._device: torch.device
        self._hash: BlockHash
        self._reported_at = endpoint.runtime.clock()
        self._closed = False
        self._same = options.version == endpoint.version  # the weights of a committed version

    def refit(self) -> dict[str, Any]:  # noqa: D102
        sender, session = self.endpoint, self.session
        try:
            self._end.refused()  # earlier refusals are not about this refit
            try:
                try:
                    self._check_version()
                    self._source.open(self.number, session.remaining_s)
                except BaseException as error:
                    self.perform(session.fail(error))
                self.endpoint.runtime.drive(self)
            finally:
                committed = session.phase is Phase.COMMITTED
                if not committed or session.error is not None:
                    sender.drop_lanes_after_failure()
            before, hashed, now = sender.committed, sender.committed_hash, self._table
            if committed:  # whatever follows, this version is these weights and no others
                sender.version, sender.committed = self.version, now
                sender.committed_hash, sender.committed_parts = self._hash, self._parts
            if session.error is not None:
                raise session.error
            unchanged = None
            if before is not None and now is not None and hashed == self._hash:
                unchanged = sum(before.known.get(n) == digest for n, digest in now.known.items())
            return self._report(unchanged).as_dict()
        finally:
            self._close_source()  # before the refit after this one begins with its own

    def release_resources(self) -> None:  # noqa: D102
        self._close_source()
        self._packer = self._table = None
        self._channels.clear()

    def pump(self, timeout_s: float) -> None:  # noqa: D102
        unreachable, self._unreachable = self._unreachable, []
        for key, frame in self._end.receive(0.0 if unreachable else timeout_s):
            if self.given_up:
                return  # a Hello that comes now means the next refit, and comes again
            try:
                effects = self._take(key, frame)
            except RefitProtocolError as error:
                effects = self.session.corrupted(key, error)
            self.perform(effects)
        for key in unreachable:  # a frame received just now may give the cause
            self.perform(self.session.lost(key))

    def _take(self, key: str, frame: bytes) -> list[Effect]:
        channel = self._channels.get(key)
        if (hello := read_hello(frame, self.endpoint.token)) is not None:
            if channel is None:
                self._channels[key] = Channel(self.endpoint.token, hello.nonce, "sender")
            elif channel.nonce != hello.nonce:
                raise RefitProtocolError("received a second, different Hello on one connection")
            return self.session.receive(key, hello)
        if channel is None:
            return []  # of a refit before this one
        return self.session.receive(key, channel.decode(frame))

    def lost_peers(self) -> list[Effect]:  # noqa: D102
        if self.session.phase is Phase.DISCOVER and (why := self._end.refused()) is not None:
            error = RefitAborted(f"DISCOVER: a receiver gave up: {why}", peer="a receiver")
            return self.session.fail(error)
        if self.session.phase is not Phase.COMMIT:  # in which nothing is read any more
            self._source.check()
        return [effect for key in self._end.departed() for effect in self.session.lost(key)]

    def do(self, effect: Effect) -> list[Effect]:  # noqa: D102
        match effect:
            case Send(message, to):
                keys = self.session.connections if to is None else [to]
                for key in keys:  # one that has sent no Hello has no channel
                    channel = self._channels.get(key) or Channel(self.endpoint.token, b"", "sender")
                    if isinstance(message, Offer):
                        message = msgspec.structs.replace(message, nonce=secrets.token_bytes(16))
                    if not self._end.send(key, channel.encode(message)):
                        self._unreachable.append(key)
            case MakePlan(ready):
                return self._make_plan(ready)
            case Pack(index):
                self.session.at = self._buckets.plan.buckets[index].name
                assert self._packer is not None
                now = self.endpoint.runtime.clock()
                if now - self._reported_at > _PROGRESS_S:
                    self._reported_at = now
                    plan = self._buckets.plan
                    count, nbytes = len(plan.buckets), plan.nbytes
                    facts = {"buckets": count, "sent": index, "bytes": nbytes}
                    hookspecs.emit("refit_progress", version=self.version, **facts)
                return self.session.packed(index, self._packer.put(index))
            case Confirm():
                self.session.at = ""
                self._source.confirm()  # what was sent is of one state
                if self._same and self.endpoint.committed_parts in (None, self._parts):
                    self._check_same()  # of other parts, `confirm` alone knows that they stayed
                table = self._table
                return self.session.confirmed(
                    {k: "" if table is None else table.digest(m) for k, m in self._keeps.items()}
                )
        return []

    # -- what is sent, and where it lies ----------------------------------------------------------

    def _make_plan(self, ready: Mapping[str, Ready]) -> list[Effect]:
        sender, answers = self.endpoint, list(ready.values())
        self._casts = len(answers[0].dtypes)
        self._wire = sender.wire_of(self._manifest, answers[0].dtypes)
        for key, answer in ready.items():
            check_layout(self._wire, answer.keeps, self.session.peers[key].name)
        own = torch.empty(0, device=self._source.device).device  # by the name that tensors give it
        if own.type == "cuda":
            torch.cuda.synchronize(own)  # an optimizer may step on another stream
        self._device = self._end.lane_device(own, [r.gpus for r in answers])
        self._hash = BlockHash.choose(self._device, private=self._end.private, token=sender.token)
        self._pieces = self._source.pieces()
        self._layout = layout_of(self._manifest, self._pieces)
        layouts: list[Layout] = [self._layout, *(r.keeps for r in answers)]
        self._parts = sender.parts = Partition.of(self._wire, layouts, sender.parts)
        self._keeps = {key: self._parts.mask(r.keeps) for key, r in ready.items()}
        here, parts = self._parts.mask(self._layout), self._parts.manifest.owned
        self._parts.check_kept(list(self._keeps.values()))
        for key, keeps in self._keeps.items():
            if lacking := [parts[n] for n, keep in enumerate(keeps) if keep > here[n]]:
                raise ManifestMismatchError(
                    f"the trainer has no {lacking[0].name}, which {self.session.peers[key].name} "
                    f"keeps ({len(lacking)} parts of tensors are missing)",
                    fix="make the pieces of the weight source cover every tensor",
                    missing=[part.name for part in lacking],
                )
        direct = self._move_tensors()
        mode = DataMode.DIRECT if direct else DataMode.PACKED
        skip = self._skipped(answers, mode)
        buckets = self._make_buckets(mode, skip)
        buckets.lane.ends = self.session.deadline
        sent, cut = buckets.plan.sent, self._pieces if self._layout else None
        given = sent_parts(self._source, self._parts, self._manifest, sent, cut)
        self._packer = Packer(buckets, None if direct else given, self._table)
        prepares = {
            key: Prepare(
                self.session.offer.session,
                self._bucket_bytes(mode),
                direct,
                dict(self._parts.cuts),
                {
                    0: LaneInfo(
                        buckets.plan.digest,
                        skip,
                        dict(buckets.lane.ref),
                        keeps if 0 in keeps else b"",
                        {i: tuple(boxes) for i, boxes in self._layout.items()} if direct else {},
                    )
                },
                self.session.remaining_s,
                self._hash.kind,
            )
            for key, keeps in self._keeps.items()
        }
        return self.session.planned(prepares, len(buckets.plan.buckets), buckets.plan.window)

    def _skipped(self, answers: Sequence[Ready], mode: DataMode) -> bytes:
        """A byte for each part, 1 for those that no engine needs; empty if all are sent."""
        masks, manifest = list(self._keeps.values()), self._parts.manifest
        holds = [r.holds if r.parts == manifest.digest else b"" for r in answers]
        if self._same or any(map(any, holds)):  # some have parts already
            self._table = self._digests_now(mode, self._parts)
            if self._same:
                self._check_same()  # before an engine, which may serve, is written to
            now = self._table.flat
        else:
            now, holds = b"", [b"" for _ in answers]
            if self.options.verify != "none":
                self._table = DigestTable(manifest)
            if not any(0 in keeps for keeps in masks):
                return b""
        at = [slice(n * DIGEST_BYTES, (n + 1) * DIGEST_BYTES) for n in range(len(masks[0]))]
        skip = bytes(
            all(
                not keeps[n] or (held and held[one] == now[one])
                for keeps, held in zip(masks, holds, strict=True)
            )
            for n, one in enumerate(at)
        )
        if self.options.isolation == "staged":  # a second copy has all of a tensor, or nothing
            skip = self._parts.whole_tensors(skip, masks)
        return skip if any(skip) else b""

    def _bucket_bytes(self, mode: DataMode) -> int:
        return self.options.bucket_for(self._device, mode)

    def _make_buckets(self, mode: DataMode, skip: bytes = b"") -> SenderBuckets:
        return self.endpoint.buckets(
            self._connection,
            self._parts,
            self._bucket_bytes(mode),
            mode,
            skip=skip,
            block_hash=self._hash,
            device=self._device,
            layout=self._layout if mode is DataMode.DIRECT else {},
            receivers=[hello.receiver for hello in self.session.peers.values()],
        )

    @property
    def _buckets(self) -> SenderBuckets:
        assert self._packer is not None, "there is a plan"
        return self._packer.buckets

    def _move_tensors(self) -> bool:
        """Moves the source's tensors to memory that receivers read, if possible and wanted."""
        mode, moved = self.options.mode, self.endpoint.moved
        if mode == "packed":
            return False
        pieces, reason = self._pieces, None
        if not self._end.reads_memory:
            reason = f"the transport {self.options.transport} does not share memory"
        elif self._end.reason_not_shareable:
            reason = self._end.reason_not_shareable
        elif self._casts:
            reason = f"the engine wants {self._casts} tensors in another dtype"
        elif pieces is None:
            reason = "the weight source computes its tensors during the refit"
        else:
            reason = moved.reason_not_shareable(self._manifest, pieces, self._device)
            if reason is None and mode == "auto":
                reason = moved.no_memory_for(self._manifest)
        if reason and mode == "direct":
            raise ConfigError(
                f"refit: mode='direct' is not possible: {reason}",
                fix='use mode="auto" or mode="packed"',
                key="mode",
            )
        if reason is None and pieces is not None:
            try:
                moved.move(self._make_buckets(DataMode.DIRECT).lane, self._wire, pieces)
            except (RefitError, torch.OutOfMemoryError) as error:
                cause = str(error).splitlines()[0]
                reason = f"the tensors cannot be moved to memory that engines read: {cause}"
                self.endpoint.drop_moved_tensors()
                self.endpoint.moved.remember_no_memory(self._manifest, reason)
                if mode == "direct":
                    raise RefitError(
                        f"refit: mode='direct' is not possible: {reason}",
                        fix='use mode="auto" or mode="packed", or free memory: as much as the '
                        "largest tensor needs on the CPU, as all tensors need on a GPU",
                    ) from error
        self._fallback = reason
        return reason is None

    def _digests_now(self, mode: DataMode, parts: Partition) -> DigestTable:
        """The digest of every part as it is now, in the dtype that travels."""
        table = DigestTable(parts.manifest)
        if mode is DataMode.DIRECT and parts is self._parts:
            whole = self._make_buckets(mode)
            for index, part in enumerate(whole.plan.buckets):
                table.add(part.segments, whole.digests(index), whole.plan.block_bytes)
            return table
        block = min(self._hash.block, self._bucket_bytes(mode) // ALIGN * ALIGN)
        # Only tensors that stay can be hashed together on a device.
        fold, pieces = self._hash.kind == "fold", self._pieces or ()
        lasting = {p.tensor.data_ptr() for p in pieces if fold and p.tensor is not None}
        every, cut = range(len(parts.manifest.owned)), self._pieces if self._layout else None
        with closing(sent_parts(self._source, parts, self._manifest, every, cut)) as given:
            named = ((spec.name, spec, tensor) for spec, tensor in given)
            table.known.update(TensorHasher(self._hash, block).digests(named, lasting))
        return table

    # -- the end ----------------------------------------------------------------------------------

    def _close_source(self) -> None:
        """Closes it once."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._packer is not None:
                self._packer.close()
            self._source.close()
        except Exception as error:
            text = f"the weight source could not be closed: {type(error).__name__}: {error}"
            if self.session.error is None:
                raise RefitError(
                    f"{self.endpoint.name}: {text}", fix="correct WeightSource.close"
                ) from error
            self.session.error.add_note(text)

    def _check_version(self) -> None:
        """Decides whether the version is a committed one, whose weights must be the same."""
        sender = self.endpoint
        if self._same and sender.version != self.version:
            raise LifecycleError(
                f"{sender.name}: version {sender.version} was committed while version "
                f"{self.version} waited to be sent again",
                fix="call refit again",
                version=sender.version,
            )
        self._same = self.options.version == sender.version
        if self._same and (sender.committed is None or self.options.verify == "none"):
            raise LifecycleError(
                f"{sender.name}: version {self.version} was committed already, and without hashes "
                "nothing shows whether the weights are the same",
                fix='use verify="wire" in both refits, or leave version out',
                version=self.version,
            )

    def _check_same(self) -> None:
        """Raises unless the weights are those that the other engines serve."""
        before, hashed = self.endpoint.committed, self.endpoint.committed_hash
        if hashed is not None and hashed != self._hash:
            raise LifecycleError(
                f"{self.endpoint.name}: version {self.version} was hashed with {hashed.kind}, and "
                f"this refit hashes with {self._hash.kind}: nothing shows whether the weights "
                "are the same",
                fix="use the transport and device of the refit that committed this version",
                version=self.version,
            )
        now, parts = self._table, self.endpoint.committed_parts
        if parts is not None and parts != self._parts:  # other engines keep other parts
            same_dtypes = parts.whole.digest == self._wire.digest
            now = self._digests_now(DataMode.PACKED, parts) if same_dtypes else None
        if (
            before is None
            or now is None
            or any(now.known.get(n) != d for n, d in before.known.items())
        ):
            raise LifecycleError(
                f"{self.endpoint.name}: the weights are no longer those of version "
                f"{self.version}, which the other engines serve",
                fix="refit all engines together; or refit this one before the next training step, "
                "with the dtypes and the bucket_bytes of the others",
                version=self.version,
            )

    def _report(self, unchanged: int | None) -> RefitReport:
        phases, plan, lane = self.session.phase_seconds, self._buckets.plan, self._buckets.lane
        seconds = sum(phases.values())
        cut, sent = self._parts.cuts, plan.sent
        tensors = len({self._parts.tensor_of(index).name for index in sent} if cut else sent)
        return RefitReport(
            version=self.version,
            origin=self.endpoint.origin,
            bytes=plan.nbytes,
            seconds=seconds,
            gb_per_s=plan.nbytes / seconds / 1e9,
            phases=phases,
            extra_memory_bytes=0 if plan.mode is DataMode.DIRECT else lane.data.numel(),
            tensors=tensors,
            skipped=len(self._wire.owned) - tensors,
            unchanged=unchanged,
            cast=self._casts,
            buckets=len(plan.buckets),
            receivers=self.options.receivers,
            transport=self.options.transport,
            mode=plan.mode.value,
            verify=self.options.verify,
            isolation=self.options.isolation,
            fallback=self._fallback,
        )
