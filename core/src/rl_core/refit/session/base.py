"""What both state machines share: phases, effects, deadlines, and how a failure ends."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from rl_core import errors
from rl_core.errors import RefitError, RefitPeerError, RefitProtocolError, RLError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rl_core.refit.messages import Offer, Prepare

__all__ = [
    "Attach",
    "Effect",
    "End",
    "Install",
    "Load",
    "MakePlan",
    "Pack",
    "Phase",
    "Publish",
    "Send",
    "Session",
    "bucket_digest",
    "peer_error",
    "seal_digest",
]

_MESSAGE_CHARS = 4000


class Phase(enum.StrEnum):
    """Where a refit is; the last three are its ends."""

    DISCOVER = "DISCOVER"
    PREPARE = "PREPARE"
    TRANSFER = "TRANSFER"
    SEAL = "SEAL"
    COMMIT = "COMMIT"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"
    TORN = "TORN"

    @property
    def terminal(self) -> bool:
        """True if nothing more happens."""
        return self in (Phase.COMMITTED, Phase.ABORTED, Phase.TORN)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to one peer, or to all of the session's."""

    message: Any
    to: str | None = None


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Sender: lay the tensors out in these dtypes, then call ``planned``."""

    dtypes: dict[str, str]


@dataclass(frozen=True, slots=True)
class Pack:
    """Sender: fill a slot with a bucket, then call ``packed``."""

    index: int


@dataclass(frozen=True, slots=True)
class Attach:
    """Receiver: stop generating, map the buffers, then call ``attached``."""

    prepare: Prepare
    offer: Offer


@dataclass(frozen=True, slots=True)
class Load:
    """Receiver: verify a bucket and write it to the sink, then call ``loaded``."""

    index: int
    digest: str


@dataclass(frozen=True, slots=True)
class Install:
    """Receiver: finish the sink and verify what is installed, then call ``installed``."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Publish:
    """Receiver: let the new version serve, then call ``published``."""

    version: int


@dataclass(frozen=True, slots=True)
class End:
    """The session is over, with an error unless all went well."""

    phase: Phase
    error: RLError | None


Effect = Send | MakePlan | Pack | Attach | Load | Install | Publish | End


class Session(ABC):
    """Base of the two state machines. No I/O, no threads, no clock of its own.

    Args:
        deadline_s: Seconds from now within which the session must end.
        clock: Monotonic seconds.

    Attributes:
        phase: Where the session is.
        error: Why it failed, once it has.
        phase_seconds: Time spent in each phase that was left.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self.phase = Phase.DISCOVER
        self.error: RLError | None = None
        self.phase_seconds: dict[str, float] = {}
        self._clock = clock
        self._entered = clock()
        self._seconds = deadline_s
        self._deadline = self._entered + deadline_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - self._clock())

    def tick(self) -> list[Effect]:
        """To be called now and then: ends the session once its deadline has passed."""
        if self.phase.terminal or self.remaining_s:
            return []
        who = self._awaited()
        return self.fail(
            RefitPeerError(
                f"{self.phase}: {who} did not answer within {self._seconds:g} s",
                fix="look at the other side's log; raise deadline_s if the model is large",
                peer=who,
            )
        )

    @abstractmethod
    def fail(self, error: BaseException) -> list[Effect]:
        """Ends the session for a reason on this side, and tells the others."""

    def _refuse(self, what: str, peer: str = "") -> list[Effect]:
        """Ends the session for a message that is not legal now."""
        details = {"peer": peer} if peer else {}
        return self.fail(RefitProtocolError(f"{self.phase}: {what}", **details))

    @abstractmethod
    def _awaited(self) -> str:
        """Who keeps the session waiting."""

    def _enter(self, phase: Phase) -> None:
        now = self._clock()
        spent = self.phase_seconds.get(self.phase, 0.0)
        self.phase_seconds[self.phase.value] = spent + now - self._entered
        self._entered = now
        self.phase = phase

    def _end(self, phase: Phase, error: BaseException | None = None) -> End:
        self.error = None if error is None else self._typed(error)
        self._enter(phase)
        return End(phase, self.error)

    def _typed(self, error: BaseException) -> RLError:
        """The error itself if it is ours, else one of ours that it causes."""
        if not isinstance(error, RLError):
            wrapped = RefitError(f"{self.phase}: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        error.details.setdefault("phase", self.phase.value)
        return error


def peer_error(kind: str, message: str, *, phase: Phase, peer: str) -> RefitError:
    """The error that another side reported, as an error of the same class on this side."""
    cls = getattr(errors, kind, None) if kind in errors.__all__ else None
    if not (isinstance(cls, type) and issubclass(cls, RefitError)) or cls is RefitError:
        cls = RefitPeerError
    return cls(f"{peer} failed: {message}", phase=phase.value, peer=peer)


def describe(error: BaseException) -> tuple[str, str]:
    """Class name and bounded text of an error, for a message to the other side."""
    return type(error).__name__, str(error)[:_MESSAGE_CHARS]


def bucket_digest(session: str, index: int, parts: Iterable[bytes]) -> str:
    """Hash of a bucket from those of its segments, bound to its place and its session."""
    head = f"{session}/{index}/".encode()
    return xxhash.xxh3_128_hexdigest(head + b"".join(parts))


def seal_digest(session: str, digests: Sequence[str]) -> str:
    """Hash over all buckets' digests, in order."""
    return xxhash.xxh3_128_hexdigest("/".join([session, "", *digests]).encode())
