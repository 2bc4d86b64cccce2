"""What both state machines share: phases, effects, deadlines, and how a failure ends."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rl_core import errors
from rl_core.errors import (
    CapabilityError,
    RefitAborted,
    RefitError,
    RefitPeerError,
    RefitProtocolError,
    RLError,
)
from rl_core.weights.protocol.timing import HELLO_S, report_margin_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_core.weights.protocol.messages import Hello, Offer, Prepare, RankReady, Ready

__all__ = [
    "Answered",
    "Attach",
    "Confirm",
    "Effect",
    "Install",
    "Load",
    "MakePlan",
    "Pack",
    "Packed",
    "PeerSession",
    "Perform",
    "Phase",
    "Publish",
    "Send",
    "Session",
    "describe",
    "peer_error",
    "repeats_peer_error",
]

_MESSAGE_CHARS = 4000
#: For two sides that do not count their refits alike any more.
IN_STEP_AGAIN = "pass policy.prepare_refit_info() to every engine again, then call refit again"
#: What another side may have raised, and means the same on this one.
_SAME_HERE = (RefitError, CapabilityError)


class Phase(enum.StrEnum):
    """Where a refit is; the last three are its ends."""

    DISCOVER = "DISCOVER"
    PREPARE = "PREPARE"
    TRANSFER = "TRANSFER"
    SEAL = "SEAL"
    INSTALL = "INSTALL"
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
    """Sender: lay the tensors out for the answers of receivers and ranks, then call ``planned``."""

    ready: Mapping[str, Ready]
    ranks: Mapping[int, RankReady] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answered:
    """Sender: the answers of all other ranks to what ``ask`` sent them."""

    answers: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class Pack:
    """Sender: put a bucket into the lane, then call ``packed``."""

    index: int


@dataclass(frozen=True, slots=True)
class Packed:
    """Sender: a rank has put a bucket into its lane; note its digests, then call ``packed``."""

    index: int
    digests: bytes
    lane: int


@dataclass(frozen=True, slots=True)
class Confirm:
    """Sender: make sure that all was of one state, then call ``confirmed``."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Receiver: attach to the lane (and, if quiesced, stop generating), then call ``attached``."""

    prepare: Prepare
    offer: Offer


