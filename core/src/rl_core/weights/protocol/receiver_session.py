"""The receiver's state machine: one refit, seen from the engine."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from rl_core.errors import CapabilityError, RefitAborted, RefitPeerError, WeightsTornError
from rl_core.weights.protocol import messages
from rl_core.weights.protocol.session import (
    Attach,
    Effect,
    Install,
    Load,
    PeerSession,
    Phase,
    Publish,
    Send,
    describe,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ISOLATION_LEVELS", "VERIFY_LEVELS", "ReceiverSession"]

VERIFY_LEVELS = ("none", "wire", "installed")
ISOLATION_LEVELS = ("quiesced", "staged")


class ReceiverSession(PeerSession):
    """One refit, seen from the engine.

    The job calls :meth:`start`, then :meth:`receive` with what arrives, performs the effects,
    and answers each with :meth:`attached`, :meth:`loaded`, :meth:`installed` or
    :meth:`published`. It calls :meth:`mark_torn` right before the engine's first byte is written.

    With ``isolation="staged"`` the job undoes what it wrote when the session ends otherwise
    than COMMITTED, which is then ABORTED and never TORN.
    """

    OWN: ClassVar[str] = "weight sink"
    #: What may arrive in each phase. ``Abort`` is legal in all of them; everything else ends the
    #: session: ABORTED if nothing was written, else TORN.
    TABLE: ClassVar[dict[tuple[Phase, type], str]] = {
        (Phase.DISCOVER, messages.Offer): "_on_offer",  # -> PREPARE
        (Phase.PREPARE, messages.Prepare): "_on_prepare",  # attached  -> TRANSFER
        (Phase.TRANSFER, messages.BucketReady): "_on_bucket",
        (Phase.TRANSFER, messages.Seal): "_on_seal",  # -> INSTALL, installed -> COMMIT
        (Phase.COMMIT, messages.Commit): "_on_commit",  # published -> COMMITTED
    }

    def __init__(
        self,
        hello: messages.Hello,
        *,
        manifest: str,
        ready: Callable[[messages.Offer], messages.Ready],
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(hello, manifest, deadline_s, clock)
        self.offer: messages.Offer | None = None
        self.touched = False
        self._ready = ready
        self._prepare: messages.Prepare | None = None
        self._buckets: Mapping[int, int] = {}  # by lane, as what follows
        self._announced: Counter[int] = Counter()
        self._loaded: Counter[int] = Counter()

    # -- what happens -----------------------------------------------------------------------------

    def receive(self, message: messages.FromSender) -> list[Effect]:
        """Takes one message of the sender."""
        if self.phase.terminal:
            return []
        ours = self.offer is None or message.session == self.offer.session
        if isinstance(message, messages.Abort) and ours:
            torn = self._end_of_failure is Phase.TORN
            then = "until it commits, generating fails" if torn else "the old weights serve"
            text, _, fix = message.message.partition("\nFix: ")
            error = (WeightsTornError if torn else RefitAborted)(
                f"{self.phase}: the sender gave up: {text}",
                fix=f"{fix or 'call refit again'}; {then}",
                phase=self.phase.value,
                peer=self._awaited(),
                cause=message.kind,
            )
            self._end(self._end_of_failure, error)
            return []
        handler = self.TABLE.get((self.phase, type(message)))
        if handler is None or not ours:
            return self._refuse(f"received {type(message).__name__} out of order")
        effects: list[Effect] = getattr(self, handler)(message)
        return effects

    def attached(self, buckets: Mapping[int, int]) -> list[Effect]:
        """Our plans, of so many buckets by lane, are the sender's; lanes and sink are ready."""
        if self.phase.terminal:
            return []
        self._buckets = buckets
        self._enter(Phase.TRANSFER)
        return [Send(messages.Prepared(self._session))]

    def mark_torn(self) -> None:
        """The next write makes the weights neither old nor new."""
        self.touched = True

    def loaded(self, index: int, lane: int = 0) -> list[Effect]:
        """A bucket is in the sink; its slot may be filled again."""
        if self.phase.terminal:
            return []
        self._loaded[lane] += 1
        return [Send(messages.Loaded(self._session, index, lane))]

    def installed(self) -> list[Effect]:
        """All is installed and verified; only the sender's decision is missing."""
        if self.phase.terminal:
            return []
        self._enter(Phase.COMMIT)
        return [Send(messages.Sealed(self._session))]

    def published(self) -> list[Effect]:
        """The new version serves."""
        if self.phase.terminal:
            return []
        self._end(Phase.COMMITTED)
        return [Send(messages.Done(self._session))]

    def lost(self, why: str) -> list[Effect]:
        """The sender ended or does not answer."""
        return self.fail(
            RefitPeerError(
                f"{self.where}: {self._awaited()} {why}",
                fix="restart the trainer, and call refit again",
                peer=self._awaited(),
            )
        )

    def fail(self, error: BaseException) -> list[Effect]:
        """See :meth:`Session.fail`."""
        if self.phase.terminal:
            return []
        self._end(self._end_of_failure, error)
        if self.offer is None:
            return []
        assert self.error is not None
        torn = self.phase is Phase.TORN
        return [Send(messages.Failed(self._session, *describe(self.error), torn))]

    # -- handlers, in the order of the phases -----------------------------------------------------

    def _on_offer(self, offer: messages.Offer) -> list[Effect]:
        self.offer = offer
        if offer.verify not in VERIFY_LEVELS or offer.isolation not in ISOLATION_LEVELS:
            return self.fail(
                CapabilityError(
                    f"verify={offer.verify!r} with isolation={offer.isolation!r} is not supported",
                    fix=f"use verify of {VERIFY_LEVELS} and isolation of {ISOLATION_LEVELS}",
                )
            )
        if offer.manifest != self._manifest:
            return self.fail(
                RefitAborted(
                    "the trainer's tensors are not those of the last prepare_refit_info()",
                    fix="pass the policy's prepare_refit_info() to the engine, and refit again",
                )
            )
        self._enter(Phase.PREPARE)
        return [Send(self._ready(offer))]

    def _on_prepare(self, prepare: messages.Prepare) -> list[Effect]:
        if self._prepare is not None:
            return self._refuse("received Prepare twice")
        self._prepare = prepare
        if prepare.deadline_s < self.remaining_s:
            self._seconds = prepare.deadline_s
            self.deadline = self._clock() + prepare.deadline_s
        return [Attach(prepare, self._offer)]

    def _on_bucket(self, bucket: messages.BucketReady) -> list[Effect]:
        expected = self._announced[bucket.lane]
        if bucket.index != expected or expected >= self._buckets.get(bucket.lane, 0):
            return self._refuse(f"received bucket {bucket.index}, expected {expected}")
        self._announced[bucket.lane] += 1
        return [Load(bucket.index, bucket.digests, bucket.lane)]

    def _on_seal(self, seal: messages.Seal) -> list[Effect]:
        loaded, buckets = self._loaded.total(), sum(self._buckets.values())
        if loaded != buckets:
            return self._refuse(f"received Seal after {loaded} of {buckets} buckets")
        self._enter(Phase.INSTALL)
        return [Install(self._offer, seal.digest)]

    def _on_commit(self, _: messages.Commit) -> list[Effect]:
        return [Publish(self._offer.version)]

    # -- helpers ----------------------------------------------------------------------------------

    @property
    def _offer(self) -> messages.Offer:
        assert self.offer is not None
        return self.offer

    @property
    def _end_of_failure(self) -> Phase:
        written = self.touched and self._offer.isolation == "quiesced"
        return Phase.TORN if written else Phase.ABORTED

    @property
    def _session(self) -> str:
        return self._offer.session

    def _awaited(self) -> str:
        return f"sender ({self.offer.sender})" if self.offer else "the sender"

    def _hint(self) -> str:
        return "" if self.offer else f"; this engine is at refit {self._hello.number}"
