"""Frames: messages that are authentic, whole, in order, and of this very refit.

A frame is a head (``RL``, the protocol's number, a letter), a 16-byte code and a msgpack message.
The code is BLAKE2b, keyed with what only the holders of the channel's token can derive::

    Hello       token, "hello"
    Offer       token, direction, the receiver's nonce
    the rest    token, direction, the receiver's nonce, the session and nonce of the Offer

and it covers the head and the number of frames before it under the same key. So a frame that was
recorded means nothing anywhere else: not on another connection, not in another refit, not in the
other direction, not a second time. Somebody else can replay a Hello alone; all that it
brings is an Offer, to which only its author can answer. There is no pickle anywhere.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Generic, Literal, TypeVar

import msgspec

from rl_core.errors import RefitProtocolError
from rl_core.weights.protocol.messages import (
    PROTOCOL,
    FromRank,
    FromReceiver,
    FromSender,
    Hello,
    Offer,
    ToRank,
)

__all__ = ["MAX_FRAME_BYTES", "Channel", "origin_of", "read_hello", "write_hello"]

MAX_FRAME_BYTES = 8 << 20
_CODE_BYTES = 16
_MAGIC = b"RL"
_HEAD_BYTES = len(_MAGIC) + 2

Side = Literal["sender", "receiver"]
M = TypeVar("M")


class _Kind(Generic[M]):
    """Frames with one letter in their head and one type of message."""

    def __init__(self, letter: bytes, message: object) -> None:
        self._letter = letter
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message)

    def write(self, message: object, key: bytes, count: int = 0) -> bytes:
        """A frame; raises RefitProtocolError if it is larger than a frame may be."""
        frame = self.sign(_encoder.encode(message), key, count)
        if len(frame) > MAX_FRAME_BYTES:
            raise RefitProtocolError(
                f"the message {type(message).__name__} has {len(frame)} bytes; a frame holds at "
                f"most {MAX_FRAME_BYTES}",
                fix="send fewer tensors, or tensors with shorter names",
            )
        return frame

    def sign(self, body: bytes, key: bytes, count: int) -> bytes:
        """The frame around a message that is encoded."""
        head = _MAGIC + bytes([PROTOCOL]) + self._letter
        return head + _code(key, head, count, body) + body

    def read(self, frame: bytes, key: bytes, count: int = 0) -> M:
        """The message in a frame; raises RefitProtocolError for what is not exactly that."""
        least = _HEAD_BYTES + _CODE_BYTES
        if not least < len(frame) <= MAX_FRAME_BYTES:
            raise RefitProtocolError(
                f"received a frame of {len(frame)} bytes; valid are {least + 1} to "
                f"{MAX_FRAME_BYTES}"
            )
        head, code, body = frame[:_HEAD_BYTES], frame[_HEAD_BYTES:least], frame[least:]
        if head[:-1] != _MAGIC + bytes([PROTOCOL]):
            other = f"of refit protocol {head[2]}" if head.startswith(_MAGIC) else "of no refit"
            raise RefitProtocolError(
                f"received a frame {other}; this side uses refit protocol {PROTOCOL}"
            )
        authentic = hmac.compare_digest(code, _code(key, head, count, body))
        if not authentic or head[-1:] != self._letter:
            raise RefitProtocolError(
                "received a frame that is damaged, repeated, of another channel, or from a process "
                "without this channel's token",
                fix="call prepare_refit_info on both sides again, so that the tokens agree",
            )
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RefitProtocolError(f"received a malformed message: {error}") from error


_encoder = msgspec.msgpack.Encoder()
_hello = _Kind[Hello](b"H", Hello)
_said_by: dict[Side, _Kind[Any]] = {
    "sender": _Kind[FromSender | ToRank](b"C", FromSender | ToRank),
    "receiver": _Kind[FromReceiver | FromRank](b"C", FromReceiver | FromRank),
}


def _code(key: bytes, head: bytes, count: int, body: bytes) -> bytes:
    code = hashlib.blake2b(head, key=key, digest_size=_CODE_BYTES)
    code.update(count.to_bytes(8, "big"))
    code.update(body)
    return code.digest()


def _key(token: str, *parts: bytes) -> bytes:
    """A key for one purpose; the lengths of the parts keep them apart."""
    derived = hashlib.blake2b(key=hashlib.blake2b(token.encode()).digest(), person=b"rl-refit")
    for part in parts:
        derived.update(len(part).to_bytes(8, "big") + part)
    return derived.digest()


def origin_of(token: str) -> int:
    """Identifies a trainer: 63 bits of a hash of its token, which they do not reveal."""
    return int.from_bytes(_key(token, b"origin")[:8]) >> 1


def write_hello(hello: Hello, token: str) -> bytes:
    """The frame of a Hello."""
    return _hello.write(hello, _key(token, b"hello"))


def read_hello(frame: bytes, token: str) -> Hello | None:
    """The Hello in a frame; None if the frame is of another kind."""
    if frame[_HEAD_BYTES - 1 : _HEAD_BYTES] != b"H" and frame.startswith(_MAGIC):
        return None
    return _hello.read(frame, _key(token, b"hello"))


class Channel:
    """One end of one connection, for one refit.

    It is bound to the refit by the Offer that passes it first; frames of before, after or anywhere
    else are refused on either side.
    """

    def __init__(self, token: str, nonce: bytes, side: Side) -> None:
        self.nonce = nonce
        self._token = token
        self._side: Side = side
        self._peer: Side = "receiver" if side == "sender" else "sender"
        self._bind()

    def encode(self, message: object) -> bytes:
        """A frame for a message of this side."""
        frame = _said_by[self._side].write(message, self._keys[self._side], self._sent)
        self._sent += 1
        if isinstance(message, Offer):
            self._bind(message.session.encode(), message.nonce)
        return frame

    def decode(self, frame: bytes) -> Any:
        """The message of the other side in a frame."""
        message = _said_by[self._peer].read(frame, self._keys[self._peer], self._received)
        self._received += 1
        if isinstance(message, Offer):
            self._bind(message.session.encode(), message.nonce)
        return message

    def _bind(self, *offered: bytes) -> None:
        self._sent = self._received = 0
        self._keys: dict[Side, bytes] = {
            side: _key(self._token, side.encode(), self.nonce, *offered)
            for side in ("sender", "receiver")
        }
