"""The other ranks of a trainer in a refit: what they may send when, and what rank 0 makes of it."""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec
import pytest
from scripted_sessions import (
    CONFIRMED,
    DEADLINE_S,
    FROM_RANK,
    FROM_RECEIVER,
    FROM_SENDER,
    HASH,
    HASHED,
    OFFER,
    PREPARES,
    RANK,
    RANK_HELLOS,
    RANK_PREPARED,
    RANK_READY,
    RANKED,
    RANKS,
    READY,
    TO_RANK,
    Clock,
    S,
    all_ranks,
    new_sender,
    rank_at,
    ranked_at,
    states,
)

from rl_core.errors import (
    LifecycleError,
    ManifestMismatchError,
    RefitAborted,
    RefitPeerError,
    RefitProtocolError,
)
from rl_core.weights.protocol.messages import (
    Abort,
    BucketPacked,
    Done,
    Failed,
    Loaded,
    Offer,
    Over,
    PackBucket,
    PartsHashed,
    Prepared,
    PrepareRank,
    RankConfirmed,
    RankPrepared,
    Sealed,
)
from rl_core.weights.protocol.sender_session import SenderSession
from rl_core.weights.protocol.session import Perform, Phase, Send
from rl_core.weights.protocol.timing import FOLLOWER_GRACE_S, report_margin_s


def test_a_rank_takes_every_step_of_a_refit_without_an_error():
    rank = rank_at("committed")
    assert (rank.error, rank.report) == (None, {"version": 1})


def test_rank_0_takes_every_step_of_a_refit_without_an_error():
    assert ranked_at("committed").error is None


# -- every message in every state ------------------------------------------------------------------

ORDER = states(RANKED)
#: Of whom which message is legal, from the first of these states until the second one is reached.
DUE: list[tuple[str, Any, str, str]] = [
    ("p0", READY, "p0 there", "p0 ready"), ("p1", READY, "p1 there", "p1 ready"),
    ("r1", RANK_READY, "r1 there", "r1 ready"), ("r2", RANK_READY, "all there", "planning"),
    ("r1", HASHED, "hashing", "r1 hashed"), ("r2", HASHED, "hashing", "hashed"),
    ("r1", RANK_PREPARED, "preparing", "ranks prepared"),
    ("r2", RANK_PREPARED, "preparing", "r2 prepared"),
    ("p0", Prepared(S), "planned", "p0 prepared"), ("p1", Prepared(S), "planned", "packing"),
    ("r1", BucketPacked(S, 0, b"digests"), "packing", "r1 sent one"),
    ("r2", BucketPacked(S, 0, b"digests"), "packing", "r2 sent"),
    ("p0", Loaded(S, 0), "own sent", "p0 loaded own"),
    ("p1", Loaded(S, 0), "own sent", "p1 loaded own"),
    ("p0", Loaded(S, 0, 1), "r1 sent one", "p0 loaded r1's"),
    ("p1", Loaded(S, 0, 1), "r1 sent one", "r1 packing"),
    ("p1", Loaded(S, 0, 2), "r2 sent", "own to confirm"),
    ("r1", BucketPacked(S, 1, b"digests"), "r1 packing", "r1 sent both"),
    ("p0", Loaded(S, 1, 1), "r1 sent both", "p0 loaded all"),
    ("p1", Loaded(S, 1, 1), "r1 sent both", "p1 loaded r1's"),
    ("r1", CONFIRMED, "confirming", "r1 confirmed"), ("r2", CONFIRMED, "confirming", "confirmed"),
    ("p0", Sealed(S), "sealing", "p0 sealed"), ("p1", Sealed(S), "sealing", "committing"),
    ("p0", Done(S), "committing", "p0 done"), ("p1", Done(S), "committing", "committed"),
]  # fmt: skip
#: Where each one's Hello comes.
COMES = {"p0": "p0 there", "p1": "p1 there", "r1": "r1 there", "r2": "all there"}
TO_RANK_0: list[Any] = [
    *FROM_RECEIVER, *FROM_RANK, *(Loaded(S, index, lane) for index in (0, 1) for lane in (1, 2, 3)),
]  # fmt: skip


