"""What sender and receiver say to each other: typed, bounded, authenticated, free of pickle.

A frame is a 16-byte BLAKE2b code keyed with the channel's token, then a msgpack message. Whoever
does not hold the token can neither write a frame that is read nor change one unnoticed.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Generic, TypeVar

import msgspec

from rl_core.errors import RefitProtocolError

__all__ = [
    "MAX_FRAME_BYTES",
    "PROTOCOL",
    "Abort",
    "BucketReady",
    "Codec",
    "Commit",
    "Done",
    "Failed",
    "FromReceiver",
    "FromSender",
    "Handles",
    "Hello",
    "Loaded",
    "Offer",
    "Prepare",
    "Prepared",
    "Ready",
    "Seal",
    "Sealed",
]

PROTOCOL = 2
MAX_FRAME_BYTES = 8 << 20
_CODE_BYTES = 16


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages: the class name is the tag."""


class _InSession(_Message, frozen=True):
    session: str


class Hello(_Message, frozen=True):
    """Receiver: here I am. Repeated until an offer comes."""

    protocol: int
    receiver: str
    name: str
    pid: int


class Offer(_InSession, frozen=True):
    """Sender: this refit is on offer. With ``delta``, only what a receiver lacks will be sent."""

    protocol: int
    sender: str
    version: int
    manifest: str
    verify: str
    isolation: str
    delta: bool
    kv_scales: dict[str, float]


class Ready(_InSession, frozen=True):
    """Receiver: the manifest is the one I checked; send these tensors in these dtypes.

    ``holds`` has the digest of every tensor that I know to have, 16 bytes each, in the manifest's
    order, zeros for the others; it is empty without ``delta``. ``gpus`` are the UUIDs of the
    GPU that my tensors are on and of others that I can reach; empty if they are on none.
    """

    manifest: str
    dtypes: dict[str, str]
    holds: bytes
    gpus: tuple[str, ...]


class Prepare(_InSession, frozen=True):
    """Sender: the plan and how to reach its lane.

    ``skip`` has a byte for each tensor, 1 for those that are not sent; empty if all are. ``hash``
    is the kind of all digests, as of ``hashing.BlockHash``.
    """

    plan: str
    bucket_bytes: int
    buckets: int
    direct: bool
    skip: bytes
    lane: dict[str, Any]
    deadline_s: float
    hash: str = "xxh3"


class Prepared(_InSession, frozen=True):
    """Receiver: nothing generates any more, and my plan is the same."""

    plan: str


class BucketReady(_InSession, frozen=True):
    """Sender: a bucket lies in the lane; the digest of each block, empty without verification."""

    index: int
    digests: bytes


class Loaded(_InSession, frozen=True):
    """Receiver: the bucket is installed, its slot is free."""

    index: int


class Seal(_InSession, frozen=True):
    """Sender: that was all; ``digest`` covers every tensor of the model, sent or held."""

    digest: str


class Sealed(_InSession, frozen=True):
    """Receiver: everything is installed and verified; I await your decision."""

    digest: str


class Commit(_InSession, frozen=True):
    """Sender: every receiver is sealed; the version counts."""

    version: int


class Done(_InSession, frozen=True):
    """Receiver: the version serves."""

    version: int


class Abort(_InSession, frozen=True):
    """Sender: given up. ``kind`` is the name of the error class behind it."""

    kind: str
    message: str


class Failed(_InSession, frozen=True):
    """Receiver: given up; ``torn`` if weights were touched."""

    kind: str
    message: str
    torn: bool


class Handles(_InSession, frozen=True):
    """One group of tensors handed over by the older handle methods."""

    manifest: str
    version: int
    keys: tuple[str, ...]
    lane: dict[str, Any]
    digests: bytes


FromSender = Offer | Prepare | BucketReady | Seal | Commit | Abort
FromReceiver = Hello | Ready | Prepared | Loaded | Sealed | Done | Failed

M = TypeVar("M")


class Codec(Generic[M]):
    """Frames of one kind of message, such as ``Codec(FromSender, token)``.

    Args:
        kind: The message class or union that is decoded; others are refused.
        token: The channel's secret.
    """

    def __init__(self, kind: object, token: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._key = hashlib.blake2b(token.encode()).digest()

    def encode(self, message: object) -> bytes:
        """A frame for any message.

        Raises:
            RefitProtocolError: It is larger than a frame may be.
        """
        body = self._encoder.encode(message)
        if len(body) + _CODE_BYTES > MAX_FRAME_BYTES:
            raise RefitProtocolError(
                f"{type(message).__name__} takes {len(body)} bytes; a frame holds "
                f"{MAX_FRAME_BYTES}",
                fix="the model has too many tensors for one refit; shorten their names",
            )
        return self._code(body) + body

    def decode(self, frame: bytes) -> M:
        """The message in a frame.

        Raises:
            RefitProtocolError: The frame is too large, too short, not authentic or malformed.
        """
        if not _CODE_BYTES < len(frame) <= MAX_FRAME_BYTES:
            raise RefitProtocolError(
                f"a frame of {len(frame)} bytes; legal are {_CODE_BYTES + 1} to {MAX_FRAME_BYTES}"
            )
        code, body = frame[:_CODE_BYTES], frame[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(body)):
            raise RefitProtocolError(
                "a frame that was damaged, or written by someone without the channel's token",
                fix="call prepare_refit_info on both sides again, so that the tokens agree",
            )
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RefitProtocolError(f"a malformed message: {error}") from error

    def _code(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=self._key, digest_size=_CODE_BYTES).digest()