@dataclass(frozen=True, slots=True)
class Load:
    """Receiver: a bucket is on its way, so begin to fetch it at once.

    When it is here, verify it, write it to the sink, and call ``loaded``.
    """

    index: int
    digests: bytes
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Install:
    """Receiver: finish the sink, verify what is installed, then call ``installed``."""

    offer: Offer
    digest: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Receiver: let the new version serve, then call ``published``."""

    version: int


@dataclass(frozen=True, slots=True)
class Perform:
    """Rank: do what rank 0 wants, then call ``answer``."""

    message: Any


Effect = (
    Send
    | MakePlan
    | Answered
    | Pack
    | Packed
    | Confirm
    | Attach
    | Load
    | Install
    | Publish
    | Perform
)


class Session(ABC):
    """Base of all state machines. No I/O, no threads; the clock is given.

    Once :attr:`phase` is terminal, :attr:`error` tells why unless all went well.

    Attributes:
        phase: Where the session is.
        at: What is being transferred, for errors; set by the job.
        held_up: What on this side keeps the session waiting, for errors; set by the job.
        OWN: What of this side keeps it busy.
        SELF: Who this side is, for details of errors.
        error: Why it failed, once it has.
        phase_seconds: Time spent in each phase that was left.
    """

    OWN: ClassVar[str] = "weight source"
    SELF: ClassVar[dict[str, int]] = {}

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self.phase = Phase.DISCOVER
        self.at = self.held_up = ""
        self.error: RLError | None = None
        self.phase_seconds: dict[str, float] = {}
        self._clock = clock
        self._entered = clock()
        self._seconds = deadline_s
        self.deadline = self._entered + deadline_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - self._clock())

    @property
    def where(self) -> str:
        """The phase, and what is being transferred in it."""
        return f"{self.phase} ({self.at})" if self.at else str(self.phase)

    def tick(self) -> list[Effect]:
        """To be called now and then: ends the session once its deadline has passed."""
        if self.phase.terminal:
            return []
        if self.held_up and self.remaining_s <= report_margin_s(self._seconds):
            return self.fail(
                RefitAborted(
                    f"{self.where}: {self.held_up} did not end within {self._seconds:g} s",
                    fix="finish running calls (close iterators of generate_async), or raise "
                    "deadline_s",
                    peer=self.held_up,
                )
            )
        if self.remaining_s:
            return []
        who, discover = self._awaited(), self.phase is Phase.DISCOVER
        then = IN_STEP_AGAIN if discover else "raise deadline_s if the model is large"
        return self.fail(
            RefitPeerError(
                f"{self.where}: {who} did not answer within {self._seconds:g} s{self._hint()}",
                fix=f"look at the other side's log; {then}",
                peer=who,
            )
        )

    def overdue(self) -> list[Effect]:
        """Ends the session if its deadline passed while this side alone was busy."""
        if self.remaining_s:
            return []
        return self.fail(
            RefitError(
                f"{self.where}: this process's own {self.OWN} kept it busy until after the "
                f"deadline of {self._seconds:g} s",
                fix="find out what it does (py-spy dump), or raise deadline_s",
                **self.SELF,
            )
        )

    @abstractmethod
    def fail(self, error: BaseException) -> list[Effect]:
        """Ends the session for a reason on this side, and tells the others."""

    def _refuse(self, what: str, **details: Any) -> list[Effect]:
        """Ends the session for a message that is not legal now."""
        return self.fail(RefitProtocolError(f"{self.phase}: {what}", **details))

    @abstractmethod
    def _awaited(self) -> str:
        """Who keeps the session waiting."""

    def _hint(self) -> str:
        """What else may help to find out why nobody answered."""
        return ""

    def _enter(self, phase: Phase) -> None:
        now = self._clock()
        spent = self.phase_seconds.get(self.phase, 0.0)
        self.phase_seconds[self.phase.value] = spent + now - self._entered
        self._entered = now
        self.phase = phase

    def _end(self, phase: Phase, error: BaseException | None = None) -> None:
        """Ends the session; an error that is not ours becomes the cause of one that is."""
        if error is not None and not isinstance(error, RLError):
            wrapped = RefitError(f"{self.phase}: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self.error = error
        if error is not None:
            error.details.setdefault("phase", self.phase.value)
            if isinstance(error, RefitPeerError):
                error.details.setdefault("peer", self._awaited())
        self._enter(phase)


class PeerSession(Session):
    """Base of those that take part in a refit of rank 0, of a receiver and of another rank.

    Args:
        hello: Of this process; :meth:`start` sends it, and :meth:`tick` repeats it.
        manifest: Digest of its manifest.
        deadline_s: Seconds for the refit.
        clock: Monotonic seconds.
    """

    def __init__(
        self, hello: Hello, manifest: str, deadline_s: float, clock: Callable[[], float]
    ) -> None:
        super().__init__(deadline_s, clock)
        self._hello = hello
        self._manifest = manifest
        self._hello_at = 0.0

    def start(self) -> list[Effect]:
        """Sends the Hello."""
        self._hello_at = self._clock() + HELLO_S
        return [Send(self._hello)]

    def tick(self) -> list[Effect]:
        """See :meth:`Session.tick`; repeats the Hello while there is no offer."""
        if effects := super().tick():
            return effects
        waits = self.phase is Phase.DISCOVER and self._clock() >= self._hello_at
        return self.start() if waits else []


def peer_error(
    kind: str, message: str, *, same_here: tuple[type[RLError], ...] = _SAME_HERE, **details: Any
) -> RLError:
    """The error of another process, as one of the same class here; else a RefitPeerError."""
    found = getattr(errors, kind, None) if kind in errors.__all__ else None
    text, _, fix = message.partition("\nFix: ")
    details = {"fix": fix or None, **details}
    if isinstance(found, type) and issubclass(found, same_here) and found is not RefitError:
        return found(text, **details)
    return RefitPeerError(text, **details)


def repeats_peer_error(error: RLError) -> bool:
    """Whether it repeats an error that another process raised: its ``cause`` names the class."""
    return "cause" in error.details


def describe(error: BaseException) -> tuple[str, str]:
    """Class name and bounded text of an error, for a message to the other side."""
    return type(error).__name__, str(error)[:_MESSAGE_CHARS]