def passed(state: str, other: str) -> bool:
    return ORDER.index(state) >= ORDER.index(other)


def due(state: str, key: str, message: object) -> bool:
    rows = [row for row in DUE if row[:2] == (key, message)]
    return any(passed(state, first) and not passed(state, last) for *_, first, last in rows)


def who(key: str) -> dict[str, Any]:
    """What errors about one side have in their details."""
    number = int(key[1])
    if key.startswith("r"):
        return {"peer": f"rank {number}", "rank": number}
    return {"peer": f"receiver {number} (engine, pid {100 + number})"}


def assert_ended(sender: SenderSession, state: str, key: str, effects: list[Any]) -> None:
    """For a fault of one side, as any failure ends it: after COMMIT the version counts."""
    assert sender.error is not None
    details, expected = sender.error.details, who(key)
    found = {name: details[name] for name in ("peer", "rank") if name in details}
    # Who is not admitted has no number yet.
    found["peer"] = found["peer"].replace("receiver (", f"receiver {key[1]} (")
    assert found == expected
    if passed(state, "committing"):
        assert (sender.phase, effects) == (Phase.COMMITTED, [])
        return
    assert sender.phase is (Phase.TORN if passed(state, "own sent") else Phase.ABORTED)
    assert effects == [Send(Abort(S, type(sender.error).__name__, str(sender.error)))]


@pytest.mark.parametrize("key", COMES)
@pytest.mark.parametrize("state", ORDER)
def test_rank_0_obeys_its_table(state: str, key: str):
    """Also what a rank may send from a receiver, and the other way round."""
    for message in TO_RANK_0:
        sender = ranked_at(state)
        before = sender.phase
        effects = sender.receive(key, message)
        if before.terminal or not passed(state, COMES[key]):
            assert (effects, sender.phase, sender.error) == ([], before, None)
        elif due(state, key, message):
            assert sender.error is None
        elif isinstance(message, Failed) and key.startswith("r") and before is Phase.COMMIT:
            assert (effects, sender.phase, sender.error) == ([], before, None)  # it was decided
        else:
            assert_ended(sender, state, key, effects)
            kind = "RefitCorrupted" if isinstance(message, Failed) else "RefitProtocolError"
            assert type(sender.error).__name__ == kind


@pytest.mark.parametrize("key", COMES)
@pytest.mark.parametrize("state", ORDER[:-1])
def test_rank_0_takes_nothing_of_another_session(state: str, key: str):
    for message in TO_RANK_0 if passed(state, COMES[key]) else []:
        sender = ranked_at(state)
        effects = sender.receive(key, msgspec.structs.replace(message, session="another"))
        assert_ended(sender, state, key, effects)
        assert type(sender.error) is RefitProtocolError


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("state", ORDER[:-1])
def test_a_frame_of_a_rank_that_cannot_be_read_ends_the_refit(state: str, rank: int):
    sender = ranked_at(state)
    effects = sender.corrupted(f"r{rank}", RefitProtocolError("damaged"))
    if passed(state, {1: "r1 ready", 2: "planning"}[rank]):
        assert_ended(sender, state, f"r{rank}", effects)
    else:
        assert (len(effects), sender.error) == (1, None)  # its offer is withdrawn


FROM_0 = [message for message in [*FROM_SENDER, *TO_RANK] if not isinstance(message, Abort)]
OBEYED = {
    Phase.DISCOVER: (Offer,),
    Phase.PREPARE: (type(HASH), PrepareRank, PackBucket, type(TO_RANK[4])),
    Phase.TRANSFER: (PackBucket, type(TO_RANK[4])),
    Phase.SEAL: (),
}


