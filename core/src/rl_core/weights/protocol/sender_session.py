"""The sender's state machine: one refit to any number of receivers, all or none."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from rl_core.errors import ManifestMismatchError, RefitAborted, RefitPeerError, RefitProtocolError
from rl_core.weights.protocol import messages
from rl_core.weights.protocol.session import (
    IN_STEP_AGAIN,
    Confirm,
    Effect,
    MakePlan,
    Pack,
    Phase,
    Send,
    Session,
    describe,
    peer_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_core.errors import RLError

__all__ = ["SenderSession"]

#: Connections that may have an offer and no answer yet, for each receiver that is wanted: those
#: of earlier refits that are still on the way, and those that replay another one's Hello.
_OFFERS = 32


@dataclass
class _Peer:
    hello: messages.Hello
    #: Among who takes part; None before that.
    number: int | None = None
    #: The phases in which the peer did its part.
    did: set[Phase] = field(default_factory=set)
    ready: messages.Ready | None = None
    loaded: int = 0

    @property
    def name(self) -> str:
        number = "" if self.number is None else f" {self.number}"
        return f"receiver{number} ({self.hello.name}, pid {self.hello.pid})"


class SenderSession(Session):
    """One refit, seen from the trainer.

    The job calls :meth:`receive` with what arrives, performs the effects, and answers
    ``MakePlan`` with :meth:`planned`, ``Pack`` with :meth:`packed` and ``Confirm`` with
    :meth:`confirmed`.

    A connection that sends a Hello gets the offer; one that answers Ready takes part. A Hello
    proves nothing: its connection may be closed by now, or it may be a replay of somebody else's.
    A Ready answers this very offer.
    """

    #: What may arrive in each phase from who takes part. ``Failed`` is legal in all of them; a
    #: ``Hello`` after DISCOVER means the next refit and is repeated; all else ends the session.
    TABLE: ClassVar[dict[tuple[Phase, type], str]] = {
        (Phase.DISCOVER, messages.Ready): "_on_ready",  # all ready     -> PREPARE
        (Phase.PREPARE, messages.Prepared): "_on_prepared",  # all prepared  -> TRANSFER
        (Phase.TRANSFER, messages.Loaded): "_on_loaded",  # all loaded    -> SEAL
        (Phase.SEAL, messages.Sealed): "_on_sealed",  # all sealed    -> COMMIT
        (Phase.COMMIT, messages.Done): "_on_done",  # all done      -> COMMITTED
    }

    def __init__(
        self,
        offer: messages.Offer,
        *,
        number: int,
        receivers: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(deadline_s, clock)
        self.offer = offer
        self._number = number
        self._receivers = receivers
        self._offered: dict[str, _Peer] = {}
        self._peers: dict[str, _Peer] = {}
        self._noise = ""
        self._buckets: int | None = None  # once there is a plan
        self._window = 0
        self._packed = 0
        self._packing = False
        self._confirmed = False

    @property
    def peers(self) -> dict[str, messages.Hello]:
        """Who takes part, by connection."""
        return {key: peer.hello for key, peer in self._peers.items()}

    @property
    def connections(self) -> list[str]:
        """Those of who takes part, and of who may yet."""
        return [*self._peers, *self._offered]

    # -- what happens -----------------------------------------------------------------------------

    def receive(self, key: str, message: messages.Hello | messages.FromReceiver) -> list[Effect]:
        """Takes one message from the connection ``key``."""
        if self.phase.terminal:
            return []
        if isinstance(message, messages.Hello):
            return self._on_hello(key, message)
        peer = self._peers.get(key) or self._offered.get(key)
        if peer is None:
            return []
        if message.session != self.offer.session:
            return self._break(peer, f"{type(message).__name__} of another session")
        if isinstance(message, messages.Failed):
            self._peers.pop(key, None)
            self._offered.pop(key, None)
            return self.fail(self._reported(peer, message))
        handler = self.TABLE.get((self.phase, type(message)))
        if handler is None or self.phase in peer.did:
            return self._break(peer, f"{type(message).__name__} out of order")
        effects: list[Effect] = self._admit(key, peer) if key in self._offered else []
        if key in self._peers:
            effects += getattr(self, handler)(peer, message)
        return effects

    def planned(
        self, prepares: Mapping[str, messages.Prepare], buckets: int, window: int
    ) -> list[Effect]:
        """The plan is made, of so many buckets, and its lane exists; what each receiver gets."""
        if self.phase.terminal:
            return []
        self._buckets, self._window = buckets, window
        return [Send(prepare, key) for key, prepare in prepares.items()]

    def packed(self, index: int, digests: bytes) -> list[Effect]:
        """A bucket lies in the lane."""
        if self.phase.terminal:
            return []
        self._packing = False
        self._packed += 1
        return [Send(messages.BucketReady(self.offer.session, index, digests)), *self._advance()]

    def confirmed(self, digests: Mapping[str, str]) -> list[Effect]:
        """All that was sent is of one state; the digest of what each receiver keeps of it."""
        if self.phase.terminal:
            return []
        self._confirmed = True
        session = self.offer.session
        return [Send(messages.Seal(session, digest), key) for key, digest in digests.items()]

    def lost(self, key: str) -> list[Effect]:
        """A connection was lost; the session fails if its peer takes part and was not done."""
        self._offered.pop(key, None)
        peer = self._peers.get(key)
        if peer is None or self.phase.terminal or Phase.COMMIT in peer.did:
            return []
        del self._peers[key]
        return self.fail(
            RefitPeerError(
                f"{self.where}: {peer.name} closed its connection",
                fix="build that engine again; the others need no restart for the next refit",
                peer=peer.name,
            )
        )

    def corrupted(self, key: str, error: RefitProtocolError) -> list[Effect]:
        """A frame that could not be read came from ``key``: from who takes part, that is the end.

        An offer to another connection is withdrawn: its peer is not the one that it claimed to be.
        """
        peer = self._peers.get(key)
        if peer is None:
            self._offered.pop(key, None)
            self._noise = str(error).splitlines()[0]
            return [Send(self._abort(error), key)]
        error.details["peer"] = peer.name
        return self.fail(error)

    def fail(self, error: BaseException) -> list[Effect]:
        """See :meth:`Session.fail`. After COMMIT the version counts all the same."""
        if self.phase.terminal:
            return []
        if self.phase is Phase.COMMIT:
            self._end(Phase.COMMITTED, error)
            return []
        written = self._packed and self.offer.isolation == "quiesced"
        self._end(Phase.TORN if written else Phase.ABORTED, error)
        assert self.error is not None
        return [Send(self._abort(self.error))]

    # -- handlers, in the order of the phases -----------------------------------------------------

    def _on_hello(self, key: str, hello: messages.Hello) -> list[Effect]:
        if self.phase is not Phase.DISCOVER or key in self._peers or key in self._offered:
            return []
        if hello.number != self._number:
            self._noise = (
                f"{hello.name}, pid {hello.pid}, is at refit {hello.number} and the trainer at "
                f"refit {self._number}"
            )
            if hello.number > self._number:
                return []  # it waits for its turn
            error = RefitAborted(f"{self.phase}: {self._noise}", fix=IN_STEP_AGAIN)
            return [Send(self._abort(error), key)]
        if len(self._peers) == self._receivers:
            return self._dismiss(key, self._full)
        if len(self._offered) >= _OFFERS * self._receivers:
            del self._offered[next(iter(self._offered))]
        self._offered[key] = _Peer(hello)
        return [Send(self.offer, key)]

    def _admit(self, key: str, peer: _Peer) -> list[Effect]:
        """Admits a ready receiver; this connection replaces an earlier one of that receiver."""
        del self._offered[key]
        ours = [k for k, p in self._peers.items() if p.hello.receiver == peer.hello.receiver]
        replaced: list[Effect] = []
        for old in ours:
            del self._peers[old]
            replaced += self._dismiss(old, "the receiver has opened another connection")
        if len(self._peers) == self._receivers:
            return self._dismiss(key, self._full)
        taken = {other.number for other in self._peers.values()}
        peer.number = next(number for number in range(self._receivers) if number not in taken)
        self._peers[key] = peer
        return replaced

    def _dismiss(self, key: str, why: str) -> list[Effect]:
        return [Send(self._abort(RefitProtocolError(f"{self.phase}: {why}")), key)]

    def _on_ready(self, peer: _Peer, message: messages.Ready) -> list[Effect]:
        if any(p.ready and p.ready.dtypes != message.dtypes for p in self._peers.values()):
            return self.fail(
                ManifestMismatchError(
                    f"{peer.name} wants other dtypes than the other receivers",
                    fix="give all engines of one refit the same dtype",
                    peer=peer.name,
                )
            )
        peer.ready = message
        if not self._all_did(peer):
            return []
        late = [effect for key in self._offered for effect in self._dismiss(key, self._full)]
        self._offered.clear()
        self._enter(Phase.PREPARE)
        everybody = {key: p.ready for key, p in self._peers.items() if p.ready is not None}
        return [*late, MakePlan(everybody)]

    def _on_prepared(self, peer: _Peer, _: messages.Prepared) -> list[Effect]:
        if self._buckets is None:
            return self._break(peer, "Prepared before it got the plan")
        if not self._all_did(peer):
            return []
        self._enter(Phase.TRANSFER)
        return self._advance()

    def _on_loaded(self, peer: _Peer, message: messages.Loaded) -> list[Effect]:
        if message.index != peer.loaded or message.index >= self._packed:
            return self._break(peer, f"Loaded({message.index}), expected Loaded({peer.loaded})")
        peer.loaded += 1
        return self._advance()

    def _on_sealed(self, peer: _Peer, _: messages.Sealed) -> list[Effect]:
        if not self._confirmed:
            return self._break(peer, "Sealed before it got the Seal")
        if not self._all_did(peer):
            return []
        self._enter(Phase.COMMIT)
        return [Send(messages.Commit(self.offer.session))]

    def _on_done(self, peer: _Peer, _: messages.Done) -> list[Effect]:
        if self._all_did(peer):
            self._end(Phase.COMMITTED)
        return []

    # -- helpers ----------------------------------------------------------------------------------

    def _advance(self) -> list[Effect]:
        """Packs the next bucket once there is room for it; seals when all are loaded."""
        slowest = min(peer.loaded for peer in self._peers.values())
        if slowest == self._buckets:
            self._enter(Phase.SEAL)
            return [Confirm()]
        room = self._packed - slowest < self._window
        if self._packing or self._packed == self._buckets or not room:
            return []
        self._packing = True
        return [Pack(self._packed)]

    def _all_did(self, peer: _Peer) -> bool:
        peer.did.add(self.phase)
        peers = self._peers.values()
        return len(peers) == self._receivers and all(self.phase in p.did for p in peers)

    def _abort(self, error: BaseException) -> messages.Abort:
        return messages.Abort(self.offer.session, *describe(error))

    def _break(self, peer: _Peer, what: str) -> list[Effect]:
        return self._refuse(f"{peer.name} sent {what}", peer.name)

    def _reported(self, peer: _Peer, message: messages.Failed) -> RLError:
        """The error behind a failure.

        A receiver that timed out on us was really waiting for the late peers.
        """
        late = self._late()
        if message.kind == RefitPeerError.__name__ and late:
            return RefitPeerError(
                f"{self.phase}: {peer.name} gave up waiting for {late}",
                fix=f"look at the log of {late}; raise deadline_s if the model is large",
                peer=late,
            )
        return peer_error(
            message.kind,
            f"{peer.name} failed: {message.message}",
            phase=self.phase.value,
            peer=peer.name,
            cause=message.kind,
        )

    def _awaited(self) -> str:
        missing = self._receivers - len(self._peers)
        if not missing:
            return self._late() or "the weight source"
        who = [peer.name for peer in self._offered.values()]
        if absent := max(0, missing - len(who)):
            who.append(f"{absent} of {self._receivers} receivers")
        return ", ".join(who)

    def _hint(self) -> str:
        return f"; meanwhile: {self._noise}" if self._noise else ""

    @property
    def _full(self) -> str:
        return f"this refit already has all of its receivers ({self._receivers})"

    def _late(self) -> str:
        """Who takes part and has not done what is due in this phase."""
        loading, packed = self.phase is Phase.TRANSFER, self._packed
        return ", ".join(
            peer.name
            for peer in self._peers.values()
            if (peer.loaded < packed if loading else self.phase not in peer.did)
        )
