"""One refit of rank 0, which decides: what is sent of which rank, and how it ends."""

from __future__ import annotations

import secrets
from collections import Counter
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch

from rl_core.errors import (
    ConfigError,
    LifecycleError,
    RefitAborted,
    RefitProtocolError,
)
from rl_core.plugins import hookspecs
from rl_core.weights.data.digests import DIGEST_BYTES, BlockHash, DigestTable, same
from rl_core.weights.data.parts import readers_of, union, without
from rl_core.weights.data.plan import DataMode, make_plan
from rl_core.weights.job import Job
from rl_core.weights.protocol import messages
from rl_core.weights.protocol.frames import Channel, read_hello
from rl_core.weights.protocol.sender_session import SenderSession
from rl_core.weights.protocol.session import (
    Answered,
    Confirm,
    Effect,
    MakePlan,
    Pack,
    Packed,
    Phase,
    Send,
    describe,
    repeats_peer_error,
)
from rl_core.weights.protocol.timing import CAUSE_S, TICK_S
from rl_core.weights.report import RefitReport
from rl_core.weights.sending.agreement import Agreement
from rl_core.weights.sending.share import Share

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from typing import TypeAlias

    from rl_core.interfaces.weights import WeightSource
    from rl_core.weights.connections import Connection
    from rl_core.weights.data.manifest import WeightManifest
    from rl_core.weights.data.parts import Layout, Partition
    from rl_core.weights.data.plan import TransferPlan
    from rl_core.weights.job import Endpoint
    from rl_core.weights.options import SendOptions
    from rl_core.weights.sending.kept import Kept
    from rl_core.weights.sending.ranks import Ranks
    from rl_core.weights.transports.base import SenderEnd

    T = TypeVar("T")
    #: They yield whether other ranks were asked, and go on with the answers.
    Steps: TypeAlias = Generator[bool, Mapping[int, Any], T]

__all__ = ["SendJob"]

#: Seconds between two events that tell of progress; short refits have none.
_PROGRESS_S = 1.0


