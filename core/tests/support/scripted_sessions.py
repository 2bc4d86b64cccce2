"""Both state machines of a refit, brought to any state on the way of one that goes well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_core.weights.protocol.messages import (
    Abort,
    BucketReady,
    Commit,
    Done,
    Failed,
    FromReceiver,
    FromSender,
    Hello,
    Loaded,
    Offer,
    Prepare,
    Prepared,
    Ready,
    Seal,
    Sealed,
)
from rl_core.weights.protocol.receiver_session import ReceiverSession
from rl_core.weights.protocol.sender_session import SenderSession
from rl_core.weights.protocol.session import (
    Attach,
    Confirm,
    Effect,
    Install,
    Load,
    MakePlan,
    Pack,
    Phase,
    Publish,
    Send,
)

if TYPE_CHECKING:
    from collections.abc import Callable

S, DEADLINE_S = "this", 60.0
OFFER = Offer(S, "trainer", 1, "manifest", "wire", "quiesced", False, {})
READY = Ready(S, {}, b"", ())
SEAL = Seal(S, "digest")
PREPARE = Prepare(S, 64, False, {}, {}, DEADLINE_S)
HELLOS = [Hello(f"id{i}", "engine", 100 + i, bytes([i]) * 16, 1) for i in range(3)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def new_receiver(**options: Any) -> ReceiverSession:
    return ReceiverSession(
        HELLOS[0],
        **{"manifest": "manifest", "ready": lambda _: READY, "deadline_s": DEADLINE_S} | options,
    )


def new_sender(offer: Offer = OFFER, receivers: int = 2, **options: Any) -> SenderSession:
    return SenderSession(
        offer, receivers=receivers, **{"number": 1, "deadline_s": DEADLINE_S} | options
    )


# -- one refit that goes well, step by step --------------------------------------------------------

Step = tuple[str, "Callable[[Any], list[Effect]]", Phase, list[Effect]]


def loads(index: int) -> Callable[[ReceiverSession], list[Effect]]:
    def step(receiver: ReceiverSession) -> list[Effect]:
        receiver.mark_torn()
        return receiver.loaded(index)

    return step


def hears(message: FromSender) -> Callable[[ReceiverSession], list[Effect]]:
    return lambda receiver: receiver.receive(message)


def says(number: int, message: Hello | FromReceiver) -> Callable[[SenderSession], list[Effect]]:
    return lambda sender: sender.receive(f"p{number}", message)


def announced(index: int) -> list[Effect]:
    return [Load(index, b"digests")]


def sent(index: int) -> Send:
    return Send(BucketReady(S, index, b"digests"))


def planned(sender: SenderSession, buckets: int = 2) -> list[Effect]:
    return sender.planned({"p0": PREPARE, "p1": PREPARE}, buckets, 2)


def confirmed(sender: SenderSession) -> list[Effect]:
    return sender.confirmed({"p0": "digest", "p1": "digest"})


RECEIVER: list[Step] = [
    ("discover", lambda r: r.start(), Phase.DISCOVER, [Send(HELLOS[0])]),
    ("ready", hears(OFFER), Phase.PREPARE, [Send(READY)]),
    ("attaching", hears(PREPARE), Phase.PREPARE, [Attach(PREPARE, OFFER)]),
    ("prepared", lambda r: r.attached({0: 2}), Phase.TRANSFER, [Send(Prepared(S))]),
    ("first comes", hears(BucketReady(S, 0, b"digests")), Phase.TRANSFER, announced(0)),
    ("first loaded", loads(0), Phase.TRANSFER, [Send(Loaded(S, 0))]),
    ("second comes", hears(BucketReady(S, 1, b"digests")), Phase.TRANSFER, announced(1)),
    ("all loaded", loads(1), Phase.TRANSFER, [Send(Loaded(S, 1))]),
    ("installing", hears(Seal(S, "digest")), Phase.SEAL, [Install(OFFER, "digest")]),
    ("sealed", lambda r: r.installed(), Phase.COMMIT, [Send(Sealed(S))]),
    ("publishing", hears(Commit(S)), Phase.COMMIT, [Publish(1)]),
    ("committed", lambda r: r.published(), Phase.COMMITTED, [Send(Done(S))]),
]  # fmt: skip
SENDER: list[Step] = [
    ("nobody", lambda s: s.tick(), Phase.DISCOVER, []),
    ("p0 there", says(0, HELLOS[0]), Phase.DISCOVER, [Send(OFFER, "p0")]),
    ("all there", says(1, HELLOS[1]), Phase.DISCOVER, [Send(OFFER, "p1")]),
    ("p0 ready", says(0, READY), Phase.DISCOVER, []),
    ("planning", says(1, READY), Phase.PREPARE, [MakePlan({"p0": READY, "p1": READY})]),
    ("planned", planned, Phase.PREPARE, [Send(PREPARE, "p0"), Send(PREPARE, "p1")]),
    ("p0 prepared", says(0, Prepared(S)), Phase.PREPARE, []),
    ("packing", says(1, Prepared(S)), Phase.TRANSFER, [Pack(0)]),
    ("first sent", lambda s: s.packed(0, b"digests"), Phase.TRANSFER, [sent(0), Pack(1)]),
    ("both sent", lambda s: s.packed(1, b"digests"), Phase.TRANSFER, [sent(1)]),
    ("p0 loaded one", says(0, Loaded(S, 0)), Phase.TRANSFER, []),
    ("p0 loaded both", says(0, Loaded(S, 1)), Phase.TRANSFER, []),
    ("p1 loaded one", says(1, Loaded(S, 0)), Phase.TRANSFER, []),
    ("confirming", says(1, Loaded(S, 1)), Phase.SEAL, [Confirm()]),
    ("sealing", confirmed, Phase.SEAL, [Send(SEAL, "p0"), Send(SEAL, "p1")]),
    ("p0 sealed", says(0, Sealed(S)), Phase.SEAL, []),
    ("committing", says(1, Sealed(S)), Phase.COMMIT, [Send(Commit(S))]),
    ("p0 done", says(0, Done(S)), Phase.COMMIT, []),
    ("committed", says(1, Done(S)), Phase.COMMITTED, []),
]  # fmt: skip


def brought(session: Any, path: list[Step], state: str) -> Any:
    """The session, brought to a state; everything on the way is as the path says."""
    for name, step, phase, effects in path:
        assert step(session) == effects
        assert session.phase is phase
        if name == state:
            return session
    raise AssertionError(f"no such state: {state}")


def receiver_at(state: str, **options: Any) -> ReceiverSession:
    receiver: ReceiverSession = brought(new_receiver(**options), RECEIVER, state)
    return receiver


def sender_at(state: str, **options: Any) -> SenderSession:
    sender: SenderSession = brought(new_sender(**options), SENDER, state)
    return sender


def states(path: list[Step]) -> list[str]:
    return [name for name, *_ in path]


FROM_SENDER: list[FromSender] = [
    OFFER, PREPARE, *(BucketReady(S, index, b"digests") for index in range(3)),
    Seal(S, "digest"), Commit(S), Abort(S, "RefitError", "why"),
]  # fmt: skip
FROM_RECEIVER: list[FromReceiver] = [
    READY, Prepared(S), *(Loaded(S, index) for index in range(3)),
    Sealed(S), Done(S),
    Failed(S, "RefitCorrupted", "why", True),
]  # fmt: skip


def failed(session: Any) -> list[Effect]:
    """What a receiver says when it fails."""
    kind, text = type(session.error).__name__, str(session.error)
    return [Send(Failed(S, kind, text, session.phase is Phase.TORN))]
