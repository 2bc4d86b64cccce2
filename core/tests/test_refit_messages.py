"""Frames: what is not exactly what the other side wrote is refused with a typed error."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import RefitProtocolError
from rl_core.refit.messages import (
    MAX_FRAME_BYTES,
    BucketReady,
    Codec,
    FromReceiver,
    FromSender,
    Hello,
    Loaded,
)

TOKEN = "secret"
HELLO = Hello(1, "id", "engine", 2)


def test_a_message_survives_the_wire():
    codec = Codec[FromReceiver](FromReceiver, TOKEN)
    assert codec.decode(codec.encode(HELLO)) == HELLO


def test_a_message_of_the_other_direction_is_refused():
    frame = Codec[FromReceiver](FromReceiver, TOKEN).encode(Loaded("s", 1))
    with pytest.raises(RefitProtocolError, match="malformed"):
        Codec[FromSender](FromSender, TOKEN).decode(frame)


def test_a_frame_written_with_another_token_is_refused():
    frame = Codec[FromReceiver](FromReceiver, "guess").encode(HELLO)
    with pytest.raises(RefitProtocolError, match="token"):
        Codec[FromReceiver](FromReceiver, TOKEN).decode(frame)


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_noticed(position: int, bit: int):
    codec = Codec[FromSender](FromSender, TOKEN)
    frame = bytearray(codec.encode(BucketReady("session", 7, b"digest")))
    frame[position % len(frame)] ^= 1 << bit
    with pytest.raises(RefitProtocolError):
        codec.decode(bytes(frame))


@given(cut=st.integers(0, 40))
def test_a_truncated_frame_is_refused(cut: int):
    codec = Codec[FromSender](FromSender, TOKEN)
    frame = codec.encode(BucketReady("session", 7, b"digest"))
    with pytest.raises(RefitProtocolError):
        codec.decode(frame[: max(0, len(frame) - 1 - cut)])


def test_an_oversized_frame_is_refused_unread():
    with pytest.raises(RefitProtocolError, match="bytes"):
        Codec[FromSender](FromSender, TOKEN).decode(bytes(MAX_FRAME_BYTES + 1))


def test_an_oversized_message_is_not_sent():
    with pytest.raises(RefitProtocolError, match="Hello"):
        Codec[FromReceiver](FromReceiver, TOKEN).encode(Hello(1, "i", "x" * MAX_FRAME_BYTES, 2))


@given(frame=st.binary(max_size=300))
def test_noise_is_refused_with_a_typed_error(frame: bytes):
    with pytest.raises(RefitProtocolError):
        Codec[FromSender](FromSender, TOKEN).decode(frame)


@given(body=st.binary(max_size=200) | st.builds(msgspec.msgpack.encode, st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    | st.fixed_dictionaries({"type": st.sampled_from(["Offer", "Abort", "Seal"])}),
)))  # fmt: skip
def test_whoever_holds_the_token_can_send_nothing_but_messages(body: bytes):
    """The decoder behind the code: any body, authentic, is a message or a typed error."""
    codec = Codec[FromSender](FromSender, TOKEN)
    key = hashlib.blake2b(TOKEN.encode()).digest()
    frame = hashlib.blake2b(body, key=key, digest_size=16).digest() + body
    try:
        message = codec.decode(frame)
    except RefitProtocolError:
        return
    assert codec.decode(codec.encode(message)) == message
