"""The state machines of a refit, brought to any state on the way of one that goes well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.weights.protocol import messages as m
from rl_core.weights.protocol.rank_session import RankSession
from rl_core.weights.protocol.receiver_session import ReceiverSession
from rl_core.weights.protocol.sender_session import SenderSession
from rl_core.weights.protocol.session import (
    Answered,
    Attach,
    Confirm,
    Effect,
    Install,
    Load,
    MakePlan,
    Pack,
    Packed,
    Perform,
    Phase,
    Publish,
    Send,
)

if TYPE_CHECKING:
    from collections.abc import Callable

S, DEADLINE_S = "this", 60.0
OFFER = m.Offer(S, "trainer", 1, "manifest", "wire", "quiesced", False, {})
READY = m.Ready(S, {}, b"", ())
SEAL = m.Seal(S, "digest")
PREPARE = m.Prepare(S, 64, False, {}, {0: m.LaneInfo("plan", b"", {})}, DEADLINE_S)
HELLOS = [m.Hello(f"id{i}", "engine", 100 + i, bytes([i]) * 16, 1) for i in range(3)]
#: The other ranks of the trainer, and what they and rank 0 send each other.
RANKS = ["rank 1 of 3 (process 11)", "rank 2 of 3 (process 12)"]
RANK_HELLOS = {r: m.Hello("", RANKS[r - 1], 10 + r, bytes([64 + r]) * 16, 1, r) for r in (1, 2)}
RANK_READY = m.RankReady(S, 3, {}, 11, "host")
HASH = m.HashParts(S, {}, {}, b"\x01", 64, "xxh3", True, "token")
HASHED = m.PartsHashed(S, b"digests")
PREPARE_RANK = m.PrepareRank(
    S, {}, {}, b"", b"", 64, False, "xxh3", "token", "ipc", {}, {"id0": b"", "id1": b""}, ((), ())
)
RANK_PREPARED = m.RankPrepared(S, "plan")
CONFIRMED = m.RankConfirmed(S, 3)
#: Of all ranks' lanes p0 reads the first two, and p1 all.
PREPARES = {
    f"p{n}": msgspec.structs.replace(PREPARE, lanes=dict.fromkeys(range(2 + n), PREPARE.lanes[0]))
    for n in range(2)
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def new_receiver(**options: Any) -> ReceiverSession:
    return ReceiverSession(
        HELLOS[0],
        **{"manifest": "manifest", "ready": lambda _: READY, "deadline_s": DEADLINE_S} | options,
    )


def new_sender(offer: m.Offer = OFFER, receivers: int = 2, **options: Any) -> SenderSession:
    return SenderSession(
        offer, receivers=receivers, **{"number": 1, "deadline_s": DEADLINE_S} | options
    )


def new_rank(**options: Any) -> RankSession:
    given = {"manifest": "manifest", "failed": None, "counted": True, "deadline_s": DEADLINE_S}
    return RankSession(RANK_HELLOS[1], leader="rank 0 of 3 (process 10)", **given | options)


# -- one refit that goes well, step by step --------------------------------------------------------

Step = tuple[str, "Callable[[Any], list[Effect]]", Phase, list[Effect]]


def loads(index: int) -> Callable[[ReceiverSession], list[Effect]]:
    def step(receiver: ReceiverSession) -> list[Effect]:
        receiver.mark_torn()
        return receiver.loaded(index)

    return step


def hears(message: m.FromSender) -> Callable[[ReceiverSession], list[Effect]]:
    return lambda receiver: receiver.receive(message)


def says(number: int, message: m.Hello | m.FromReceiver) -> Callable[[SenderSession], list[Effect]]:
    return lambda sender: sender.receive(f"p{number}", message)


def announced(index: int) -> list[Effect]:
    return [Load(index, b"digests")]


def sent(index: int) -> list[Effect]:
    return [Send(m.BucketReady(S, index, b"digests"), f"p{number}") for number in range(2)]


def planned(sender: SenderSession, buckets: int = 2) -> list[Effect]:
    return sender.planned({"p0": PREPARE, "p1": PREPARE}, {0: (buckets, 2)})


def confirmed(sender: SenderSession) -> list[Effect]:
    return sender.confirmed({"p0": "digest", "p1": "digest"})


RECEIVER: list[Step] = [
    ("discover", lambda r: r.start(), Phase.DISCOVER, [Send(HELLOS[0])]),
    ("ready", hears(OFFER), Phase.PREPARE, [Send(READY)]),
    ("attaching", hears(PREPARE), Phase.PREPARE, [Attach(PREPARE, OFFER)]),
    ("prepared", lambda r: r.attached({0: 2}), Phase.TRANSFER, [Send(m.Prepared(S))]),
    ("first comes", hears(m.BucketReady(S, 0, b"digests")), Phase.TRANSFER, announced(0)),
    ("first loaded", loads(0), Phase.TRANSFER, [Send(m.Loaded(S, 0))]),
    ("second comes", hears(m.BucketReady(S, 1, b"digests")), Phase.TRANSFER, announced(1)),
    ("all loaded", loads(1), Phase.TRANSFER, [Send(m.Loaded(S, 1))]),
    ("installing", hears(m.Seal(S, "digest")), Phase.INSTALL, [Install(OFFER, "digest")]),
    ("sealed", lambda r: r.installed(), Phase.COMMIT, [Send(m.Sealed(S))]),
    ("publishing", hears(m.Commit(S)), Phase.COMMIT, [Publish(1)]),
    ("committed", lambda r: r.published(), Phase.COMMITTED, [Send(m.Done(S))]),
]  # fmt: skip
SENDER: list[Step] = [
    ("nobody", lambda s: s.tick(), Phase.DISCOVER, []),
    ("p0 there", says(0, HELLOS[0]), Phase.DISCOVER, [Send(OFFER, "p0")]),
    ("all there", says(1, HELLOS[1]), Phase.DISCOVER, [Send(OFFER, "p1")]),
    ("p0 ready", says(0, READY), Phase.DISCOVER, []),
    ("planning", says(1, READY), Phase.PREPARE, [MakePlan({"p0": READY, "p1": READY})]),
    ("planned", planned, Phase.PREPARE, [Send(PREPARE, "p0"), Send(PREPARE, "p1")]),
    ("p0 prepared", says(0, m.Prepared(S)), Phase.PREPARE, []),
    ("packing", says(1, m.Prepared(S)), Phase.TRANSFER, [Pack(0)]),
    ("first sent", lambda s: s.packed(0, b"digests"), Phase.TRANSFER, [*sent(0), Pack(1)]),
    ("both sent", lambda s: s.packed(1, b"digests"), Phase.TRANSFER, [*sent(1)]),
    ("p0 loaded one", says(0, m.Loaded(S, 0)), Phase.TRANSFER, []),
    ("p0 loaded both", says(0, m.Loaded(S, 1)), Phase.TRANSFER, []),
    ("p1 loaded one", says(1, m.Loaded(S, 0)), Phase.TRANSFER, []),
    ("confirming", says(1, m.Loaded(S, 1)), Phase.SEAL, [Confirm()]),
    ("sealing", confirmed, Phase.INSTALL, [Send(SEAL, "p0"), Send(SEAL, "p1")]),
    ("p0 sealed", says(0, m.Sealed(S)), Phase.INSTALL, []),
    ("committing", says(1, m.Sealed(S)), Phase.COMMIT,
     [Send(m.Commit(S), f"p{n}") for n in range(2)]),
    ("p0 done", says(0, m.Done(S)), Phase.COMMIT, []),
    ("committed", says(1, m.Done(S)), Phase.COMMITTED, []),
]  # fmt: skip


def rank_says(rank: int, message: m.Hello | m.FromRank) -> Callable[[SenderSession], list[Effect]]:
    return lambda sender: sender.receive(f"r{rank}", message)


def asks(question: m.ToRank, answer: type) -> Callable[[SenderSession], list[Effect]]:
    return lambda sender: sender.ask({1: question, 2: question}, answer)


def packs(rank: int, index: int) -> Callable[[SenderSession], list[Effect]]:
    """A rank has put a bucket into its lane, which rank 0 makes known at once."""

    def step(sender: SenderSession) -> list[Effect]:
        found = sender.receive(f"r{rank}", m.BucketPacked(S, index, b"digests"))
        assert found == [Packed(index, b"digests", rank)]
        return sender.packed(index, b"digests", rank)

    return step


def of_lane(lane: int, index: int, *readers: str) -> list[Effect]:
    return [Send(m.BucketReady(S, index, b"digests", lane), key) for key in readers]


def all_ranks(message: m.ToRank) -> list[Effect]:
    return [Send(message, "r1"), Send(message, "r2")]


def answered(message: m.FromRank) -> list[Effect]:
    return [Answered({1: message, 2: message})]


#: A refit from three ranks: rank 1's lane has two buckets and room for one, the others have one.
RANKED: list[Step] = [
    ("nobody", lambda s: s.tick(), Phase.DISCOVER, []),
    ("p0 there", says(0, HELLOS[0]), Phase.DISCOVER, [Send(OFFER, "p0")]),
    ("r1 there", rank_says(1, RANK_HELLOS[1]), Phase.DISCOVER, [Send(OFFER, "r1")]),
    ("p1 there", says(1, HELLOS[1]), Phase.DISCOVER, [Send(OFFER, "p1")]),
    ("all there", rank_says(2, RANK_HELLOS[2]), Phase.DISCOVER, [Send(OFFER, "r2")]),
    ("p0 ready", says(0, READY), Phase.DISCOVER, []),
    ("r1 ready", rank_says(1, RANK_READY), Phase.DISCOVER, []),
    ("p1 ready", says(1, READY), Phase.DISCOVER, []),
    ("planning", rank_says(2, RANK_READY), Phase.PREPARE,
     [MakePlan({"p0": READY, "p1": READY}, {1: RANK_READY, 2: RANK_READY})]),
    ("hashing", asks(HASH, m.PartsHashed), Phase.PREPARE, all_ranks(HASH)),
    ("r1 hashed", rank_says(1, HASHED), Phase.PREPARE, []),
    ("hashed", rank_says(2, HASHED), Phase.PREPARE, answered(HASHED)),
    ("preparing", asks(PREPARE_RANK, m.RankPrepared), Phase.PREPARE, all_ranks(PREPARE_RANK)),
    ("r2 prepared", rank_says(2, RANK_PREPARED), Phase.PREPARE, []),
    ("ranks prepared", rank_says(1, RANK_PREPARED), Phase.PREPARE, answered(RANK_PREPARED)),
    ("planned", lambda s: s.planned(PREPARES, {0: (1, 2), 1: (2, 1), 2: (1, 2)}), Phase.PREPARE,
     [Send(PREPARES["p0"], "p0"), Send(PREPARES["p1"], "p1")]),
    ("p0 prepared", says(0, m.Prepared(S)), Phase.PREPARE, []),
    ("packing", says(1, m.Prepared(S)), Phase.TRANSFER, [*all_ranks(m.PackBucket(S, 0)), Pack(0)]),
    ("own sent", lambda s: s.packed(0, b"digests"), Phase.TRANSFER, of_lane(0, 0, "p0", "p1")),
    ("r1 sent one", packs(1, 0), Phase.TRANSFER, of_lane(1, 0, "p0", "p1")),
    ("r2 sent", packs(2, 0), Phase.TRANSFER, of_lane(2, 0, "p1")),
    ("p0 loaded own", says(0, m.Loaded(S, 0)), Phase.TRANSFER, []),
    ("p0 loaded r1's", says(0, m.Loaded(S, 0, 1)), Phase.TRANSFER, []),
    ("r1 packing", says(1, m.Loaded(S, 0, 1)), Phase.TRANSFER, [Send(m.PackBucket(S, 1), "r1")]),
    ("r1 sent both", packs(1, 1), Phase.TRANSFER, of_lane(1, 1, "p0", "p1")),
    ("p0 loaded all", says(0, m.Loaded(S, 1, 1)), Phase.TRANSFER, []),
    ("p1 loaded own", says(1, m.Loaded(S, 0)), Phase.TRANSFER, []),
    ("p1 loaded r1's", says(1, m.Loaded(S, 1, 1)), Phase.TRANSFER, []),
    ("own to confirm", says(1, m.Loaded(S, 0, 2)), Phase.SEAL, [Confirm()]),
    ("confirming", asks(m.ConfirmRank(S), m.RankConfirmed), Phase.SEAL,
     all_ranks(m.ConfirmRank(S))),
    ("r1 confirmed", rank_says(1, CONFIRMED), Phase.SEAL, []),
    ("confirmed", rank_says(2, CONFIRMED), Phase.SEAL, answered(CONFIRMED)),
    *SENDER[-5:],
]  # fmt: skip
#: The same, seen from rank 1.
RANK: list[Step] = [
    ("discover", lambda r: r.start(), Phase.DISCOVER, [Send(RANK_HELLOS[1])]),
    ("offered", lambda r: r.receive(OFFER), Phase.PREPARE, [Perform(OFFER)]),
    ("ready", lambda r: r.answer(RANK_READY), Phase.PREPARE, [Send(RANK_READY)]),
    ("hashing", lambda r: r.receive(HASH), Phase.PREPARE, [Perform(HASH)]),
    ("hashed", lambda r: r.answer(HASHED), Phase.PREPARE, [Send(HASHED)]),
    ("preparing", lambda r: r.receive(PREPARE_RANK), Phase.PREPARE, [Perform(PREPARE_RANK)]),
    ("prepared", lambda r: r.answer(RANK_PREPARED), Phase.PREPARE, [Send(RANK_PREPARED)]),
    ("packing", lambda r: r.receive(m.PackBucket(S, 0)), Phase.TRANSFER,
     [Perform(m.PackBucket(S, 0))]),
    ("packed", lambda r: r.answer(m.BucketPacked(S, 0, b"digests")), Phase.TRANSFER,
     [Send(m.BucketPacked(S, 0, b"digests"))]),
    ("confirming", lambda r: r.receive(m.ConfirmRank(S)), Phase.SEAL, [Perform(m.ConfirmRank(S))]),
    ("confirmed", lambda r: r.answer(CONFIRMED), Phase.SEAL, [Send(CONFIRMED)]),
    ("committed", lambda r: r.receive(m.Over(S, {"version": 1})), Phase.COMMITTED, []),
]  # fmt: skip


def brought(session: Any, path: list[Step], state: str) -> Any:
    """The session, brought to a state; everything on the way is as the path says."""
    for name, step, phase, effects in path:
        assert step(session) == effects
        assert session.phase is phase
        if name == state:
            return session
    raise AssertionError(f"no such state: {state}")


def receiver_at(state: str, **options: Any) -> ReceiverSession:
    receiver: ReceiverSession = brought(new_receiver(**options), RECEIVER, state)
    return receiver


def sender_at(state: str, **options: Any) -> SenderSession:
    sender: SenderSession = brought(new_sender(**options), SENDER, state)
    return sender


def ranked_at(state: str, **options: Any) -> SenderSession:
    """A sender of three ranks."""
    sender: SenderSession = brought(new_sender(ranks=RANKS, **options), RANKED, state)
    return sender


def rank_at(state: str, **options: Any) -> RankSession:
    rank: RankSession = brought(new_rank(**options), RANK, state)
    return rank


def states(path: list[Step]) -> list[str]:
    return [name for name, *_ in path]


FROM_SENDER: list[m.FromSender] = [
    OFFER, PREPARE, *(m.BucketReady(S, index, b"digests") for index in range(3)),
    m.Seal(S, "digest"), m.Commit(S), m.Abort(S, "RefitError", "why"),
]  # fmt: skip
FROM_RECEIVER: list[m.FromReceiver] = [
    READY, m.Prepared(S), *(m.Loaded(S, index) for index in range(3)),
    m.Sealed(S), m.Done(S),
    m.Failed(S, "RefitCorrupted", "why", True),
]  # fmt: skip
FROM_RANK: list[m.FromRank] = [
    RANK_READY, HASHED, RANK_PREPARED, *(m.BucketPacked(S, n, b"digests") for n in range(3)),
    CONFIRMED,
]  # fmt: skip
TO_RANK: list[m.ToRank] = [
    HASH, PREPARE_RANK, m.PackBucket(S, 0), m.PackBucket(S, 1), m.ConfirmRank(S),
    m.Over(S, {"version": 1}),
]  # fmt: skip


def failed(session: Any) -> list[Effect]:
    """What a receiver says when it fails."""
    kind, text = type(session.error).__name__, str(session.error)
    return [Send(m.Failed(S, kind, text, session.phase is Phase.TORN))]
