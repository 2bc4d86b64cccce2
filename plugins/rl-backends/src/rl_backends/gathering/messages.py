"""The messages between the ranks of a trainer in a refit: MessagePack in encrypted frames."""

from __future__ import annotations

from typing import Any

import msgspec

from rl_core.errors import RLError

_TEXT_CHARS = 2000


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The follower could not do it.

    Attributes:
        kind: Class of its error.
        message: Text of it.
        fix: What helps.
        collectives_diverged: A gather has failed there; the ranks' collectives no longer match.
    """

    kind: str
    message: str
    fix: str | None = None
    collectives_diverged: bool = False

    @classmethod
    def of(cls, error: BaseException, *, collectives_diverged: bool = False) -> RankFailed:
        """The message for an error."""
        text = error.message if isinstance(error, RLError) else str(error)
        fix = error.fix if isinstance(error, RLError) else None
        return cls(type(error).__name__, text[:_TEXT_CHARS], fix, collectives_diverged)


class RankHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A follower takes part, or could not make its part.

    Attributes:
        number: Of the refit, the same on all ranks; 0 if rank 0 alone numbers them.
        rank: Of the follower.
        state: Of its weights; see :class:`~rl_backends.gathering.WeightChanges`.
        specs: Digest of its tensors' names, shapes and dtypes.
        failed: Why it could not.
        call: Counts the follower's refits: with two connections of it, the later one counts.
        pid: Of its process, unless rank 0 knows it.
        host: Of that; see :class:`~rl_backends.gathering.RankProcess`.
    """

    number: int
    rank: int
    state: int = 0
    specs: str = ""
    failed: RankFailed | None = None
    call: int = 0
    pid: int = 0
    host: str = ""


class Gather(msgspec.Struct, frozen=True, array_like=True, tag="gather"):
    """Rank 0 wants to gather these tensors, in this order; a follower that is ready answers.

    Attributes:
        number: Of the question.
        names: Of the tensors.
    """

    number: int
    names: tuple[str, ...]


class Go(msgspec.Struct, frozen=True, array_like=True, tag="go"):
    """All are ready, and rank 0 begins: every rank gathers all of the tensors, whatever happens.

    Attributes:
        number: The next one, which the follower repeats when it has gathered all.
    """

    number: int


class ConfirmPart(msgspec.Struct, frozen=True, array_like=True, tag="confirm"):
    """Rank 0 wants the follower to check that its part is still of one state."""

    number: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Rank 0 has ended.

    Attributes:
        reason: Why it failed; empty if it did not, or if rank 0 began the next one first.
        report: Of the refit, if rank 0 has it.
    """

    reason: str = ""
    report: dict[str, Any] | None = None


class RankDone(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The follower has done its work, or is ready to gather.

    Attributes:
        number: Of the question.
        state: Of its weights now.
    """

    number: int
    state: int


Message = RankHello | Gather | Go | ConfirmPart | Close | RankDone | RankFailed

_decoder = msgspec.msgpack.Decoder(Message)

encode = msgspec.msgpack.encode


def decode(frame: bytes) -> Message:
    """The message in a frame.

    Raises:
        msgspec.MsgspecError: There is none in it.
    """
    message: Message = _decoder.decode(frame)
    return message
