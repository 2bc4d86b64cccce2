"""One refit, as the trainer performs it."""

from __future__ import annotations

import secrets
import time
from collections import deque
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
from rl_core.refit._job import Job
from rl_core.refit._packing import DirectPacker, Packer, SlotPacker, digest_all
from rl_core.refit.arena import why_not_at_home
from rl_core.refit.frames import Channel, read_hello
from rl_core.refit.hashing import BlockHash
from rl_core.refit.messages import Offer, Prepare
from rl_core.refit.plan import ALIGN
from rl_core.refit.report import RefitReport, copy_rate
from rl_core.refit.session import Confirm, Effect, MakePlan, Pack, Phase, Send, SenderSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.interfaces.weights import WeightSource
    from rl_core.refit.messages import Ready
    from rl_core.refit.options import SendOptions
    from rl_core.refit.plan import TransferPlan
    from rl_core.refit.sender import RefitSender
    from rl_core.refit.transports.base import Lane, SenderEnd

__all__ = ["Sending"]

#: Buckets of a direct refit that may be announced and not loaded: enough to keep loaders busy.
_DIRECT_WINDOW = 3
#: Seconds between two events that tell of progress; short refits have none.
_PROGRESS_S = 1.0


class Sending(Job[SenderSession]):
    """One refit.

    Args:
        sender: Whose.
        end: What it is sent over.
        source: The tensors as they are now.
        options: How.
        version: Of these weights.
        name: What every rank of the trainer calls it.
    """

    def __init__(
        self,
        sender: RefitSender,
        end: SenderEnd,
        source: WeightSource,
        options: SendOptions,
        version: int,
        name: str = "",
    ) -> None:
        self.options = options
        self.version = version
        self._name = name
        self._sender = sender
        self._end = end
        self._source = source
        self._manifest = sender.manifest_of(source)
        offer = Offer(
            secrets.token_hex(16),
            sender.name,
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
            refit=options.refit_id,
            is_over=sender.is_over,
        )
        super().__init__(session, sender, options.refit_id)
        self._channels: dict[str, Channel] = {}
        self._frames: deque[tuple[str, bytes]] = deque()
        self._table: DigestTable | None = None
        self._plan: TransferPlan
        self._packer: Packer | None = None
        self._lane: Lane | None = None
        self._fallback: str | None = None
        self._told = time.monotonic()
        self._closed = False

    def refit(self) -> dict[str, Any]:
        """See :meth:`Job.refit`."""
        try:
            return self._refit()
        finally:
            self._close_source()  # before the refit after this one begins with its own

    def _refit(self) -> dict[str, Any]:
        self._end.refused()  # what was said before is not about this refit
        try:
            try:
                self._source.open(self._name, self.session.remaining_s)
            except BaseException as error:
                self.perform(self.session.fail(error))
            self.drive()
        finally:
            committed = self.session.phase is Phase.COMMITTED
            if not committed:
                self._sender.drop_lanes_after_failure()
        unchanged = self._unchanged()
        if committed:  # whatever follows, this version is these weights and no others
            self._sender.version = self.version
            self._sender.committed = self._table
        if self.session.error is not None:
            raise self.session.error
        return self._report(unchanged).as_dict()

    def let_go(self) -> None:
        """See :meth:`Job.let_go`."""
        self._close_source()
        self._packer = self._lane = self._table = None
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
        if (hello := read_hello(frame, self._sender.token)) is not None:
            if channel is None:
                self._channels[key] = Channel(self._sender.token, hello.nonce, "sender")
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
        return [effect for key in self._end.departed() for effect in self.session.forget(key)]

    def do(self, effect: Effect) -> list[Effect]:
        """See :meth:`Job.do`."""
        match effect:
            case Send(message, to):
                keys = self.session.connections if to is None else [to]
                gone = [key for key in keys if not self._send(key, message)]
                if gone:
                    self.pump(0.0)  # why it went may be here already
                return [following for key in gone for following in self.session.forget(key)]
            case MakePlan(ready):
                prepare = self._make_plan(ready)
                return self.session.planned(prepare, self._plan.slots or _DIRECT_WINDOW)
            case Pack(index):
                self.session.at = self._plan.buckets[index].name
                self._tell(index)
                assert self._packer is not None
                return self.session.packed(index, self._packer.put(index))
            case Confirm():
                self.session.at = ""
                return self.session.confirmed(self._confirm())
        return []

    def _send(self, key: str, message: object) -> bool:
        """Sends to one connection, also to one that never said a Hello; False if it is gone."""
        channel = self._channels.get(key) or Channel(self._sender.token, b"", "sender")
        if isinstance(message, Offer):
            message = msgspec.structs.replace(message, nonce=secrets.token_bytes(16))
        return self._end.send(key, channel.encode(message))

    # -- what is sent, and where it lies ----------------------------------------------------------

    def _make_plan(self, ready: tuple[Ready, ...]) -> Prepare:
        self._wire = self._manifest.cast(ready[0].dtypes)
        self._casts = len(ready[0].dtypes)
        own = torch.empty(0, device=self._source.device).device  # by the name that tensors give it
        if own.type == "cuda":
            torch.cuda.synchronize(own)  # an optimizer may step on a stream of its own
        device = self._end.place(own, [r.gpus for r in ready])
        receivers = [hello.receiver for hello in self.session.peers.values()]
        private, token = self._end.private, self._sender.token
        self._hash = BlockHash.choose(device, private=private, token=token)
        tensors = self._at_home(device)
        if tensors is not None and not self._move_home(tensors, device, receivers):
            tensors = None
        self._bucket = self.options.bucket_for(device, direct=tensors is not None)
        if self.options.verify != "none":
            self._table = DigestTable(self._wire)
        holds = [r.holds for r in ready]
        if tensors is None:
            skip = self._skip(holds, self._digest_source)
            plan = self._plan_of(skip, direct=False)
            self._open_lane(plan, device, receivers)
            if self._lane is not None:
                window = self._sender.window(plan, self._lane, self._hash)
                self._packer = SlotPacker(
                    window, self._lane, self._table, self._source, self._manifest
                )
        else:
            everything = self._plan_of(b"", direct=True)
            skip = self._skip(holds, lambda: self._digest_lane(everything))
            plan = self._plan_of(skip, direct=True)
            if self._lane is not None:
                window = self._sender.window(plan, self._lane, self._hash)
                self._packer = DirectPacker(window, self._lane, self._table)
        self._plan = plan
        return Prepare(
            self.session.offer.session,
            plan.digest,
            self._bucket,
            len(plan.buckets),
            plan.direct,
            skip,
            dict(self._lane.ref) if self._lane else {},
            self.session.remaining_s,
            self._hash.kind,
        )

    def _plan_of(self, skip: bytes, *, direct: bool) -> TransferPlan:
        size, block = self._bucket, self._hash.block
        return self._sender.planner.plan(self._wire, size, direct=direct, skip=skip, block=block)

    def _open_lane(self, plan: TransferPlan, device: torch.device, receivers: list[str]) -> None:
        if plan.buckets:
            size = self._bucket
            self._lane = self._sender.lane(self._end, plan, device, receivers, size)

    def _move_home(
        self, tensors: dict[str, torch.Tensor], device: torch.device, receivers: list[str]
    ) -> bool:
        """Moves tensors to where receivers can read them; False if there is no memory for that.

        Raises:
            RefitError: There is none, and ``mode`` leaves no other way.
        """
        self._bucket = self.options.bucket_for(device, direct=True)
        try:
            self._open_lane(self._plan_of(b"", direct=True), device, receivers)
            if self._lane is not None:
                self._sender.arena.adopt(self._lane, self._wire, tensors)
        except (RefitError, torch.OutOfMemoryError) as error:
            self._lane = None
            why = str(error).splitlines()[0]
            self._fallback = f"the tensors cannot be moved to memory that engines read: {why}"
            self._sender.stay_put(self._manifest, self._fallback)
            if self.options.mode == "direct":
                raise RefitError(
                    f"refit: mode='direct' is not possible: {self._fallback}",
                    fix='use mode="auto" or mode="packed", or leave more memory free: that of one '
                    "tensor on the CPU, that of all tensors on a GPU",
                ) from error
            return False
        return True

    def _at_home(self, device: torch.device) -> dict[str, torch.Tensor] | None:
        """The source's own tensors, if receivers can read them where they are."""
        mode = self.options.mode
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
        elif not obstacle and not self._sender.arena.holds(self._manifest, tensors):
            obstacle = why_not_at_home(self._manifest, tensors, device)
        if obstacle is None and mode == "auto":
            obstacle = self._sender.arena.lacks(self._manifest)
        self._fallback = obstacle
        if obstacle and mode == "direct":
            raise ConfigError(
                f"refit: mode='direct' is not possible: {obstacle}",
                fix='use mode="auto" or mode="packed"',
                key="mode",
            )
        return None if obstacle or tensors is None else dict(tensors)

    def _skip(self, holds: list[bytes], digest: Callable[[], None]) -> bytes:
        """For each tensor 1 if every receiver has it as it is now; empty if all are sent."""
        join = self.options.join
        if not join and not any(map(any, holds)):  # nobody has anything, or nobody was asked
            return b""
        digest()
        assert self._table is not None
        if join:
            self._check_same()  # before a late engine, which may serve, is written to
        now = self._table.flat
        starts = range(0, len(now), DIGEST_BYTES)
        return bytes(
            all(held[i : i + DIGEST_BYTES] == now[i : i + DIGEST_BYTES] for held in holds)
            for i in starts
        )

    def _digest_source(self) -> None:
        """Digests every tensor as the source gives it."""
        block = min(self._hash.block, self._bucket // ALIGN * ALIGN)
        self._table = digest_all(self._source, self._manifest, self._wire, block, self._hash)

    def _digest_lane(self, everything: TransferPlan) -> None:
        """Digests every tensor where it is at home."""
        assert self._lane is not None
        assert self._table is not None
        window = self._sender.window(everything, self._lane, self._hash)
        for index, bucket in enumerate(everything.buckets):
            self._table.add(bucket, window.digests(index), everything.block_bytes)

    # -- the end ----------------------------------------------------------------------------------

    def _confirm(self) -> str:
        """Makes sure that what was sent is one state, and gives its digest."""
        self._source.confirm()
        if self.options.join:
            self._check_same()
        return "" if self._table is None else self._table.digest

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
                    f"{self._sender.name}: {text}", fix="look at WeightSource.close"
                ) from error
            self.session.error.add_note(text)

    def _check_same(self) -> None:
        """Raises unless the weights are those that the other engines serve."""
        before, now = self._sender.committed, self._table
        if before is None or now is None or before.digest != now.digest:
            raise LifecycleError(
                f"{self._sender.name}: the weights are no longer those of version "
                f"{self.version}, which the other engines serve",
                fix="let the late engine take part in the next refit of all, or join before "
                "training goes on, in the dtypes and with the bucket_bytes of the others",
                version=self.version,
            )

    def _report(self, unchanged: int | None) -> RefitReport:
        phases, plan = self.session.phase_seconds, self._plan
        seconds = sum(phases.values())
        rate = plan.nbytes / seconds
        lane = 0 if plan.direct or self._lane is None else self._lane.data.numel()
        device = "cpu" if self._lane is None else str(self._lane.data.device)
        return RefitReport(
            version=self.version,
            bytes=plan.nbytes,
            seconds=seconds,
            gb_per_s=rate / 1e9,
            of_copy_rate=rate / copy_rate(device),
            phases=phases,
            extra_memory_bytes=lane,
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

    def _unchanged(self) -> int | None:
        before, now = self._sender.committed, self._table
        if before is None or now is None:
            return None
        return sum(before.known.get(name) == digest for name, digest in now.known.items())

    def _tell(self, index: int) -> None:
        if time.monotonic() - self._told > _PROGRESS_S:
            self._told = time.monotonic()
            hookspecs.emit(
                "refit_progress",
                version=self.version,
                buckets=len(self._plan.buckets),
                sent=index,
                bytes=self._plan.nbytes,
            )
