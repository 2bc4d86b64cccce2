"""The sender's state machine: one refit to any number of receivers, all or none.

Other ranks of the trainer take part in it like receivers: they come in DISCOVER, and what they do
in a later phase they answer in it. Rank 0 alone decides.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec

from rl_core.errors import (
    CapabilityError,
    LifecycleError,
    ManifestMismatchError,
    RefitAborted,
    RefitError,
    RefitPeerError,
    RefitProtocolError,
)
from rl_core.weights.protocol import messages
from rl_core.weights.protocol.session import (
    IN_STEP_AGAIN,
    Answered,
    Confirm,
    Effect,
    MakePlan,
    Pack,
    Packed,
    Phase,
    Send,
    Session,
    describe,
    peer_error,
)
from rl_core.weights.protocol.timing import report_margin_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from rl_core.errors import RLError

__all__ = ["SenderSession"]

#: Connections that may have an offer and no answer yet, for each receiver that is wanted: those
#: of earlier refits that are still on the way, and those that replay another one's Hello.
_OFFERS = 32


@dataclass
class _Peer:
    hello: messages.Hello
    #: Among who takes part; None before that.
    number: int | None = None
    #: The phases in which the peer did its part.
    did: set[Phase] = field(default_factory=set)
    ready: Any = None
    #: The lanes that it reads, and the buckets of each that it has loaded.
    lanes: set[int] = field(default_factory=set)
    loaded: Counter[int] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        if self.hello.rank:
            return self.hello.name
        number = "" if self.number is None else f" {self.number}"
        return f"receiver{number} ({self.hello.name}, pid {self.hello.pid})"

    @property
    def details(self) -> dict[str, Any]:
        """Who it is, for errors."""
        rank = self.hello.rank
        return {"peer": f"rank {rank}", "rank": rank} if rank else {"peer": self.name}


@dataclass
class _Lane:
    """The buckets that one rank sends.

    Attributes:
        buckets: How many there are.
        window: Those that may be announced and not loaded.
        packed: Those that were announced.
        wanted: Those that were, or are to be packed: of another rank as many as there is room for,
            so that it does not wait for this one.
    """

    buckets: int
    window: int
    packed: int = 0
    wanted: int = 0


class SenderSession(Session):
    """One refit, seen from the trainer's rank 0.

    The job calls :meth:`receive` with what arrives, performs the effects, and answers
    ``MakePlan`` with :meth:`planned`, ``Pack`` and ``Packed`` with :meth:`packed` and ``Confirm``
    with :meth:`confirmed`. Before it answers it may :meth:`ask` the other ranks.

    Attributes:
        absent: Ranks that have left, or had not come when the deadline had passed.

    A connection that sends a Hello gets the offer; one that answers Ready takes part. A Hello
    proves nothing: its connection may be closed by now, or it may be a replay of somebody else's.
    A Ready answers this very offer.
    """

    SELF: ClassVar[dict[str, int]] = {"rank": 0}
    #: What may arrive in each phase from who takes part. ``Failed`` is legal in all of them; a
    #: ``Hello`` after DISCOVER means the next refit and is repeated; all else ends the session.
    TABLE: ClassVar[dict[tuple[Phase, type], str]] = {
        (Phase.DISCOVER, messages.Ready): "_on_ready",  # all ready     -> PREPARE
        (Phase.DISCOVER, messages.RankReady): "_on_ready",
        (Phase.PREPARE, messages.PartsHashed): "_on_answer",
        (Phase.PREPARE, messages.RankPrepared): "_on_answer",
        (Phase.PREPARE, messages.Prepared): "_on_prepared",  # all prepared  -> TRANSFER
        (Phase.TRANSFER, messages.BucketPacked): "_on_packed",
        (Phase.TRANSFER, messages.Loaded): "_on_loaded",  # all loaded    -> SEAL
        (Phase.SEAL, messages.RankConfirmed): "_on_answer",  # confirmed     -> INSTALL
        (Phase.INSTALL, messages.Sealed): "_on_sealed",  # all sealed    -> COMMIT
        (Phase.COMMIT, messages.Done): "_on_done",  # all done      -> COMMITTED
    }

    def __init__(
        self,
        offer: messages.Offer,
        *,
        number: int,
        receivers: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        ranks: Sequence[str] = (),
    ) -> None:
        super().__init__(deadline_s, clock)
        self.offer = offer
        self._number = number
        self._receivers = receivers
        self._offered: dict[str, _Peer] = {}
        self._peers: dict[str, _Peer] = {}
        self.absent: set[int] = set()
        self._names = dict(enumerate(ranks, 1))  # of the other ranks
        self._ranks: dict[str, _Peer] = {}
        self._expected: type | None = None  # of the answers
        self._answers: dict[int, Any] = {}
        self._noise = ""
        self._lanes: dict[int, _Lane] | None = None  # by rank, once there is a plan

    @property
    def peers(self) -> dict[str, messages.Hello]:
        """Who takes part, by connection."""
        return {key: peer.hello for key, peer in self._peers.items()}

    @property
    def ranks(self) -> dict[int, str]:
        """The connections of the other ranks that take part."""
        return {peer.hello.rank: key for key, peer in self._ranks.items()}

    @property
    def connections(self) -> list[str]:
        """Of receivers that take part, and of who may yet. Ranks that hear of an end leave."""
        return [*self._peers, *self._offered]

    # -- what happens -----------------------------------------------------------------------------

    def receive(
        self, key: str, message: messages.Hello | messages.FromReceiver | messages.FromRank
    ) -> list[Effect]:
        """Takes one message from the connection ``key``."""
        if self.phase.terminal:
            return []
        if isinstance(message, messages.Hello):
            return self._on_hello(key, message)
        peer = self._peers.get(key) or self._ranks.get(key) or self._offered.get(key)
        if peer is None:
            return []
        if message.session != self.offer.session:
            return self._break(peer, f"{type(message).__name__} of another session")
        if isinstance(message, messages.Failed):
            error = self._reported(peer, message)
            if key in self._ranks:
                return self.lost_rank(peer.hello.rank, error)
            self._peers.pop(key, None)
            self._offered.pop(key, None)
            return self.fail(error)
        handler = self.TABLE.get((self.phase, type(message)))
        of_a_rank = isinstance(message, messages.FromRank)
        if handler is None or self.phase in peer.did or of_a_rank != bool(peer.hello.rank):
            return self._break(peer, f"{type(message).__name__} out of order")
        effects: list[Effect] = self._admit(key, peer) if key in self._offered else []
        if key in self._peers or key in self._ranks:
            effects += getattr(self, handler)(peer, message)
        return effects

    def ask(self, questions: Mapping[int, messages.ToRank], answer: type) -> list[Effect]:
        """Sends each rank a message; ``Answered`` follows once all have sent an ``answer``."""
        if self.phase.terminal:
            return []
        self._expected, self._answers = answer, {}
        return [Send(questions[rank], key) for rank, key in self.ranks.items()]

    def planned(
        self, prepares: Mapping[str, messages.Prepare], lanes: Mapping[int, tuple[int, int]]
    ) -> list[Effect]:
        """The plans are made, and their lanes exist.

        Args:
            prepares: What each receiver gets.
            lanes: By rank, the buckets of its lane, and how many may be announced and not loaded.
        """
        if self.phase.terminal:
            return []
        self._lanes = {rank: _Lane(*sizes) for rank, sizes in lanes.items()}
        for key, prepare in prepares.items():
            self._peers[key].lanes = set(prepare.lanes)
        return [Send(prepare, key) for key, prepare in prepares.items()]

    def packed(self, index: int, digests: bytes, lane: int = 0) -> list[Effect]:
        """A bucket lies in a lane."""
        if self.phase.terminal:
            return []
        assert self._lanes is not None, "there is a plan"
        filled = self._lanes[lane]
        filled.packed += 1
        message = messages.BucketReady(self.offer.session, index, digests, lane)
        readers = [key for key, peer in self._peers.items() if lane in peer.lanes]
        return [*(Send(message, key) for key in readers), *self._advance()]

    def confirmed(self, digests: Mapping[str, str]) -> list[Effect]:
        """All that was sent is of one state; the digest of what each receiver keeps of it."""
        if self.phase.terminal:
            return []
        self._enter(Phase.INSTALL)
        session = self.offer.session
        return [Send(messages.Seal(session, digest), key) for key, digest in digests.items()]

    def lost(self, key: str) -> list[Effect]:
        """A connection was lost; the session fails if its peer takes part and was not done."""
        self._offered.pop(key, None)
        peer = self._peers.get(key)
        if peer is None or self.phase.terminal or Phase.COMMIT in peer.did:
            return []
        del self._peers[key]
        return self.fail(
            RefitPeerError(
                f"{self.where}: {peer.name} closed its connection",
                fix="build that engine again; the others need no restart for the next refit",
                peer=peer.name,
            )
        )

    def lost_rank(self, rank: int, error: RLError) -> list[Effect]:
        """Another rank was lost, with this error; it does not matter once all is decided."""
        self._ranks = {k: peer for k, peer in self._ranks.items() if peer.hello.rank != rank}
        self.absent.add(rank)
        return [] if self.phase is Phase.COMMIT else self.fail(error)

    def corrupted(self, key: str, error: RefitProtocolError) -> list[Effect]:
        """A frame that could not be read came from ``key``: from who takes part, that is the end.

        An offer to another connection is withdrawn: its peer is not the one that it claimed to be.
        """
        peer = self._peers.get(key) or self._ranks.get(key)
        if peer is None:
            self._offered.pop(key, None)
            self._noise = str(error).splitlines()[0]
            return [Send(self._abort(error), key)]
        error.details.update(peer.details)
        return self.fail(error)

    def tick(self) -> list[Effect]:
        """See :meth:`Session.tick`; a late rank is named before others report the deadline."""
        late = {} if self.phase.terminal else self._late_ranks()
        if not late or self.remaining_s > report_margin_s(self._seconds):
            return super().tick()
        here = {rank: name for rank, name in late.items() if rank in self.ranks}
        self.absent = set(late) - set(here)
        what = "did not answer" if here else "did not join the refit"
        late = here or late
        return self.fail(
            RefitPeerError(
                f"{self.where}: {' and '.join(late.values())} {what} within its deadline of "
                f"{self._seconds:g} s",
                fix="look at what that worker does (its log, py-spy dump); every rank must call "
                "refit",
                peer=" and ".join(f"rank {rank}" for rank in late),
                rank=min(late),
            )
        )

    def fail(self, error: BaseException) -> list[Effect]:
        """See :meth:`Session.fail`. After COMMIT the version counts all the same."""
        if self.phase.terminal:
            return []
        if self.phase is Phase.COMMIT:
            self._end(Phase.COMMITTED, error)
            return []
        sent = any(lane.packed for lane in (self._lanes or {}).values())
        written = sent and self.offer.isolation == "quiesced"
        self._end(Phase.TORN if written else Phase.ABORTED, error)
        assert self.error is not None
        return [Send(self._abort(self.error))]

    # -- handlers, in the order of the phases -----------------------------------------------------

    def _on_hello(self, key: str, hello: messages.Hello) -> list[Effect]:
        if self.phase is not Phase.DISCOVER or key in {*self.connections, *self._ranks}:
            return []
        if hello.number != self._number:
            self._noise = (
                f"{hello.name}, pid {hello.pid}, is at refit {hello.number} and the trainer at "
                f"refit {self._number}"
            )
            if hello.number > self._number and not hello.rank:
                return []  # it waits for its turn
            error = RefitAborted(f"{self.phase}: {self._noise}", fix=IN_STEP_AGAIN)
            at = self._number if hello.rank else 0
            return [Send(msgspec.structs.replace(self._abort(error), number=at), key)]
        if hello.rank not in (0, *self._names):
            return self._dismiss(key, f"this trainer has {1 + len(self._names)} ranks")
        if not hello.rank and len(self._peers) == self._receivers:
            return self._dismiss(key, self._full)
        if len(self._offered) >= _OFFERS * (self._receivers + len(self._names)):
            del self._offered[next(iter(self._offered))]
        self._offered[key] = _Peer(hello)
        return [Send(self.offer, key)]

    def _admit(self, key: str, peer: _Peer) -> list[Effect]:
        """Admits who is ready; this connection replaces an earlier one of that receiver or rank."""
        del self._offered[key]
        admitted, who = (self._ranks if peer.hello.rank else self._peers), peer.hello
        ours = [
            k
            for k, p in admitted.items()
            if p.hello.rank == who.rank and (who.rank or p.hello.receiver == who.receiver)
        ]
        replaced: list[Effect] = []
        for old in ours:
            del admitted[old]
            replaced += self._dismiss(old, "its peer has opened another connection")
        if not who.rank:
            if len(self._peers) == self._receivers:
                return self._dismiss(key, self._full)
            taken = {other.number for other in self._peers.values()}
            peer.number = next(number for number in range(self._receivers) if number not in taken)
        admitted[key] = peer
        return replaced

    def _dismiss(self, key: str, why: str) -> list[Effect]:
        return [Send(self._abort(RefitProtocolError(f"{self.phase}: {why}")), key)]

    def _on_ready(self, peer: _Peer, message: messages.Ready | messages.RankReady) -> list[Effect]:
        wanted = message.dtypes if isinstance(message, messages.Ready) else None
        if wanted is not None and any(its.dtypes != wanted for its in self._ready.values()):
            return self.fail(
                ManifestMismatchError(
                    f"{peer.name} wants other dtypes than the other receivers",
                    fix="give all engines of one refit the same dtype",
                    peer=peer.name,
                )
            )
        peer.ready = message
        if not self._all_did(peer) or len(self._ranks) < len(self._names):
            return []
        late = [effect for key in self._offered for effect in self._dismiss(key, self._full)]
        self._offered.clear()
        self._enter(Phase.PREPARE)
        ranks = {p.hello.rank: p.ready for p in self._ranks.values()}
        return [*late, MakePlan(self._ready, ranks)]

    def _on_answer(self, peer: _Peer, message: messages.FromRank) -> list[Effect]:
        rank = peer.hello.rank
        if type(message) is not self._expected or rank in self._answers:
            return self._break(peer, f"{type(message).__name__} without a question")
        self._answers[rank] = message
        if len(self._answers) < len(self._names):
            return []
        self._expected = None
        return [Answered(dict(self._answers))]

    def _on_prepared(self, peer: _Peer, _: messages.Prepared) -> list[Effect]:
        if self._lanes is None:
            return self._break(peer, "Prepared before it got the plan")
        if not self._all_did(peer):
            return []
        self._enter(Phase.TRANSFER)
        return self._advance()

    def _on_packed(self, peer: _Peer, message: messages.BucketPacked) -> list[Effect]:
        rank, lanes = peer.hello.rank, self._lanes or {}
        due = lanes.get(rank)
        if due is None or due.packed == due.wanted or message.index != due.packed:
            return self._break(peer, f"BucketPacked({message.index}) without a question")
        return [Packed(message.index, message.digests, rank)]

    def _on_loaded(self, peer: _Peer, message: messages.Loaded) -> list[Effect]:
        number, index, lanes = message.lane, message.index, self._lanes or {}
        expected = peer.loaded[number]
        if number not in peer.lanes or index != expected or index >= lanes[number].packed:
            return self._break(peer, f"Loaded({index}), expected Loaded({expected})")
        peer.loaded[number] += 1
        return self._advance()

    def _on_sealed(self, peer: _Peer, _: messages.Sealed) -> list[Effect]:
        if not self._all_did(peer):
            return []
        self._enter(Phase.COMMIT)
        return [Send(messages.Commit(self.offer.session), key) for key in self._peers]

    def _on_done(self, peer: _Peer, _: messages.Done) -> list[Effect]:
        if self._all_did(peer):
            self._end(Phase.COMMITTED)
        return []

    # -- helpers ----------------------------------------------------------------------------------

    @property
    def _ready(self) -> dict[str, messages.Ready]:
        return {key: p.ready for key, p in self._peers.items() if p.ready is not None}

    def _advance(self) -> list[Effect]:
        """Has the next buckets packed that there is room for; seals when all are loaded."""
        assert self._lanes is not None, "there is a plan"
        ranks, session = self.ranks, self.offer.session
        own: list[Effect] = []
        others: list[Effect] = []
        loaded = True
        for rank, lane in self._lanes.items():
            slowest = min(p.loaded[rank] for p in self._peers.values() if rank in p.lanes)
            loaded &= slowest == lane.buckets
            room = min(lane.buckets, slowest + lane.window)
            if rank:
                due = range(lane.wanted, room)
                others += [Send(messages.PackBucket(session, n), ranks[rank]) for n in due]
                lane.wanted = max(lane.wanted, room)
            elif lane.wanted == lane.packed < room:
                lane.wanted += 1
                own.append(Pack(lane.packed))
        if not loaded:
            return others + own
        self._enter(Phase.SEAL)
        return [Confirm()]

    def _all_did(self, peer: _Peer) -> bool:
        peer.did.add(self.phase)
        peers = self._peers.values()
        return len(peers) == self._receivers and all(self.phase in p.did for p in peers)

    def _abort(self, error: BaseException) -> messages.Abort:
        return messages.Abort(self.offer.session, *describe(error))

    def _break(self, peer: _Peer, what: str) -> list[Effect]:
        return self._refuse(f"{peer.name} sent {what}", **peer.details)

    def _reported(self, peer: _Peer, message: messages.Failed) -> RLError:
        """The error behind a failure.

        A receiver that timed out on us was really waiting for the late peers.
        """
        if peer.hello.rank:
            text = f"{peer.name} failed: {message.kind}: {message.message}"
            classes = (RefitError, CapabilityError, LifecycleError)
            return peer_error(message.kind, text, same_here=classes, **peer.details)
        late = self._late()
        if message.kind == RefitPeerError.__name__ and late:
            return RefitPeerError(
                f"{self.phase}: {peer.name} gave up waiting for {late}",
                fix=f"look at the log of {late}; raise deadline_s if the model is large",
                peer=late,
            )
        return peer_error(
            message.kind,
            f"{peer.name} failed: {message.message}",
            phase=self.phase.value,
            peer=peer.name,
            cause=message.kind,
        )

    def _awaited(self) -> str:
        missing = self._receivers - len(self._peers)
        if not missing:
            return self._late() or "the weight source"
        who = [peer.name for peer in self._offered.values() if not peer.hello.rank]
        if absent := max(0, missing - len(who)):
            who.append(f"{absent} of {self._receivers} receivers")
        return ", ".join(who)

    def _hint(self) -> str:
        return f"; meanwhile: {self._noise}" if self._noise else ""

    @property
    def _full(self) -> str:
        return f"this refit already has all of its receivers ({self._receivers})"

    def _late_ranks(self) -> dict[int, str]:
        """The names of the other ranks that have not done what is due."""
        if self.phase is Phase.DISCOVER:
            return {rank: name for rank, name in self._names.items() if rank not in self.ranks}
        if self._expected is not None:
            return {rank: name for rank, name in self._names.items() if rank not in self._answers}
        lanes = self._lanes or {}
        return {
            rank: self._names[rank]
            for rank, lane in lanes.items()
            if rank and lane.packed < lane.wanted
        }

    def _late(self) -> str:
        """Who takes part and has not done what is due in this phase."""
        if late := self._late_ranks():
            return ", ".join(late.values())
        loading, lanes = self.phase is Phase.TRANSFER, self._lanes or {}
        return ", ".join(
            peer.name
            for peer in self._peers.values()
            if (
                any(peer.loaded[number] < lanes[number].packed for number in peer.lanes)
                if loading
                else self.phase not in peer.did
            )
        )
