"""The state machine of a trainer's other ranks: one refit, of which rank 0 decides."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

import msgspec

from rl_core.errors import ManifestMismatchError, RefitAborted, RefitPeerError
from rl_core.weights.protocol import messages
from rl_core.weights.protocol.session import (
    Effect,
    PeerSession,
    Perform,
    Phase,
    Send,
    describe,
)
from rl_core.weights.protocol.timing import FOLLOWER_GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["RankSession"]


class RankSession(PeerSession):
    """One refit, seen from a rank of the trainer that does not decide.

    The job calls :meth:`start`, then :meth:`receive` with what arrives, and answers each
    ``Perform`` with :meth:`answer`.

    Args:
        hello: Of this rank.
        leader: Rank 0, for errors.
        manifest: Digest of this rank's manifest.
        failed: Why it cannot take part, of which rank 0 is informed; may be set before the start.
        counted: The number of the Hello is this rank's own count of its calls, and not one that was
            given to all ranks; it then takes part in the refit that rank 0 is at.
        deadline_s: Seconds for the refit; rank 0 has these to name who is late.
        clock: Monotonic seconds.

    Attributes:
        report: Rank 0's, once it is committed.
        met: Rank 0 has sent something of this refit.
        leader_number: Of the refit that rank 0 was at, if that was another one.
    """

    #: What may arrive in each phase, and that which follows. ``Abort`` and ``Over`` are legal in
    #: all of them: the refit may have ended before this rank came.
    TABLE: ClassVar[dict[tuple[Phase, type], Phase]] = {
        (Phase.DISCOVER, messages.Offer): Phase.PREPARE,
        (Phase.PREPARE, messages.HashParts): Phase.PREPARE,
        (Phase.PREPARE, messages.PrepareRank): Phase.PREPARE,
        (Phase.PREPARE, messages.PackBucket): Phase.TRANSFER,
        (Phase.TRANSFER, messages.PackBucket): Phase.TRANSFER,
        (Phase.PREPARE, messages.ConfirmRank): Phase.SEAL,
        (Phase.TRANSFER, messages.ConfirmRank): Phase.SEAL,
    }

    def __init__(
        self,
        hello: messages.Hello,
        *,
        leader: str,
        manifest: str,
        failed: BaseException | None,
        counted: bool,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(hello, manifest, deadline_s + FOLLOWER_GRACE_S, clock)
        self.report: dict[str, Any] | None = None
        self.met = False
        self.leader_number = 0
        self._leader = leader
        self.failed = failed
        self._counted = counted
        self._session = ""

    def receive(self, message: messages.Offer | messages.Abort | messages.ToRank) -> list[Effect]:
        """Takes one message of rank 0."""
        if self.phase.terminal:
            return []
        ours = not self._session or message.session == self._session
        self.met |= not (isinstance(message, messages.Abort) and message.number)
        if isinstance(message, messages.Abort) and message.number and not self._session:
            # One of the two made a call that the other did not.
            self.leader_number = message.number
            if self._counted:
                self._hello = msgspec.structs.replace(self._hello, number=message.number)
                return self.start()
            if message.number < self.number:
                return []  # its next one may be this rank's
        if isinstance(message, messages.Abort) and ours:
            text, _, fix = message.message.partition("\nFix: ")
            error = RefitAborted(
                f"{self._leader} ended the refit: {text}",
                fix=fix or "correct the error that rank 0 raised",
                peer="rank 0",
                cause=message.kind,
            )
            self._end(Phase.ABORTED, error)
            return []
        phase = self.TABLE.get((self.phase, type(message)))
        if isinstance(message, messages.Over) and ours:
            self.report = message.report
            self._end(Phase.COMMITTED)
            return []
        if phase is None or not ours:
            return self._refuse(f"received {type(message).__name__} out of order")
        self._session = message.session
        if phase is not self.phase:
            self._enter(phase)
        if isinstance(message, messages.Offer):
            if self.failed is not None:
                return self.fail(self.failed)
            if message.manifest != self._manifest:
                return self.fail(
                    ManifestMismatchError(
                        f"it has other tensors than rank 0: the digests of their names, shapes and "
                        f"dtypes are {self._manifest} and {message.manifest}",
                        fix="use the same configuration, checkpoint and packages on all ranks",
                    )
                )
        return [Perform(message)]

    def answer(self, message: messages.FromRank) -> list[Effect]:
        """What rank 0 wanted is done."""
        return [] if self.phase.terminal else [Send(message)]

    def fail(self, error: BaseException) -> list[Effect]:
        """See :meth:`Session.fail`."""
        if self.phase.terminal:
            return []
        offered = self.phase is not Phase.DISCOVER
        if isinstance(error, RefitPeerError):
            error.details.setdefault("rank", 0)
        self._end(Phase.ABORTED, error)
        assert self.error is not None
        # Of the class that it has here, also where that is none of ours.
        return [Send(messages.Failed(self._session, *describe(error), False))] if offered else []

    @property
    def number(self) -> int:
        """Of the refit."""
        return self._hello.number

    def _awaited(self) -> str:
        return self._leader
