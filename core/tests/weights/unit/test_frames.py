"""Frames: what is not exactly what the other side wrote, here and now, is refused."""

from __future__ import annotations

from itertools import product
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import RefitProtocolError
from rl_core.weights.protocol import frames
from rl_core.weights.protocol.frames import MAX_FRAME_BYTES, Channel, read_hello, write_hello
from rl_core.weights.protocol.messages import (
    PROTOCOL,
    Abort,
    BucketReady,
    Commit,
    Hello,
    Loaded,
    Offer,
    Ready,
)

TOKEN, NONCE = "secret", b"n" * 16
HELLO = Hello("id", "engine", 2, NONCE, 1)
OFFER = Offer("session", "trainer", 1, "manifest", "wire", "quiesced", False, {})
READY = Ready("session", {}, b"", ())


def ends(nonce: bytes = NONCE, token: str = TOKEN) -> tuple[Channel, Channel]:
    return Channel(token, nonce, "sender"), Channel(token, nonce, "receiver")


def bound(nonce: bytes = NONCE, session: str = "session") -> tuple[Channel, Channel]:
    """Both ends after an offer."""
    sender, receiver = ends(nonce)
    receiver.decode(sender.encode(msgspec.structs.replace(OFFER, session=session)))
    return sender, receiver


def test_messages_survive_in_both_directions():
    sender, receiver = ends()
    assert read_hello(write_hello(HELLO, TOKEN), TOKEN) == HELLO
    assert receiver.decode(sender.encode(OFFER)) == OFFER
    for index in range(3):
        assert sender.decode(receiver.encode(Loaded("session", index))) == Loaded("session", index)
        message = BucketReady("session", index, b"digest")
        assert receiver.decode(sender.encode(message)) == message


def test_a_session_frame_is_no_hello_and_a_hello_no_session_frame():
    sender, _ = ends()
    frame = sender.encode(OFFER)
    assert read_hello(frame, TOKEN) is None
    with pytest.raises(RefitProtocolError):
        ends()[1].decode(write_hello(HELLO, TOKEN))


def test_a_frame_means_nothing_anywhere_else():
    """Every frame of two refits, tried at every point of both of them and in either direction."""

    def conversation(nonce: bytes, session: str) -> list[tuple[str, bytes]]:
        sender, receiver = ends(nonce)
        offer = msgspec.structs.replace(OFFER, session=session)
        told = [("down", sender.encode(offer))]
        receiver.decode(told[0][1])
        for _ in range(3):
            told.append(("up", receiver.encode(Loaded("s", 7))))
            told.append(("down", sender.encode(Commit("s"))))
            sender.decode(told[-2][1])
            receiver.decode(told[-1][1])
        return told

    refits = {(n, s): conversation(n, s) for n, s in product([b"1" * 16, b"2" * 16], "xy")}
    tried = 0
    for (nonce, session), told in refits.items():
        for at in range(len(told)):
            for other, frames_ in refits.items():
                for position, (_, frame) in enumerate(frames_):
                    sender, receiver = ends(nonce)
                    sender.encode(msgspec.structs.replace(OFFER, session=session))
                    for direction, earlier in told[:at]:
                        (receiver if direction == "down" else sender).decode(earlier)
                    reader = receiver if told[at][0] == "down" else sender
                    here = other == (nonce, session) and position == at
                    answers = other[0] == nonce and position == at == 0  # another offer
                    if here or answers:
                        reader.decode(frame)
                        continue
                    tried += 1
                    with pytest.raises(RefitProtocolError):
                        reader.decode(frame)
    assert tried > 700


def test_a_frame_written_with_another_token_is_refused():
    with pytest.raises(RefitProtocolError, match="token"):
        ends()[1].decode(ends(token="guess")[0].encode(OFFER))
    with pytest.raises(RefitProtocolError, match="token"):
        read_hello(write_hello(HELLO, "guess"), TOKEN)


def test_a_message_of_the_other_direction_is_refused():
    """Also where somebody who holds the token says it."""
    sender, receiver = bound()
    with pytest.raises(RefitProtocolError, match="malformed"):
        receiver.decode(sender.encode(READY))
    with pytest.raises(RefitProtocolError, match="malformed"):
        sender.decode(receiver.encode(Abort("session", "RefitError", "why")))


@pytest.mark.parametrize("theirs", [PROTOCOL - 1, PROTOCOL + 1])
def test_another_version_of_the_protocol_is_refused_by_name(monkeypatch, theirs):
    frame, hello = ends()[0].encode(OFFER), write_hello(HELLO, TOKEN)
    with mock.patch.object(frames, "PROTOCOL", theirs):
        for read in (lambda: ends()[1].decode(frame), lambda: read_hello(hello, TOKEN)):
            with pytest.raises(
                RefitProtocolError, match=f"protocol {PROTOCOL}.*protocol {theirs}"
            ) as error:
                read()
            assert "same rl-core" in str(error.value.fix)


def test_a_frame_of_a_release_without_a_head_is_refused_by_name():
    with pytest.raises(RefitProtocolError, match=f"protocol {PROTOCOL}"):
        read_hello(bytes(range(100)), TOKEN)


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_noticed(position: int, bit: int):
    for frame, read in (
        (ends()[0].encode(OFFER), ends()[1].decode),
        (write_hello(HELLO, TOKEN), lambda frame: read_hello(frame, TOKEN) or 1 / 0),
    ):
        damaged = bytearray(frame)
        damaged[position % len(frame)] ^= 1 << bit
        with pytest.raises((RefitProtocolError, ZeroDivisionError)):
            read(bytes(damaged))


def test_an_oversized_frame_is_refused_unread():
    with pytest.raises(RefitProtocolError, match="bytes"):
        ends()[1].decode(bytes(MAX_FRAME_BYTES + 1))


def test_an_oversized_message_is_not_sent():
    with pytest.raises(RefitProtocolError, match="Hello"):
        write_hello(Hello("i", "x" * MAX_FRAME_BYTES, 2, NONCE, 1), TOKEN)


@given(frame=st.binary(max_size=300))
def test_noise_is_refused_with_a_typed_error(frame: bytes):
    with pytest.raises(RefitProtocolError):
        ends()[1].decode(frame)


@given(body=st.binary(max_size=200) | st.builds(msgspec.msgpack.encode, st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    | st.fixed_dictionaries({"type": st.sampled_from(["Offer", "Abort", "Seal"])}),
)))  # fmt: skip
def test_whoever_holds_the_token_can_send_nothing_but_messages(body: bytes):
    """The decoder behind the code: any body, authentic, is a message or a typed error."""
    sender, receiver = ends()
    with mock.patch.object(frames, "_encoder", mock.Mock(encode=lambda _: body)):
        frame = sender.encode(None)
    try:
        message = receiver.decode(frame)
    except RefitProtocolError:
        return
    again, other = ends()
    assert other.decode(again.encode(message)) == message
