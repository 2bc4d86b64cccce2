"""What the ranks of a trainer say to each other in a refit: MessagePack, in encrypted frames."""

from __future__ import annotations

import msgspec

__all__ = [
    "Close",
    "Confirm",
    "Done",
    "Failed",
    "Gather",
    "Go",
    "Hello",
    "Message",
    "Ready",
    "decode",
]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A follower takes part.

    Attributes:
        call: What all ranks call the refit.
        rank: Of the follower.
    """

    call: str
    rank: int


class Gather(msgspec.Struct, frozen=True, array_like=True, tag="gather"):
    """Rank 0 asks who is ready to gather tensors, in this order, on every rank.

    Attributes:
        number: Of the question.
        names: Of the tensors.
    """

    number: int
    names: tuple[str, ...]


class Go(msgspec.Struct, frozen=True, array_like=True, tag="go"):
    """All are ready, and rank 0 begins: every rank gathers all of the tensors, whatever happens."""

    number: int


class Confirm(msgspec.Struct, frozen=True, array_like=True, tag="confirm"):
    """Rank 0 asks whether the follower's part is still of one state."""

    number: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Rank 0 has ended.

    Attributes:
        reason: Why it did before all was read and confirmed; empty if it was.
    """

    reason: str = ""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The follower gathers as soon as it is told to go."""

    number: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The follower has done what was asked."""

    number: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The follower could not do it.

    Attributes:
        kind: Class of its error.
        message: Text of it.
        fix: What helps.
        out_of_step: It failed to gather, so that the ranks' collectives no longer match.
    """

    kind: str
    message: str
    fix: str | None = None
    out_of_step: bool = False


Message = Hello | Gather | Go | Confirm | Close | Ready | Done | Failed

_decoder = msgspec.msgpack.Decoder(Message)


def decode(frame: bytes) -> Message:
    """The message in a frame.

    Raises:
        msgspec.MsgspecError: There is none in it.
    """
    message: Message = _decoder.decode(frame)
    return message
