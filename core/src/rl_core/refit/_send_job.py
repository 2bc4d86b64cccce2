"""One refit, as the trainer performs it."""

from __future__ import annotations

import secrets
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_core.errors import (
    ConfigError,
    LifecycleError,
    RefitAborted,
    RefitError,
    RefitProtocolError,
)
from rl_core.plugins import hookspecs
from rl_core.refit._digests import DIGEST_BYTES, DigestTable
from rl_core.refit._job import Endpoint, Job
from rl_core.refit._packing import Packer, checked_tensors, digest_all, direct_obstacle
from rl_core.refit.frames import Channel, read_hello
from rl_core.refit.hashing import BlockHash
from rl_core.refit.messages import Offer, Prepare
from rl_core.refit.plan import ALIGN
from rl_core.refit.report import RefitReport
from rl_core.refit.session import Confirm, Effect, MakePlan, Pack, Phase, Send, SenderSession

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.interfaces.weights import WeightSource
    from rl_core.refit._layout import Layout
    from rl_core.refit._sender_state import SenderState
    from rl_core.refit.messages import Ready
    from rl_core.refit.options import SendOptions
    from rl_core.refit.transports.base import SenderEnd

__all__ = ["SendJob"]

#: Buckets of a direct refit that may be announced and not loaded: enough to keep loaders busy.
_DIRECT_WINDOW = 3
#: Seconds between two events that tell of progress; short refits have none.
_PROGRESS_S = 1.0


