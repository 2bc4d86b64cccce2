"""Who takes part in a refit, what both sides must agree on, and how fast it goes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scripted_sessions import (
    HELLOS,
    OFFER,
    READY,
    Clock,
    S,
    failed,
    new_sender,
    planned,
    receiver_at,
    sender_at,
)

from rl_core.errors import (
    CapabilityError,
    ManifestMismatchError,
    RefitAborted,
    RefitProtocolError,
)
from rl_core.weights.protocol.messages import (
    Abort,
    Failed,
    Prepared,
)
from rl_core.weights.protocol.session import MakePlan, Phase, Send

# -- who takes part --------------------------------------------------------------------------------


def test_hello_is_said_again_until_there_is_an_offer():
    clock = Clock()
    receiver = receiver_at("discover", clock=clock)
    clock.now = 0.4
    assert receiver.tick() == []
    clock.now = 0.5
    assert receiver.tick() == [Send(HELLOS[0])]
    receiver.receive(OFFER)
    clock.now = 5.0
    assert receiver.tick() == []


def refusal_of(effect: object, key: str) -> str:
    """What is said to a connection that is sent away."""
    assert isinstance(effect, Send)
    assert (type(effect.message), effect.to) == (Abort, key)
    return effect.message.message


def test_a_receiver_too_many_is_refused_and_does_no_harm():
    sender = sender_at("all there")
    assert sender.receive("p2", HELLOS[2]) == [Send(OFFER, "p2")]
    sender.receive("p0", READY)
    refusal, planning = sender.receive("p1", READY)
    assert "all of its receivers (2)" in refusal_of(refusal, "p2")
    assert isinstance(planning, MakePlan)
    assert list(sender.peers) == ["p0", "p1"]
    assert sender.receive("p2", READY) == []


def test_a_receiver_that_comes_again_may_want_other_dtypes_if_nobody_else_is_ready():
    sender = sender_at("p0 ready")
    sender.receive("again", HELLOS[0])
    ready = msgspec.structs.replace(READY, dtypes={"w": "bfloat16"})
    sender.receive("again", ready)
    [planning] = sender.receive("p1", ready)
    assert isinstance(planning, MakePlan)


def test_offers_that_nobody_answers_are_bounded():
    sender = sender_at("nobody")
    for number in range(1000):
        sender.receive(f"c{number}", msgspec.structs.replace(HELLOS[0], receiver=f"id{number}"))
    assert len(sender.connections) <= 100
    for key in sender.connections[-2:]:
        sender.receive(key, READY)
    assert sender.phase is Phase.PREPARE


@pytest.mark.parametrize("state", ["nobody", "p0 there", "p0 ready"])
def test_a_hello_for_a_refit_that_is_over_is_refused(state):
    sender = sender_at(state)
    [effect] = sender.receive("late", msgspec.structs.replace(HELLOS[2], number=0))
    refusal = refusal_of(effect, "late")
    assert "is at refit 0 and the trainer at refit 1" in refusal
    assert "prepare_refit_info() to every engine again" in refusal
    assert ("late" in sender.connections, sender.error) == (False, None)


def test_a_hello_for_a_later_refit_waits_for_it():
    clock = Clock()
    sender = new_sender(number=3, clock=clock)
    for now in (0.0, 3.0, 30.0):
        clock.now = now
        assert sender.receive(f"p{now:g}", msgspec.structs.replace(HELLOS[0], number=4)) == []
    assert (sender.connections, sender.error) == ([], None)
    clock.now = 1e6
    sender.tick()
    assert "engine, pid 100, is at refit 4 and the trainer at refit 3" in str(sender.error)


def test_a_frame_that_cannot_be_read_ends_the_refit_and_names_its_sender():
    sender = sender_at("both sent")
    sender.corrupted("p0", RefitProtocolError("damaged"))
    assert type(sender.error) is RefitProtocolError
    assert "receiver 0" in sender.error.peer


def test_who_answers_an_offer_with_what_cannot_be_read_does_not_take_part():
    clock = Clock()
    sender = new_sender(receivers=1, clock=clock)
    sender.receive("p0", HELLOS[0])
    [effect] = sender.corrupted("p0", RefitProtocolError("damaged"))
    assert "damaged" in refusal_of(effect, "p0")
    assert (sender.connections, sender.error) == ([], None)
    clock.now = 1e6
    sender.tick()
    assert "meanwhile: damaged" in str(sender.error)


def test_a_stranger_whose_frames_cannot_be_read_is_sent_away():
    sender = sender_at("both sent")
    [answer] = sender.corrupted("stranger", RefitProtocolError("damaged"))
    assert isinstance(answer, Send)
    assert (type(answer.message), answer.to) == (Abort, "stranger")
    assert sender.error is None


# -- what must agree -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"verify": "somehow"}, CapabilityError),
        ({"isolation": "somehow"}, CapabilityError),
        ({"manifest": "newer"}, RefitAborted),
    ],
)
def test_an_offer_that_cannot_be_taken_is_declined(change: dict[str, Any], error: type):
    receiver = receiver_at("discover")
    effects = receiver.receive(msgspec.structs.replace(OFFER, **change))
    assert (receiver.phase, type(receiver.error)) == (Phase.ABORTED, error)
    assert effects == failed(receiver)


def test_what_is_held_is_said_to_those_who_ask():
    asks = msgspec.structs.replace(OFFER, delta=True)
    held = msgspec.structs.replace(READY, holds=b"digests")
    for offer, answer in ((asks, held), (OFFER, READY)):
        receiver = receiver_at("discover", ready=lambda asked: held if asked.delta else READY)
        assert receiver.receive(offer) == [Send(answer)]


def test_receivers_that_want_different_dtypes_are_refused():
    sender = sender_at("p0 ready")
    sender.receive("p1", msgspec.structs.replace(READY, dtypes={"w": "bfloat16"}))
    assert type(sender.error) is ManifestMismatchError


@pytest.mark.parametrize("kind", ["RefitCorrupted", "ManifestMismatchError", "CapabilityError"])
def test_a_receivers_error_arrives_as_one_of_its_class(kind: str):
    sender = sender_at("both sent")
    sender.receive("p0", Failed(S, kind, "what happened", True))
    assert type(sender.error).__name__ == kind
    assert "what happened" in str(sender.error)
    assert "receiver 0" in sender.error.details["peer"]


def test_a_long_error_is_cut_for_the_wire_and_whole_at_home():
    receiver = receiver_at("ready")
    [told] = receiver.fail(ValueError("x" * 10_000))
    assert isinstance(told, Send)
    assert len(told.message.message) == 4000
    assert len(str(receiver.error)) > 10_000


# -- the window ------------------------------------------------------------------------------------


def test_time_is_told_by_phase():
    clock = Clock()
    sender = sender_at("planning", clock=clock)
    clock.now = 3.0
    planned(sender, 2)
    for number in range(2):
        sender.receive(f"p{number}", Prepared(S))
    clock.now = 5.0
    sender.fail(ValueError())
    assert sender.phase_seconds == {"DISCOVER": 0.0, "PREPARE": 3.0, "TRANSFER": 2.0}
