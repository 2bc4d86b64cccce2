"""What the ranks of a trainer say to each other in a refit: MessagePack, in encrypted frames."""

from __future__ import annotations

import msgspec

__all__ = ["Close", "Confirm", "Done", "Failed", "Gather", "Hello", "Message", "Ready", "decode"]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A follower takes part.

    Attributes:
        call: What all ranks call the refit.
        rank: Of the follower.
    """

    call: str
    rank: int


class Gather(msgspec.Struct, frozen=True, array_like=True, tag="gather"):
    """Rank 0 asks for tensors, all of which are gathered, in this order, on every rank.

    Attributes:
        number: Of the question.
        names: Of the tensors.
    """

    number: int
    names: tuple[str, ...]


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
    """The follower begins what was asked, whatever happens: rank 0 may begin, too."""

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
    """

    kind: str
    message: str
    fix: str | None = None


Message = Hello | Gather | Confirm | Close | Ready | Done | Failed

_decoder = msgspec.msgpack.Decoder(Message)


def decode(frame: bytes) -> Message:
    """The message in a frame.

    Raises:
        msgspec.MsgspecError: There is none in it.
    """
    message: Message = _decoder.decode(frame)
    return message