class SendJob(Job[SenderSession]):
    """One refit of a sender.

    Args:
        endpoint: The sender whose refits take turns.
        state: What it keeps from refit to refit.
        end: The sender's end of the transport.
        source: The tensors as they are now; closed once, here.
        options: What was chosen for this refit.
        version: The version that these weights become.
        rank_call_id: What every rank of the trainer calls this refit.
    """

    def __init__(
        self,
        endpoint: Endpoint[Any],
        state: SenderState,
        end: SenderEnd,
        source: WeightSource,
        options: SendOptions,
        version: int,
        rank_call_id: str = "",
    ) -> None:
        self.options = options
        self.version = version
        self._rank_call_id = rank_call_id
        self._state = state
        self._end = end
        self._source = source
        self._manifest = state.manifest_of(source)
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
            receivers=options.receivers,
            deadline_s=options.deadline_s,
            refit_id=options.refit_id,
            is_over=endpoint.is_over,
            clock=endpoint.runtime.clock,
        )
        super().__init__(session, endpoint, options.refit_id)
        self._channels: dict[str, Channel] = {}
        self._frames: deque[tuple[str, bytes]] = deque()
        self._table: DigestTable | None = None
        self._packer: Packer | None = None
        self._fallback: str | None = None
        self._reported_at = endpoint.runtime.clock()
        self._closed = False

    def refit(self) -> dict[str, Any]:
        """See :meth:`Job.refit`."""
        state, session = self._state, self.session
        try:
            self._end.refused()  # what was said before is not about this refit
            try:
                try:
                    self._source.open(self._rank_call_id, session.remaining_s)
                except BaseException as error:
                    self.perform(session.fail(error))
                self.endpoint.runtime.drive(self)
            finally:
                committed = session.phase is Phase.COMMITTED
                if not committed:
                    state.drop_lanes_after_failure()
            before, hashed, now = state.committed, state.committed_hash, self._table
            if committed:  # whatever follows, this version is these weights and no others
                state.version, state.committed = self.version, now
                state.committed_hash = self._hash
            if session.error is not None:
                raise session.error
            unchanged = None
            if before is not None and now is not None and hashed == self._hash:
                unchanged = sum(before.known.get(n) == digest for n, digest in now.known.items())
            return self._report(unchanged).as_dict()
        finally:
            self._close_source()  # before the refit after this one begins with its own

    def release_resources(self) -> None:
        """See :meth:`Job.release_resources`."""
        self._close_source()
        self._packer = self._table = None
        self._channels.clear()
        self._frames.clear()

    def pump(self, timeout_s: float) -> None:
        """See :meth:`Job.pump`; called again in the middle of it, it goes on where it was."""
        self._frames.extend(self._end.receive(timeout_s))
        while self._frames:
            key, frame = self._frames.popleft()
            if self.given_up:
                return  # whoever says hello now means the next refit, and says it again
            try:
                effects = self._take(key, frame)
            except RefitProtocolError as error:
                effects = self.session.corrupted(key, error)
            self.perform(effects)

    def _take(self, key: str, frame: bytes) -> list[Effect]:
        channel = self._channels.get(key)
        if (hello := read_hello(frame, self._state.token)) is not None:
            if channel is None:
                self._channels[key] = Channel(self._state.token, hello.nonce, "sender")
            elif channel.nonce != hello.nonce:
                raise RefitProtocolError("another Hello on a connection that has said one")
            return self.session.receive(key, hello)
        if channel is None:
            return []  # of a refit before this one
        return self.session.receive(key, channel.decode(frame))

    def lost_peers(self) -> list[Effect]:
        """See :meth:`Job.lost_peers`."""
        if self.session.phase is Phase.DISCOVER and (why := self._end.refused()) is not None:
            error = RefitAborted(f"DISCOVER: a receiver will not come: {why}", peer="a receiver")
            return self.session.fail(error)
        if self.session.phase is not Phase.COMMIT:  # in which nothing is read any more
            self._source.check()
        return [effect for key in self._end.departed() for effect in self.session.lost(key)]

    def do(self, effect: Effect) -> list[Effect]:
        """See :meth:`Job.do`."""
        match effect:
            case Send(message, to):
                keys = self.session.connections if to is None else [to]
                gone = [key for key in keys if not self._send(key, message)]
                if gone:
                    self.pump(0.0)  # why it went may be here already
                return [following for key in gone for following in self.session.lost(key)]
            case MakePlan(ready):
                prepare = self._make_plan(ready)
                plan = self._layout.plan
                return self.session.planned(
                    prepare, len(plan.buckets), plan.slots or _DIRECT_WINDOW
                )
            case Pack(index):
                self.session.at = self._layout.plan.buckets[index].name
                self._report_progress(index)
                assert self._packer is not None
                return self.session.packed(index, self._packer.put(index))
            case Confirm():
                self.session.at = ""
                self._source.confirm()  # what was sent is of one state
                if self.options.join:
                    self._check_same()
                return self.session.confirmed("" if self._table is None else self._table.digest)
        return []

    def _send(self, key: str, message: object) -> bool:
        """Sends to one connection, also to one that never said a Hello; False if it is gone."""
        channel = self._channels.get(key) or Channel(self._state.token, b"", "sender")
        if isinstance(message, Offer):
            message = msgspec.structs.replace(message, nonce=secrets.token_bytes(16))
        return self._end.send(key, channel.encode(message))

    # -- what is sent, and where it lies ----------------------------------------------------------

    def _make_plan(self, ready: tuple[Ready, ...]) -> Prepare:
        state, options, token = self._state, self.options, self._state.token
        self._casts = len(ready[0].dtypes)
        self._wire = state.wire_of(self._manifest, ready[0].dtypes)
        own = torch.empty(0, device=self._source.device).device  # by the name that tensors give it
        if own.type == "cuda":
            torch.cuda.synchronize(own)  # an optimizer may step on a stream of its own
        self._device = self._end.lane_device(own, [r.gpus for r in ready])
        self._hash = BlockHash.choose(self._device, private=self._end.private, token=token)
        tensors = self._direct_tensors()
        if tensors is not None and not self._move(tensors):
            tensors = None
        skip = self._skip([r.holds for r in ready], direct=tensors is not None)
        if options.verify != "none" and self._table is None:
            self._table = DigestTable(self._wire)
        layout = self._layout_of(skip, direct=tensors is not None)
        sent = [self._manifest.owned[index] for index in layout.plan.sent]
        given = checked_tensors(self._source, sent) if tensors is None else None
        self._packer = Packer(layout, given, self._table)
        return Prepare(
            self.session.offer.session,
            layout.plan.digest,
            options.bucket_for(self._device, direct=layout.plan.direct),
            layout.plan.direct,
            skip,
            dict(layout.lane.ref),
            self.session.remaining_s,
            self._hash.kind,
        )

    def _layout_of(self, skip: bytes, *, direct: bool) -> Layout:
        return self._state.layout(
            self._end,
            self._wire,
            self.options.bucket_for(self._device, direct=direct),
            direct=direct,
            skip=skip,
            block_hash=self._hash,
            device=self._device,
            receivers=[hello.receiver for hello in self.session.peers.values()],
        )

    @property
    def _layout(self) -> Layout:
        assert self._packer is not None, "there is a plan"
        return self._packer.layout

    def _direct_tensors(self) -> dict[str, torch.Tensor] | None:
        """The source's own tensors, if receivers can read them where they are."""
        mode, arena = self.options.mode, self._state.arena
        if mode == "packed":
            return None
        obstacle = None
        if not self._end.reads_memory:
            obstacle = f"the transport {self.options.transport} does not share memory"
        elif self._casts:
            obstacle = f"the engine wants {self._casts} tensors in another dtype"
        tensors = {} if obstacle else self._source.persistent()
        if tensors is None:
            obstacle = "the source makes its tensors on the fly"
        elif not obstacle and not arena.holds(self._manifest, tensors):
            obstacle = direct_obstacle(self._manifest, tensors, self._device)
        if obstacle is None and mode == "auto":
            obstacle = arena.lacks(self._manifest)
        self._fallback = obstacle
        if obstacle and mode == "direct":
            raise ConfigError(
                f"refit: mode='direct' is not possible: {obstacle}",
                fix='use mode="auto" or mode="packed"',
                key="mode",
            )
        return None if obstacle or tensors is None else dict(tensors)

    def _move(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Moves tensors to where receivers can read them; False if there is no memory for that.

        Raises:
            RefitError: There is none, and ``mode`` leaves no other way.
        """
        try:
            lane = self._layout_of(b"", direct=True).lane
            self._state.arena.adopt(lane, self._wire, tensors)
        except (RefitError, torch.OutOfMemoryError) as error:
            why = str(error).splitlines()[0]
            self._fallback = f"the tensors cannot be moved to memory that engines read: {why}"
            self._state.release_weights()
            self._state.arena.remember_lack(self._manifest, self._fallback)
            if self.options.mode == "direct":
                raise RefitError(
                    f"refit: mode='direct' is not possible: {self._fallback}",
                    fix='use mode="auto" or mode="packed", or leave more memory free: that of one '
                    "tensor on the CPU, that of all tensors on a GPU",
                ) from error
            return False
        return True

    def _skip(self, holds: list[bytes], *, direct: bool) -> bytes:
        """For each tensor 1 if every receiver has it as it is now; empty if all are sent."""
        join = self.options.join
        if not join and not any(map(any, holds)):  # nobody has anything, or nobody was asked
            return b""
        if direct:
            self._table, layout = DigestTable(self._wire), self._layout_of(b"", direct=True)
            for index, part in enumerate(layout.plan.buckets):
                self._table.add(part, layout.digests(index), layout.plan.block_bytes)
        else:
            bucket, kind = self.options.bucket_for(self._device, direct=False), self._hash
            block = min(kind.block, bucket // ALIGN * ALIGN)
            # Only tensors that stay can be hashed together on a device.
            lasting = (self._source.persistent() or {}) if kind.kind == "fold" else {}
            with closing(checked_tensors(self._source, self._manifest.owned)) as given:
                self._table = digest_all(given, lasting, self._wire, block, kind)
        if join:
            self._check_same()  # before a late engine, which may serve, is written to
        now = self._table.flat
        starts = range(0, len(now), DIGEST_BYTES)
        return bytes(
            all(held[i : i + DIGEST_BYTES] == now[i : i + DIGEST_BYTES] for held in holds)
            for i in starts
        )

    # -- the end ----------------------------------------------------------------------------------

    def _close_source(self) -> None:
        """Closes it once.

        Raises:
            RefitError: It cannot be closed, which a refit that failed only notes.
        """
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
                    f"{self.endpoint.name}: {text}", fix="look at WeightSource.close"
                ) from error
            self.session.error.add_note(text)

    def _check_same(self) -> None:
        """Raises unless the weights are those that the other engines serve."""
        before, now, hashed = self._state.committed, self._table, self._state.committed_hash
        if hashed is not None and hashed != self._hash:
            raise LifecycleError(
                f"{self.endpoint.name}: version {self.version} was hashed with {hashed.kind}, and "
                f"this refit hashes with {self._hash.kind}: whether the weights are the same "
                "cannot be told",
                fix="join over the transport, and from the device, of the last refit of all",
                version=self.version,
            )
        if before is None or now is None or before.digest != now.digest:
            raise LifecycleError(
                f"{self.endpoint.name}: the weights are no longer those of version "
                f"{self.version}, which the other engines serve",
                fix="let the late engine take part in the next refit of all, or join before "
                "training goes on, in the dtypes and with the bucket_bytes of the others",
                version=self.version,
            )

    def _report(self, unchanged: int | None) -> RefitReport:
        phases, plan, lane = self.session.phase_seconds, self._layout.plan, self._layout.lane
        seconds = sum(phases.values())
        return RefitReport(
            version=self.version,
            bytes=plan.nbytes,
            seconds=seconds,
            gb_per_s=plan.nbytes / seconds / 1e9,
            phases=phases,
            extra_memory_bytes=0 if plan.direct else lane.data.numel(),
            tensors=len(plan.sent),
            skipped=len(self._wire.owned) - len(plan.sent),
            unchanged=unchanged,
            cast=self._casts,
            buckets=len(plan.buckets),
            receivers=self.options.receivers,
            transport=self.options.transport,
            mode="direct" if plan.direct else "packed",
            verify=self.options.verify,
            isolation=self.options.isolation,
            fallback=self._fallback,
        )

    def _report_progress(self, index: int) -> None:
        now = self.endpoint.runtime.clock()
        if now - self._reported_at > _PROGRESS_S:
            self._reported_at = now
            hookspecs.emit(
                "refit_progress",
                version=self.version,
                buckets=len(self._layout.plan.buckets),
                sent=index,
                bytes=self._layout.plan.nbytes,
            )