@pytest.mark.parametrize("message", FROM_0, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("session", [S, "another"])
@pytest.mark.parametrize("state", states(RANK))
def test_a_rank_obeys_its_table(state: str, session: str, message: Any):
    rank = rank_at(state)
    before = rank.phase
    message = msgspec.structs.replace(message, session=session)
    effects = rank.receive(message)
    if before.terminal:
        assert (effects, rank.phase) == ([], before)
    elif session != S and before is not Phase.DISCOVER:
        assert_failed(rank, before, effects, RefitProtocolError)
    elif isinstance(message, Over):
        assert (effects, rank.phase, rank.report) == ([], Phase.COMMITTED, message.report)
    elif isinstance(message, OBEYED[before]):
        assert (effects, rank.error) == ([Perform(message)], None)
    else:
        assert_failed(rank, before, effects, RefitProtocolError)


def assert_failed(rank: Any, before: Phase, effects: list[Any], kind: type) -> None:
    assert (rank.phase, type(rank.error)) == (Phase.ABORTED, kind)
    assert rank.error.details["phase"] == before
    failed = Failed(rank._session, kind.__name__, str(rank.error), False)
    assert effects == ([] if before is Phase.DISCOVER else [Send(failed)])


@pytest.mark.parametrize("state", states(RANK)[:-1])
def test_a_rank_ends_when_rank_0_does(state: str):
    rank = rank_at(state)
    assert rank.receive(Abort(S, "RefitCorrupted", "damaged\nFix: look")) == []
    assert (rank.phase, type(rank.error)) == (Phase.ABORTED, RefitAborted)
    assert (rank.error.fix, rank.error.details["cause"]) == ("look", "RefitCorrupted")
    assert rank.error.peer == "rank 0"
    assert "rank 0 of 3 (process 10) ended the refit: damaged" in str(rank.error)
    assert not any(chain.from_iterable(rank.receive(message) for message in FROM_0))
    assert [rank.tick(), rank.answer(RANK_READY), rank.fail(ValueError())] == [[], [], []]


# -- every way to fail in every state --------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "of"),
    [("LifecycleError", "LifecycleError"), ("CapabilityError", "CapabilityError"),
     ("ValueError", "RefitPeerError"), ("RefitError", "RefitPeerError")],
)  # fmt: skip
def test_an_error_of_a_rank_arrives_as_one_of_its_class(kind: str, of: str):
    sender = ranked_at("r1 sent both")
    sender.receive("r2", Failed(S, kind, "out of luck\nFix: wait", False))
    assert type(sender.error).__name__ == of
    assert f"{RANKS[1]} failed: {kind}: out of luck" in str(sender.error)
    assert (sender.error.fix, sender.error.details["rank"]) == ("wait", 2)


#: Whom rank 0 waits for.
LATE = {
    "nobody": (1, 2), "p0 there": (1, 2), "p1 ready": (2,), "hashing": (1, 2), "r1 hashed": (2,),
    "preparing": (1, 2), "r2 prepared": (1,), "packing": (1, 2), "r1 sent one": (2,), "r2 sent": (),
    "r1 packing": (1,), "confirming": (1, 2), "r1 confirmed": (2,), "sealing": (), "planned": (),
    "committing": (),
}  # fmt: skip


@pytest.mark.parametrize("state", LATE)
def test_a_late_rank_is_named_before_the_deadline(state: str):
    clock, late = Clock(), LATE[state]
    sender = ranked_at(state, clock=clock)
    clock.now = DEADLINE_S - report_margin_s(DEADLINE_S) - 0.01
    assert sender.tick() == []
    clock.now += 0.02
    sender.tick()
    if not late:
        assert sender.error is None
        return
    assert type(sender.error) is RefitPeerError
    assert sender.error.details["rank"] == late[0]
    assert sender.error.peer == " and ".join(f"rank {rank}" for rank in late)
    assert all((name in str(sender.error)) == (n in late) for n, name in enumerate(RANKS, 1))
    assert sender.absent == (set(late) if sender.error.phase == "DISCOVER" else set())


@pytest.mark.parametrize("state", states(RANK)[:-1])
def test_a_rank_waits_a_little_longer_than_rank_0(state: str):
    clock = Clock()
    rank = rank_at(state, clock=clock)
    before, clock.now = rank.phase, DEADLINE_S
    rank.tick()
    assert rank.error is None
    clock.now = DEADLINE_S + FOLLOWER_GRACE_S
    effects = rank.tick()
    assert_failed(rank, before, effects, RefitPeerError)
    assert rank.error.details["rank"] == 0