class SendJob(Job[SenderSession]):
    """One refit of a sender."""

    def __init__(
        self,
        endpoint: Endpoint[Any],
        kept: Kept,
        ranks: Ranks | None,
        connection: Connection[SenderEnd],
        source: WeightSource,
        options: SendOptions,
        version: int,
        number: int,
    ) -> None:
        self.options = options
        self.version = version
        self._end = connection.end
        self._share = Share(kept, source)
        self._share.connection = connection
        self._kept, self._ranks = kept, ranks
        offer = messages.Offer(
            secrets.token_hex(16),
            endpoint.name,
            version,
            self._share.manifest.digest,
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
            ranks=ranks.names[1:] if ranks is not None else [],
        )
        super().__init__(session, endpoint, number, torch.device(source.device))
        self._channels: dict[str, Channel] = {}
        self._unreachable: list[str] = []
        self._table: DigestTable | None = None
        self._tables: dict[int, DigestTable] = {}  # by rank, what it found
        self._fallback: str | None = None
        self._steps: Steps[list[Effect]] | None = None
        # What receivers want decides on these; they are set with the plan.
        self._ready: Mapping[str, messages.Ready]
        self._dtypes: dict[str, str]
        self._wire: WeightManifest
        self._layouts: dict[int, Layout]  # by rank
        self._agreed: Agreement
        self._parts: Partition
        self._keeps: dict[str, bytes]  # by connection
        self._takes: dict[int, dict[str, bytes]]  # by rank and connection, what comes from it
        self._copies: dict[int, bytes] = {}  # by rank, what it hashes without sending it
        self._compared = (0, 0.0)  # bytes and seconds
        self._plans: dict[int, TransferPlan] = {}  # by rank
        self._extra_bytes = 0
        self._reported_at = endpoint.runtime.clock()
        self._same = options.version == kept.version  # the weights of a committed version

    def run(self) -> dict[str, Any]:
        """See :meth:`Job.run`; the other ranks learn how it ends, also if it never begins."""
        if (ranks := self._ranks) is None:
            return super().run()
        session, channels = self.session, self._channels
        message: messages.Over | messages.Abort = messages.Abort(session.offer.session, "", "")
        try:
            report = super().run()
            message = messages.Over(session.offer.session, report)
            return report
        except BaseException as error:
            message = messages.Abort(session.offer.session, *describe(error))
            raise
        finally:  # before the caller can begin the next one
            for key in session.ranks.values():
                ranks.send(key, channels[key].encode(message))
            ranks.end(self.number, message, session.ranks, session.absent)

    def refit(self) -> dict[str, Any]:  # noqa: D102
        kept, session = self._kept, self.session
        try:
            self._end.refused()  # earlier refusals are not about this refit
            try:
                try:
                    self._check_version()
                    self._share.source.open(self.number, session.remaining_s)
                    self.perform(session.overdue())
                    if self._ranks is not None:
                        self._ranks.begin(self.number)
                except BaseException as error:
                    self.perform(session.fail(error))
                self.endpoint.runtime.drive(self)
            finally:
                committed = session.phase is Phase.COMMITTED
                if not committed or session.error is not None:
                    kept.drop_lanes_after_failure()
            before, hashed, now = kept.committed, kept.committed_hash, self._table
            if committed:  # whatever follows, this version is these weights and no others
                kept.version, kept.committed = self.version, now
                kept.committed_hash, kept.committed_parts = self._share.hash, self._parts
            if session.error is not None:
                self._name_lost_rank()
                raise session.error
            unchanged = None
            if before is not None and now is not None and hashed == self._share.hash:
                unchanged = sum(before.known.get(n) == digest for n, digest in now.known.items())
            return self._report(unchanged).as_dict()
        finally:
            self._share.close(session.error)  # before the refit after this one begins with its own

    def release_resources(self) -> None:  # noqa: D102
        self._share.close()
        self._table = self._steps = None
        self._channels = {}

    # -- what arrives -----------------------------------------------------------------------------

    def pump(self, timeout_s: float) -> None:  # noqa: D102
        unreachable, self._unreachable = self._unreachable, []
        for key, frame in self._frames(0.0 if unreachable else timeout_s):
            if self.given_up:
                return  # a Hello that comes now means the next refit, and comes again
            try:
                effects = self._take(key, frame)
            except RefitProtocolError as error:
                effects = self.session.corrupted(key, error)
            self.perform(effects)
        for key in unreachable:  # a frame received just now may give the cause
            self.perform(self._lost(key))

    def _frames(self, timeout_s: float) -> list[tuple[str, bytes]]:
        """What has arrived from receivers and ranks; waits for the first."""
        if self._ranks is None:
            return self._end.receive(timeout_s)
        self._ranks.wait(self._end, timeout_s)
        return [*self._ranks.receive(0.0), *self._end.receive(0.0)]

    def _take(self, key: str, frame: bytes) -> list[Effect]:
        ranks, channel = self._ranks, self._channels.get(key)
        of_rank = ranks is not None and ranks.has(key)
        token = ranks.token if ranks is not None and of_rank else self._kept.token
        if (hello := read_hello(frame, token)) is not None:
            if of_rank != bool(hello.rank):
                raise RefitProtocolError("received a Hello on a connection for others")
            if channel is None:
                self._channels[key] = Channel(token, hello.nonce, "sender")
            elif channel.nonce != hello.nonce:
                raise RefitProtocolError("received a second, different Hello on one connection")
            return self.session.receive(key, hello)
        if channel is None:
            return []  # of a refit before this one
        return self.session.receive(key, channel.decode(frame))

    def lost_peers(self) -> list[Effect]:  # noqa: D102
        session = self.session
        if session.phase is Phase.DISCOVER and (why := self._end.refused()) is not None:
            error = RefitAborted(f"DISCOVER: a receiver gave up: {why}", peer="a receiver")
            return session.fail(error)
        lost = self._end.departed()
        if self._ranks is not None:
            lost += self._ranks.departed()
            for rank in self._ranks.ended() if session.phase is Phase.DISCOVER else []:
                if rank not in session.ranks:  # it will not come any more
                    return session.fail(self._ranks.lost(rank))
        return [effect for key in lost for effect in self._lost(key)]

    def _lost(self, key: str) -> list[Effect]:
        rank = next((rank for rank, its in self.session.ranks.items() if its == key), None)
        if rank is None or self._ranks is None:
            return self.session.lost(key)
        return self.session.lost_rank(rank, self._ranks.lost(rank))

    def _name_lost_rank(self) -> None:
        """A receiver that fails because of a rank that was lost may not know it; this side may."""
        ranks, error, session = self._ranks, self.session.error, self.session
        if ranks is None or error is None or not repeats_peer_error(error):
            return
        end = self.endpoint.runtime.clock() + CAUSE_S
        while self.endpoint.runtime.clock() < end:
            ranks.receive(TICK_S)
            lost = {*ranks.departed()} & {*session.ranks.values()}
            for rank, key in session.ranks.items():
                if key in lost or rank in ranks.ended():
                    session.error = ranks.lost(rank)
                    session.error.__cause__ = error
                    return

    def do(self, effect: Effect) -> list[Effect]:  # noqa: D102
        session = self.session
        match effect:
            case Send(message, to):
                for key in session.connections if to is None else [to]:
                    self._send(key, message)
            case MakePlan(ready, ranks):
                self._steps = self._plan(ready, ranks)
                return self._go_on(None)
            case Answered(answers):
                return self._go_on(answers)
            case Pack(index):
                plan = self._plans[0]
                session.at = plan.buckets[index].name
                now = self.endpoint.runtime.clock()
                if now - self._reported_at > _PROGRESS_S:
                    self._reported_at = now
                    facts = {"buckets": len(plan.buckets), "sent": index, "bytes": plan.nbytes}
                    hookspecs.emit("refit_progress", version=self.version, **facts)
                return session.packed(index, self._share.put(index))
            case Packed(index, digests, lane):
                plan = self._plans[lane]
                if self._table is not None:
                    found = [
                        digests[at : at + DIGEST_BYTES]
                        for at in range(0, len(digests), DIGEST_BYTES)
                    ]
                    segments = plan.buckets[index].segments
                    blocks = (-(-(s.stop - s.start) // plan.block_bytes) for s in segments)
                    if sum(blocks) != len(found):
                        raise RefitProtocolError(f"rank {lane} sent too few digests", rank=lane)
                    self._tables[lane].add(segments, found, plan.block_bytes)
                return session.packed(index, digests, lane)
            case Confirm():
                session.at = ""
                self._steps = self._confirm()
                return self._go_on(None)
        return []

    def _send(self, key: str, message: Any) -> None:
        # One that has sent no Hello has no channel.
        channel = self._channels.get(key) or Channel(self._kept.token, b"", "sender")
        if isinstance(message, messages.Offer):
            message = msgspec.structs.replace(message, nonce=secrets.token_bytes(16))
        frame, ranks = channel.encode(message), self._ranks
        end = ranks if ranks is not None and ranks.has(key) else self._end
        if not end.send(key, frame):
            self._unreachable.append(key)

    def _go_on(self, answers: Mapping[int, Any] | None) -> list[Effect]:
        """Goes on until other ranks have been asked, or with what follows at the end."""
        assert self._steps is not None, "ranks answer what this one sent"
        try:
            asked = self._steps.send(answers)  # type: ignore[arg-type]  # None begins
            while not asked:
                asked = self._steps.send({})
        except StopIteration as end:
            effects: list[Effect] = end.value
            return effects
        return []

    def _ask(self, questions: Mapping[int, messages.ToRank], answer: type) -> bool:
        """Asks all other ranks, if any; they do their part while this one does its own."""
        self.perform(self.session.ask(questions, answer))
        return bool(questions)

    # -- what is sent, and where it lies ----------------------------------------------------------

    def _plan(
        self, ready: Mapping[str, messages.Ready], ranks: Mapping[int, messages.RankReady]
    ) -> Steps[list[Effect]]:
        """Decides on the parts, which rank each one comes from, and where it lies."""
        kept, share, answers = self._kept, self._share, list(ready.values())
        self._ready, manifest = ready, share.manifest
        self._dtypes = answers[0].dtypes
        self._wire = kept.wire_of(manifest, self._dtypes)
        share.look()
        share.device = self._end.lane_device(share.own, [r.gpus for r in answers])
        share.hash = BlockHash.choose(share.device, private=self._end.private, token=kept.token)
        self._layouts = {0: share.layout}
        for rank, its in sorted(ranks.items()):  # engines compare lanes in order
            assert self._ranks is not None
            self._ranks.introduce(rank, its.pid, its.host)
            self._ranks.check_state(rank, its.state, share.source.state)
            self._layouts[rank] = its.keeps
        peers = self.session.peers
        names: dict[Any, str] = {hello.receiver: hello.name for hello in peers.values()}
        names |= enumerate(self._ranks.names if self._ranks is not None else [""])
        keeps = {peers[key].receiver: answer.keeps for key, answer in ready.items()}
        hosts: dict[Any, str] = {peers[key].receiver: answer.host for key, answer in ready.items()}
        hosts |= {rank: its.host.partition(" ")[0] for rank, its in ranks.items()}
        hosts[0] = self._ranks.host.partition(" ")[0] if self._ranks is not None else ""
        of = (self._wire, self._layouts, keeps, hosts)
        make = partial(Agreement, *of, names, self.options.verify != "none")
        agreed = kept.same("agreement", (*of, self.options.verify), make)
        self._agreed, self._parts = agreed, agreed.parts
        share.parts = agreed.parts
        self._keeps = {key: agreed.keeps[peers[key].receiver] for key in ready}
        self._takes = {
            rank: {key: its[peers[key].receiver] for key in ready}
            for rank, its in agreed.takes.items()
        }
        share.readers = {hello.receiver: b"" for hello in peers.values()}
        mode, casts = self.options.mode, len(self._dtypes)
        direct = mode != "packed" and self._is_direct(share.move(casts, wanted=mode == "direct"))
        if self._same or any(any(self._holds(answer)) for answer in answers):
            before = kept.committed_parts if self._same else None
            if before is not None and before != self._parts:  # other engines keep other parts
                comparable = all(map(before.has, self._layouts.values()))
                if before.whole.digest != self._wire.digest or not comparable:
                    self._check_same(None)
                yield from self._hash_parts(before, direct)
            self._table = yield from self._hash_parts(self._parts, direct)
        elif self.options.verify != "none":
            self._table = DigestTable(self._parts.manifest)
        return (yield from self._prepare_lanes(direct))

    def _is_direct(self, reason: str) -> bool:
        """Whether it is, unless there is a reason; raises where nothing else is wanted."""
        self._fallback = reason or None
        if reason and self.options.mode == "direct":
            raise ConfigError(
                f"refit: mode='direct' is not possible: {reason}",
                fix='use mode="auto" or mode="packed"',
                key="mode",
            )
        return not reason

    def _holds(self, answer: messages.Ready) -> bytes:
        """The digests of the parts that a receiver has, if it knows these parts."""
        return answer.holds if answer.parts == self._parts.manifest.digest else b""

    def _hash_parts(self, parts: Partition, direct: bool) -> Steps[DigestTable]:
        """Has the digest of every part made, of what it is now, each on a rank that has it.

        Args:
            parts: Those of this refit, or those of the committed version, which come before them.
            direct: How this refit is.
        """
        mode = DataMode.DIRECT if direct else DataMode.PACKED
        size = self.options.bucket_for(self._share.device, mode)
        table, everything = DigestTable(parts.manifest), b"\1" * len(parts.manifest.owned)
        once = parts.shared_out(self._layouts, {"": ("", everything)}, {}, compared=True)
        gives = {rank: its[""] for rank, its in once.items()}
        questions = {
            rank: messages.HashParts(
                self.session.offer.session,
                self._dtypes,
                dict(parts.cuts),
                gives[rank],
                size,
                self._share.hash.kind,
                self._end.private,
                self._kept.token,
            )
            for rank in self.session.ranks
        }

        asked = self._ask(questions, messages.PartsHashed)
        table.known.update(self._share.digests(mode, size, parts, gives[0]).known)
        for rank, answer in (yield asked).items():
            table.take(answer.digests, gives[rank], rank)
        if self._same and self._kept.committed_parts in (None, parts):
            self._check_same(table)  # before an engine, which may serve, is written to
        return table

    def _skipped(self) -> bytes:
        """A byte for each part, 1 for those that no engine needs; empty if all are needed."""
        masks, now = list(self._keeps.values()), b""
        if self._table is not None and self._table.known:
            now = self._table.flat()
            held = [self._holds(answer) for answer in self._ready.values()]
            masks = [without(keeps, same(its, now)) for keeps, its in zip(masks, held, strict=True)]
        skip = without(b"\1" * len(masks[0]), union(masks))
        if self.options.isolation == "staged":  # a second copy has all of a tensor, or nothing
            skip = self._parts.whole_tensors(skip)
        return skip if any(skip) else b""

    def _prepare_lanes(self, direct: bool) -> Steps[list[Effect]]:
        """Has every rank make its lane, from which the receivers that keep its parts read."""
        mode = DataMode.DIRECT if direct else DataMode.PACKED
        size, skip = self.options.bucket_for(self._share.device, mode), self._skipped()
        ids = {key: hello.receiver for key, hello in self.session.peers.items()}
        needed = ~int.from_bytes(skip)
        idle = [key for key, keeps in self._keeps.items() if not int.from_bytes(keeps) & needed]
        skips: dict[int, bytes] = {}
        readers: dict[int, dict[str, bytes]] = {}
        for rank, takes in self._takes.items():
            of_all = () if rank else idle
            skips[rank], readers[rank] = readers_of(takes, skip, first=rank, idle=of_all)
        for rank, both in self._agreed.copies.items():  # what it sends is hashed on the way
            self._copies[rank] = without(both, without(both, skips[rank])) if skips[rank] else b""
        questions = {
            rank: messages.PrepareRank(
                self.session.offer.session,
                self._dtypes,
                dict(self._parts.cuts),
                skips[rank],
                self._copies[rank],
                size,
                direct,
                self._share.hash.kind,
                self._kept.token,
                self.options.transport,
                dict(self._end.address),
                {ids[key]: reads for key, reads in readers[rank].items()},
                tuple(answer.gpus for answer in self._ready.values()),
            )
            for rank in self.session.ranks
        }

        if self._table is not None:
            manifest = self._parts.manifest
            self._tables = {rank: DigestTable(manifest) for rank in self._layouts}
        asked = self._ask(questions, messages.RankPrepared)
        self._share.readers = {ids[key]: reads for key, reads in readers[0].items()}
        buckets = self._share.prepare(
            mode, size, skips[0], self._tables.get(0), self.options.check_finite, self.version
        )
        buckets.lane.ends = self.session.deadline
        self._plans = {0: buckets.plan}
        answers = yield asked
        reasons = [f"rank {rank}: {its.reason}" for rank, its in answers.items() if its.reason]
        if reasons and not self._is_direct(reasons[0]):
            return (yield from self._prepare_lanes(False))
        self._extra_bytes = self._share.extra_bytes
        infos: dict[int, messages.LaneInfo] = {}
        for rank in self._layouts:
            places = answers[rank].places if rank else self._share.places(mode)
            if rank:
                of = (self._parts, size, mode, skips[rank], self._share.hash.block, places)
                plan = self._plans[rank] = self._kept.same(rank, of, partial(make_plan, *of))
                if plan.digest != answers[rank].plan:
                    text = f"rank {rank} and rank 0 made different plans"
                    raise RefitProtocolError(text, phase="PREPARE", rank=rank)
                self._extra_bytes += answers[rank].extra_bytes
            ref = answers[rank].ref if rank else dict(self._share.buckets.lane.ref)
            digest = self._plans[rank].digest
            infos[rank] = messages.LaneInfo(digest, skips[rank], ref, places=places)
        prepares: dict[str, messages.Prepare] = {}
        for key in ids:
            lanes = {
                rank: msgspec.structs.replace(info, reads=readers[rank][key])
                for rank, info in infos.items()
                if key in readers[rank]
            }
            prepares[key] = messages.Prepare(
                self.session.offer.session,
                size,
                direct,
                dict(self._parts.cuts),
                lanes,
                self.session.remaining_s,
                self._share.hash.kind,
            )
        self._plans = {rank: plan for rank, plan in self._plans.items() if readers[rank]}
        sizes = {rank: (len(plan.buckets), plan.window) for rank, plan in self._plans.items()}
        return self.session.planned(prepares, sizes)

    # -- the end ----------------------------------------------------------------------------------

    def _confirm(self) -> Steps[list[Effect]]:
        """Sees that what was sent is of one state, on all ranks; then engines seal."""
        clock, share, copies = self.endpoint.runtime.clock, self._share, self._copies
        begun, confirm = clock(), messages.ConfirmRank(self.session.offer.session)
        asked = self._ask(dict.fromkeys(self.session.ranks, confirm), messages.RankConfirmed)
        if any(copies[0]):
            size = self.options.bucket_for(share.device, share.buckets.plan.mode)
            own = share.digests(DataMode.PACKED, size, self._parts, copies[0])
            self._tables[0].known.update(own.known)
        share.source.confirm()
        for rank, answer in (yield asked).items():
            assert self._ranks is not None
            self._ranks.check_state(rank, answer.state, share.source.state)
            if self._tables:
                self._tables[rank].take(answer.copies, copies[rank], rank)
        if any(map(any, copies.values())):
            owned = self._parts.manifest.owned
            nbytes = sum(part.nbytes for mask in copies.values() for part in compress(owned, mask))
            self._compared = nbytes, clock() - begun
        if self._table is not None:
            self._table.known.update(self._compare_copies())
        if self._same and self._kept.committed_parts in (None, self._parts):
            self._check_same(self._table)  # of other parts, `confirm` alone knows that they stayed
        table = self._table
        return self.session.confirmed(
            {key: "" if table is None else table.digest(m) for key, m in self._keeps.items()}
        )

    def _compare_copies(self) -> dict[str, bytes]:
        """Compares what the ranks found, and returns the digest of every part that they hashed.

        Raises:
            LifecycleError: Two ranks have other values of the same part; names one of them.
        """
        found: dict[str, bytes] = {}
        for table in self._tables.values():
            for name, digest in table.known.items():
                if found.setdefault(name, digest) == digest:
                    continue
                values = {n: t.known[name] for n, t in self._tables.items() if name in t.known}
                # The one of several that is alone; of two it is the later one.
                alone = Counter(values.values())
                odd = min(reversed(values), key=lambda rank: alone[values[rank]])
                other = next(rank for rank in values if values[rank] != values[odd])
                assert self._ranks is not None
                names = self._ranks.names
                raise LifecycleError(
                    f"{names[odd]} has other values of {name} than {names[other]}: each of them "
                    "has a copy, and copies must be equal",
                    fix="load one checkpoint on all ranks; then look for a step, a learning rate "
                    "or a change by hand that not all of them had",
                    peer=f"rank {odd}",
                    rank=odd,
                )
        return found

    def _check_version(self) -> None:
        """Decides whether the version is a committed one, whose weights must be the same."""
        kept, name = self._kept, self.endpoint.name
        if self._same and kept.version != self.version:
            raise LifecycleError(
                f"{name}: version {kept.version} was committed while version "
                f"{self.version} waited to be sent again",
                fix="call refit again",
                version=kept.version,
            )
        self._same = self.options.version == kept.version
        if self._same and (kept.committed is None or self.options.verify == "none"):
            raise LifecycleError(
                f"{name}: version {self.version} was committed already, and without hashes "
                "nothing shows whether the weights are the same",
                fix='use verify="wire" in both refits, or leave version out',
                version=self.version,
            )

    def _check_same(self, now: DigestTable | None) -> None:
        """Raises unless the weights are those that the other engines serve."""
        before, hashed, now_with = self._kept.committed, self._kept.committed_hash, self._share.hash
        if hashed is not None and hashed != now_with:
            raise LifecycleError(
                f"{self.endpoint.name}: version {self.version} was hashed with {hashed.kind}, and "
                f"this refit hashes with {now_with.kind}: nothing shows whether the weights "
                "are the same",
                fix="use the transport and device of the refit that committed this version",
                version=self.version,
            )
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
        phases, plans = self.session.phase_seconds, self._plans.values()
        seconds, nbytes = sum(phases.values()), sum(plan.nbytes for plan in plans)
        sent = {part for plan in plans for part in plan.sent}
        names = {self._parts.tensor_of(part).name for part in sent} if self._parts.cuts else sent
        tensors = len(names)
        return RefitReport(
            version=self.version,
            origin=self._kept.origin,
            bytes=nbytes,
            seconds=seconds,
            gb_per_s=nbytes / seconds / 1e9,
            phases=phases,
            extra_memory_bytes=self._extra_bytes,
            tensors=tensors,
            skipped=len(self._wire.owned) - tensors,
            unchanged=unchanged,
            cast=len(self._dtypes),
            buckets=sum(len(plan.buckets) for plan in plans),
            receivers=self.options.receivers,
            compared_bytes=self._compared[0],
            compared_seconds=self._compared[1],
            transport=self.options.transport,
            mode=self._share.buckets.plan.mode.value,
            verify=self.options.verify,
            isolation=self.options.isolation,
            fallback=self._fallback,
        )
