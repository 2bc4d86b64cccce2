"""The two state machines of a refit: what may be said when, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from scripted_sessions import (
    DEADLINE_S,
    FROM_RECEIVER,
    FROM_SENDER,
    HELLOS,
    OFFER,
    PREPARE,
    READY,
    RECEIVER,
    SENDER,
    Clock,
    S,
    announced,
    failed,
    receiver_at,
    sender_at,
    states,
)

from rl_core.errors import RefitAborted, RefitProtocolError, WeightsTornError
from rl_core.weights.protocol import messages as m
from rl_core.weights.protocol.sender_session import SenderSession
from rl_core.weights.protocol.session import Attach, Effect, Install, Phase, Publish, Send


@pytest.mark.parametrize("at", [receiver_at, sender_at])
def test_each_side_takes_every_step_of_a_refit_without_an_error(at: Callable[[str], Any]):
    assert at("committed").error is None


# -- every message in every state ------------------------------------------------------------------

#: What is legal where, where it leads, and what follows; ``m.Abort`` and ``m.Failed`` always are.
HEARD: list[tuple[str, m.FromSender, Phase, list[Effect]]] = [
    ("discover", OFFER, Phase.PREPARE, [Send(READY)]),
    ("ready", PREPARE, Phase.PREPARE, [Attach(PREPARE, OFFER)]),
    ("prepared", m.BucketReady(S, 0, b"digests"), Phase.TRANSFER, announced(0)),
    ("first comes", m.BucketReady(S, 1, b"digests"), Phase.TRANSFER, announced(1)),
    ("first loaded", m.BucketReady(S, 1, b"digests"), Phase.TRANSFER, announced(1)),
    ("all loaded", m.Seal(S, "digest"), Phase.INSTALL, [Install(OFFER, "digest")]),
    ("sealed", m.Commit(S), Phase.COMMIT, [Publish(1)]),
    ("publishing", m.Commit(S), Phase.COMMIT, [Publish(1)]),
]
#: As said by p0; ``nobody`` is here yet in the first state, so that what p0 says is not heard.
SAID: list[tuple[str, m.FromReceiver, Phase, list[Effect]]] = [
    ("p0 there", READY, Phase.DISCOVER, []),
    ("all there", READY, Phase.DISCOVER, []),
    ("planned", m.Prepared(S), Phase.PREPARE, []),
    ("first sent", m.Loaded(S, 0), Phase.TRANSFER, []),
    ("both sent", m.Loaded(S, 0), Phase.TRANSFER, []),
    ("p0 loaded one", m.Loaded(S, 1), Phase.TRANSFER, []),
    ("sealing", m.Sealed(S), Phase.INSTALL, []),
    ("committing", m.Done(S), Phase.COMMIT, []),
]


def legal(table: list[Any], state: str, message: object) -> list[Any]:
    return [row for row in table if row[:2] == (state, message)]


def elsewhere(message: Any) -> Any:
    return msgspec.structs.replace(message, session="another")


@pytest.mark.parametrize("message", FROM_SENDER, ids=str)
@pytest.mark.parametrize("state", states(RECEIVER))
def test_a_receiver_obeys_its_table(state: str, message: m.FromSender):
    receiver = receiver_at(state)
    before, torn = receiver.phase, receiver.touched
    effects = receiver.receive(message)
    if before.terminal:
        assert (effects, receiver.phase) == ([], before)
    elif row := legal(HEARD, state, message):
        assert (receiver.phase, effects) == row[0][2:]
        assert receiver.error is None
    elif isinstance(message, m.Abort):
        assert effects == []
        assert receiver.phase is (Phase.TORN if torn else Phase.ABORTED)
        assert type(receiver.error) is (WeightsTornError if torn else RefitAborted)
        assert receiver.error.phase == before
    else:
        assert receiver.phase is (Phase.TORN if torn else Phase.ABORTED)
        assert type(receiver.error) is RefitProtocolError
        assert receiver.error.phase == before
        assert effects == ([] if before is Phase.DISCOVER else failed(receiver))


@pytest.mark.parametrize("message", FROM_SENDER, ids=str)
@pytest.mark.parametrize("state", states(RECEIVER)[1:-1])
def test_a_receiver_obeys_nobody_but_its_own_session(state: str, message: m.FromSender):
    receiver = receiver_at(state)
    receiver.receive(elsewhere(message))
    assert receiver.phase is (Phase.TORN if receiver.touched else Phase.ABORTED)
    assert type(receiver.error) is RefitProtocolError


@pytest.mark.parametrize("message", FROM_RECEIVER, ids=str)
@pytest.mark.parametrize("state", states(SENDER))
def test_a_sender_obeys_its_table(state: str, message: m.FromReceiver):
    sender = sender_at(state)
    before = sender.phase
    effects = sender.receive("p0", message)
    if before.terminal or state == "nobody":
        assert (effects, sender.phase) == ([], before)
    elif row := legal(SAID, state, message):
        assert (sender.phase, effects) == row[0][2:]
        assert sender.error is None
    else:
        assert_ended(sender, state, before, effects)
        kind = "RefitCorrupted" if isinstance(message, m.Failed) else "RefitProtocolError"
        assert type(sender.error).__name__ == kind
        assert "receiver" in sender.error.peer


def assert_ended(sender: SenderSession, state: str, before: Phase, effects: list[Effect]) -> None:
    """As a failure ends it: torn once a bucket was sent; after COMMIT the version counts."""
    assert sender.error is not None
    assert sender.error.details["phase"] == before
    if before is Phase.COMMIT:
        assert (sender.phase, effects) == (Phase.COMMITTED, [])
        return
    sent_some = states(SENDER).index(state) >= states(SENDER).index("first sent")
    assert sender.phase is (Phase.TORN if sent_some else Phase.ABORTED)
    assert effects == [Send(m.Abort(S, type(sender.error).__name__, str(sender.error)))]


@pytest.mark.parametrize("message", FROM_RECEIVER, ids=str)
@pytest.mark.parametrize("state", states(SENDER)[1:-1])
def test_a_sender_takes_nothing_of_another_session(state: str, message: m.FromReceiver):
    sender = sender_at(state)
    before = sender.phase
    assert_ended(sender, state, before, sender.receive("p0", elsewhere(message)))
    assert type(sender.error) is RefitProtocolError


@pytest.mark.parametrize("message", [HELLOS[2], *FROM_RECEIVER], ids=str)
@pytest.mark.parametrize("state", states(SENDER)[4:])
def test_a_stranger_is_not_heard(state: str, message: m.FromReceiver):
    sender = sender_at(state)
    before = sender.phase
    assert sender.receive("stranger", message) == []
    assert (sender.phase, sender.error) == (before, None)


@pytest.mark.parametrize("end", [Phase.ABORTED, Phase.TORN])
def test_a_session_that_failed_says_and_hears_nothing_more(end: Phase):
    receiver = receiver_at("ready" if end is Phase.ABORTED else "first loaded")
    sender = sender_at("planned" if end is Phase.ABORTED else "both sent")
    for session in (receiver, sender):
        session.fail(ValueError("first"))
        assert session.phase is end
        assert session.fail(ValueError("second")) == []
        assert session.tick() == []
        assert "first" in str(session.error)
    calls = [
        receiver.lost("died"), receiver.attached({0: 2}), receiver.loaded(0),
        receiver.installed(), receiver.published(),
        sender.lost("p0"), sender.planned({"p0": PREPARE}, {0: (2, 2)}),
        sender.packed(0, b""), sender.confirmed({"p0": "digest"}),
        *(receiver.receive(message) for message in FROM_SENDER),
        *(sender.receive("p0", message) for message in [HELLOS[0], *FROM_RECEIVER]),
    ]  # fmt: skip
    assert not any(calls)
    assert (receiver.phase, sender.phase) == (end, end)


# -- every way to fail in every state --------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "who"),
    [
        ("nobody", "2 of 2 receivers"),
        ("p0 there", "receiver (engine, pid 100), 1 of 2 receivers"),
        ("p0 ready", "receiver (engine, pid 101)"),
        ("planning", "receiver 0"), ("p0 prepared", "receiver 1"),
        ("packing", "the weight source"), ("both sent", "receiver 0"),
        ("p0 loaded both", "receiver 1"),
        ("p0 sealed", "receiver 1"), ("p0 done", "receiver 1"),
    ],
)  # fmt: skip
def test_the_error_of_a_deadline_names_who_was_awaited(state: str, who: str):
    clock = Clock()
    sender = sender_at(state, clock=clock)
    clock.now = DEADLINE_S
    sender.tick()
    assert sender.error is not None
    assert sender.error.details["peer"].startswith(who)


def test_a_receiver_takes_the_senders_deadline_if_that_is_sooner():
    clock = Clock()
    receiver = receiver_at("ready", clock=clock)
    receiver.receive(msgspec.structs.replace(PREPARE, deadline_s=5.0))
    assert receiver.remaining_s == 5.0