# -- who takes part --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [-1, 3, 1 << 40])
def test_a_rank_that_the_trainer_does_not_have_is_refused(number: int):
    sender = ranked_at("nobody")
    [effect] = sender.receive("r9", msgspec.structs.replace(RANK_HELLOS[1], rank=number))
    assert (type(effect.message), effect.to) == (Abort, "r9")
    assert "this trainer has 3 ranks" in effect.message.message
    assert (sender.connections, sender.error) == ([], None)


def test_a_trainer_of_one_rank_has_no_others():
    sender = new_sender()
    [effect] = sender.receive("r1", RANK_HELLOS[1])
    assert "this trainer has 1 ranks" in effect.message.message
    assert sender.connections == []


def test_offers_to_ranks_are_bounded():
    sender = ranked_at("nobody")
    for number in range(1000):
        sender.receive(
            f"c{number}", msgspec.structs.replace(RANK_HELLOS[1], nonce=b"%16d" % number)
        )
    assert len(sender.connections) <= 4 * 32


@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_at_another_refit_learns_which_one_is_on(number: int):
    sender = ranked_at("nobody")
    [effect] = sender.receive("r1", msgspec.structs.replace(RANK_HELLOS[1], number=number))
    assert (effect.to, effect.message.number) == ("r1", 1)
    assert sender.connections == []


def at_another(number: int) -> Abort:
    return Abort("", "RefitAborted", "the trainer is elsewhere", number)


@pytest.mark.parametrize("counted", [1, 4])
def test_a_rank_that_counted_otherwise_joins_the_refit_that_is_on(counted: int):
    rank = rank_at("discover")
    rank._hello = msgspec.structs.replace(rank._hello, number=counted)
    assert rank.receive(at_another(3)) == [Send(msgspec.structs.replace(RANK_HELLOS[1], number=3))]
    assert (rank.number, rank.leader_number, rank.met) == (3, 3, False)
    assert rank.receive(OFFER) == [Perform(OFFER)]
    assert rank.met


def test_a_rank_whose_number_was_given_joins_no_other_refit():
    rank = rank_at("discover", counted=False)
    assert rank.receive(at_another(3)) == []
    assert (rank.phase, type(rank.error)) == (Phase.ABORTED, RefitAborted)
    assert "elsewhere" in str(rank.error)


def test_a_rank_that_is_offered_another_model_names_both():
    rank = rank_at("discover", manifest="another")
    effects = rank.receive(OFFER)
    assert_failed(rank, Phase.PREPARE, effects, ManifestMismatchError)


def test_a_rank_without_a_source_says_why_once_it_is_offered_a_refit():
    rank = rank_at("discover", failed=LifecycleError("torn", fix="load"))
    effects = rank.receive(OFFER)
    assert_failed(rank, Phase.PREPARE, effects, LifecycleError)


# -- answers ---------------------------------------------------------------------------------------


def test_an_answer_of_another_kind_than_the_question_ends_the_refit():
    for state, question, answer in (
        ("hashing", PartsHashed, RANK_PREPARED), ("preparing", RankPrepared, HASHED),
    ):  # fmt: skip
        sender = ranked_at(state)
        assert sender._expected is question
        effects = sender.receive("r2", answer)
        assert_ended(sender, state, "r2", effects)


def test_the_answers_to_one_question_are_none_to_the_next():
    sender = ranked_at("r1 confirmed")
    sender.receive("r2", CONFIRMED)
    assert sender.ask({1: HASH, 2: HASH}, RankConfirmed) == all_ranks(HASH)
    assert sender.receive("r2", CONFIRMED) == []


def test_a_rank_without_a_lane_packs_nothing():
    sender = ranked_at("ranks prepared")
    alone = {key: msgspec.structs.replace(p, lanes={0: p.lanes[0]}) for key, p in PREPARES.items()}
    sender.planned(alone, {0: (1, 2)})
    for number in (0, 1):
        sender.receive(f"p{number}", Prepared(S))
    sender.receive("r1", BucketPacked(S, 0, b"digests"))
    assert type(sender.error) is RefitProtocolError
    assert sender.error.details["rank"] == 1
