"""What the ranks of a trainer say to each other in a refit: MessagePack in encrypted frames."""

from __future__ import annotations

import msgspec

from rl_core.errors import RLError

_TEXT_CHARS = 2000


class RankHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A follower takes part.

    Attributes:
        rank_call_id: What all ranks call the refit.
        rank: Of the follower.
    """

    rank_call_id: str
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


class ConfirmPart(msgspec.Struct, frozen=True, array_like=True, tag="confirm"):
    """Rank 0 asks whether the follower's part is still of one state."""

    number: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Rank 0 has ended.

    Attributes:
        reason: Why it did before all was read and confirmed; empty if it was.
    """

    reason: str = ""


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The follower gathers as soon as it is told to go."""

    number: int


class RankDone(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The follower has done what was asked."""

    number: int


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The follower could not do it.

    Attributes:
        kind: Class of its error.
        message: Text of it.
        fix: What helps.
        out_of_step: On its rank a gather has failed; the ranks' collectives no longer match.
    """

    kind: str
    message: str
    fix: str | None = None
    out_of_step: bool = False

    @classmethod
    def of(cls, error: BaseException, *, out_of_step: bool = False) -> RankFailed:
        """What tells of an error."""
        text = error.message if isinstance(error, RLError) else str(error)
        fix = error.fix if isinstance(error, RLError) else None
        return cls(type(error).__name__, text[:_TEXT_CHARS], fix, out_of_step)


Message = RankHello | Gather | Go | ConfirmPart | Close | RankReady | RankDone | RankFailed

_decoder = msgspec.msgpack.Decoder(Message)

encode = msgspec.msgpack.encode


def decode(frame: bytes) -> Message:
    """The message in a frame.

    Raises:
        msgspec.MsgspecError: There is none in it.
    """
    message: Message = _decoder.decode(frame)
    return message
