"""One refit of another rank than 0: packs what rank 0 wants of it, and waits for the decision."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_core.errors import RefitPeerError, RefitProtocolError
from rl_core.weights.connections import Connection
from rl_core.weights.data.digests import BlockHash, DigestTable
from rl_core.weights.data.parts import Partition
from rl_core.weights.data.plan import DataMode
from rl_core.weights.job import Job
from rl_core.weights.options import SendOptions
from rl_core.weights.protocol import messages
from rl_core.weights.protocol.frames import Channel, write_hello
from rl_core.weights.protocol.rank_session import RankSession
from rl_core.weights.protocol.session import Effect, Perform, Phase, Send
from rl_core.weights.sending.share import Share

if TYPE_CHECKING:
    import concurrent.futures

    from rl_core.interfaces.weights import WeightSource
    from rl_core.weights.job import Endpoint
    from rl_core.weights.sending.kept import Kept
    from rl_core.weights.sending.ranks import Ranks
    from rl_core.weights.sending.sender import RefitSender

__all__ = ["RankJob", "follow"]


class RankJob(Job[RankSession]):
    """One refit of a rank that does not decide.

    Args:
        endpoint: Of this rank.
        kept: By this rank.
        ranks: All of the trainer.
        source: Of this rank; or why it has none, of which rank 0 is informed.
        options: Of this rank's call; rank 0's decide on all but the deadline
            and ``check_finite``.
        number: Of the refit.
    """

    version = 0

    def __init__(
        self,
        endpoint: Endpoint[Any],
        kept: Kept,
        ranks: Ranks,
        source: WeightSource | BaseException,
        options: SendOptions,
        number: int,
    ) -> None:
        self.options = options
        self._kept, self._ranks = kept, ranks
        failed = source if isinstance(source, BaseException) else None
        self._share = None if isinstance(source, BaseException) else Share(kept, source)
        device = "cpu" if self._share is None else self._share.source.device
        hello = messages.Hello("", ranks.names[ranks.rank], ranks.pid, b"", number, ranks.rank)
        session = RankSession(
            hello,
            leader=ranks.names[0],
            manifest="" if self._share is None else self._share.manifest.digest,
            failed=failed,
            counted=options.number is None,
            deadline_s=options.deadline_s,
            clock=endpoint.runtime.clock,
        )
        super().__init__(session, endpoint, number, torch.device(device))
        self._client = ranks.connect()
        self._channel: Channel
        self._answered = True  # the next Hello opens a connection
        self._verifies = True
        self._buckets: list[str] = []  # that rank 0 will want
        self._packed = 0  # of these
        self._copies: tuple[bytes, int] | None = None  # of which digests are due; bucket_bytes
        self._digests = b""  # of these

    def refit(self) -> dict[str, Any]:  # noqa: D102
        session = self.session
        try:
            try:
                if self._share is not None:
                    self._share.source.open(self.number, session.remaining_s)
            except Exception as error:  # it is the answer to rank 0's Offer
                session.failed = error
            self.perform(session.overdue())
            if not session.phase.terminal:
                self.perform(session.start())
            self.endpoint.runtime.drive(self)
        finally:
            if self.endpoint.number == self.number and self.options.number is None:
                # The next one is that after rank 0's; this one, if rank 0 never came to it.
                unmet = isinstance(session.error, RefitPeerError) and not session.met
                self.endpoint.number = session.leader_number or self.number - unmet
            if session.phase is not Phase.COMMITTED:
                self._kept.drop_lanes_after_failure()
            if self._share is not None:
                self._share.close(session.error)
        if session.error is not None:
            raise session.error
        return session.report or {}

    def release_resources(self) -> None:  # noqa: D102
        self._client.close()
        if self._share is not None:
            self._share.close()

    def pump(self, timeout_s: float) -> None:  # noqa: D102
        waits = self._copies is None or self._packed < len(self._buckets)
        frame = self._client.receive(timeout_s if waits else 0.0)
        if frame is None and not waits:
            self._hash_copies()
        while frame is not None:
            self._answered = True
            try:
                effects = self.session.receive(self._channel.decode(frame))
            except RefitProtocolError as error:
                effects = self.session.fail(error)
            self.perform(effects)
            frame = None if self.session.phase.terminal else self._client.receive(0.0)

    def lost_peers(self) -> list[Effect]:  # noqa: D102
        return self.session.fail(self._ranks.lost(0)) if self._client.lost() else []

    def do(self, effect: Effect) -> list[Effect]:  # noqa: D102
        match effect:
            case Send(messages.Hello() as hello):
                if self._answered:  # by another refit, which has counted its frames
                    self._answered = False
                    self._client.open()
                    nonce = secrets.token_bytes(16)
                    self._channel = Channel(self._ranks.token, nonce, "receiver")
                hello = msgspec.structs.replace(hello, nonce=self._channel.nonce)
                self._client.send(write_hello(hello, self._ranks.token))
            case Send(message):
                self._client.send(self._channel.encode(message))
            case Perform(message):
                assert self._share is not None, "or else the session had failed"
                return self.session.answer(self._answer(message, self._share))
        return []

    def _answer(self, message: Any, share: Share) -> messages.FromRank:
        """Does what rank 0 wants."""
        match message:
            case messages.Offer():
                self.version, self._verifies = message.version, message.verify != "none"
                share.look()
                keeps = {index: tuple(boxes) for index, boxes in share.layout.items()}
                state = share.source.state
                pid, host = self._ranks.pid, self._ranks.host
                return messages.RankReady(message.session, state, keeps, pid, host)
            case messages.HashParts():
                private, token = message.private, message.token
                parts = self._cut(message, message.mask)
                share.parts = parts
                share.hash = BlockHash.named(message.hash, private=private, token=token)
                mask, how = message.mask, (DataMode.PACKED, message.bucket_bytes)
                digests = share.digests(*how, parts, mask).flat(mask)
                return messages.PartsHashed(message.session, digests)
            case messages.PrepareRank():
                return self._prepare(message, share)
            case messages.PackBucket(session, index):
                if index != self._packed or index >= len(self._buckets):
                    due = f"{self._packed} of {len(self._buckets)}"
                    raise RefitProtocolError(f"rank 0 wants bucket {index}, expected {due}")
                self.session.at = self._buckets[index]
                self._packed += 1
                return messages.BucketPacked(session, index, share.put(index))
            case messages.ConfirmRank(session):
                self._hash_copies()
                share.source.confirm()
                return messages.RankConfirmed(session, share.source.state, self._digests)
        raise RefitProtocolError(f"rank 0 sent {type(message).__name__}")

    def _prepare(self, message: messages.PrepareRank, share: Share) -> messages.RankPrepared:
        """Makes the lane."""
        connections, transport = self._kept.connections, message.transport
        connection = connections.get(transport)
        if connection is None or connection.address != message.address:
            connections.close(transport)
            end = self.endpoint.runtime.transport(transport).rank(message.address)
            connection = connections[transport] = Connection(end, message.address)
        end, parts = (
            connection.end,
            self._cut(message, message.skip, message.copies, *message.readers.values()),
        )
        share.parts, share.connection, share.readers = parts, connection, message.readers
        share.hash = BlockHash.named(message.hash, private=end.private, token=message.token)
        share.device = end.lane_device(share.own, message.gpus)
        if message.direct and (reason := share.move(len(message.dtypes), wanted=False)):
            return messages.RankPrepared(message.session, reason=reason)
        mode = DataMode.DIRECT if message.direct else DataMode.PACKED
        table = DigestTable(parts.manifest) if self._verifies else None
        buckets = share.prepare(
            mode, message.bucket_bytes, message.skip, table, self.options.check_finite, self.version
        )
        buckets.lane.ends = self.session.deadline
        self._buckets = [bucket.name for bucket in buckets.plan.buckets]
        self._packed = 0
        self._copies = message.copies, message.bucket_bytes
        plan, ref, places = buckets.plan.digest, dict(buckets.lane.ref), share.places(mode)
        return messages.RankPrepared(
            message.session, plan, ref, places, extra_bytes=share.extra_bytes
        )

    def _hash_copies(self) -> None:
        """Makes the digests of parts that others send, once this rank has packed its own."""
        if self._copies is not None and self._share is not None:
            (mask, size), self._copies = self._copies, None
            parts = self._share.parts
            self._digests = self._share.digests(DataMode.PACKED, size, parts, mask).flat(mask)

    def _cut(self, message: messages.HashParts | messages.PrepareRank, *masks: bytes) -> Partition:
        assert self._share is not None
        of = self._kept.wire_of(self._share.manifest, message.dtypes), message.cuts
        parts: Partition = self._kept.same("parts", of, partial(Partition.checked, *of))
        if {len(mask) for mask in masks if mask} - {len(parts.manifest.owned)}:
            raise RefitProtocolError("rank 0 and this rank count different parts")
        return parts


def follow(sender: RefitSender, **options: Any) -> concurrent.futures.Future[dict[str, Any]]:
    """Takes part in one refit of rank 0, as another rank with that sender.

    Returns:
        A future of rank 0's report. It fails with a RefitAborted if rank 0 ended the refit, and
        with a RefitPeerError if rank 0 is lost.
    """
    with sender.asking:
        sender.check_open()
        assert sender.ranks is not None, "it is one of several ranks"
        given = SendOptions.of({"number": options.get("number")}).number
        number = sender.number = sender.next_number(given)
        chosen = SendOptions.of(options)
        try:
            source = sender.source()
        except BaseException as error:
            sender.start(RankJob(sender, sender.kept, sender.ranks, error, chosen, number))
            raise
        try:
            job = RankJob(sender, sender.kept, sender.ranks, source, chosen, number)
        except BaseException:
            source.close()
            raise
        return sender.start(job)
