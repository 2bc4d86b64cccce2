"""What may arrive from outside, wrong in every way that bytes can choose.

:func:`one_input` turns bytes into one attempt at something that reads what others wrote: frames,
the sessions and endpoints behind them, ``prepare_refit_info`` dicts, handles, references to
memory. It raises :class:`Finding` unless that ends as it may: with a result, or an error of ours.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from refit_doubles import DictSink, DictSource

from rl_core.errors import RefitProtocolError, RLError
from rl_core.interfaces import TensorSpec
from rl_core.refit import RefitReceiver, RefitSender, SendOptions, WeightManifest
from rl_core.refit import messages as m
from rl_core.refit.plan import make_plan
from rl_core.refit.receiving import Receiving
from rl_core.refit.sending import Sending
from rl_core.refit.session import (
    Attach,
    Confirm,
    Effect,
    Install,
    Load,
    MakePlan,
    Pack,
    Phase,
    Publish,
    ReceiverSession,
    Send,
    SenderSession,
)
from rl_core.refit.transports.base import NoLane
from rl_core.refit.transports.ipc import IPC
from rl_core.refit.transports.memory import SharedRegion

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

T = TypeVar("T")

TOKEN, BUCKET, SESSION = "token", 64, "session"
TENSORS = {"a": torch.arange(40.0), "b": torch.ones(3, 2), "c": torch.tensor(1.5)}
SPECS = [TensorSpec(name, tuple(t.shape), "float32") for name, t in TENSORS.items()]
MANIFEST = WeightManifest(tuple(SPECS))
PLAN = make_plan(MANIFEST, BUCKET)
DIGESTS = [bytes(16 * len(bucket.segments)) for bucket in PLAN.buckets]
OFFER = m.Offer(SESSION, m.PROTOCOL, "trainer", 1, MANIFEST.digest, "none", "quiesced", False, {})
PREPARE = m.Prepare(SESSION, PLAN.digest, BUCKET, len(PLAN.buckets), False, b"", {"at": 1}, 60.0)
FROM_SENDER: list[Any] = [
    OFFER,
    PREPARE,
    *(m.BucketReady(SESSION, index, found) for index, found in enumerate(DIGESTS)),
    m.Seal(SESSION, ""),
    m.Commit(SESSION, 1),
    m.Abort(SESSION, "RefitError", "enough"),
]
FROM_RECEIVER: list[Any] = [
    m.Hello(m.PROTOCOL, "id", "engine", 1),
    m.Ready(SESSION, MANIFEST.digest, {}, b"", ("gpu",)),
    m.Prepared(SESSION, PLAN.digest),
    *(m.Loaded(SESSION, index) for index in range(len(PLAN.buckets))),
    m.Sealed(SESSION, ""),
    m.Done(SESSION, 1),
    m.Failed(SESSION, "RefitError", "enough", True),
]
HANDLES = m.Handles(SESSION, MANIFEST.digest, 1, ("a", "c"), {"at": 1}, bytes(64))
SENDERS = m.Codec[Any](m.FromSender, TOKEN)
RECEIVERS = m.Codec[Any](m.FromReceiver, TOKEN)
AWKWARD: list[Any] = [
    None, True, -1, 0, 1, 2, 63, 64, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1,
    0.5, -0.0, float("nan"), float("inf"), 1e308, "", "a", "b", "float32", "bfloat16", "int8",
    "staged", "installed", "wire", "\0", "\ud7ff", "x" * 5000, "/", "..", "/dev/null", b"", b"\0",
    bytes(48), [], [[]], ["a", "a"], [0, -1], {}, {"a": "bfloat16"}, {"": 1}, {1: 2},
    [[[[[[[[[[[[]]]]]]]]]]]],
]  # fmt: skip


class Finding(AssertionError):
    """Something ended as it may not."""


class Choices:
    """Decisions that bytes make, one after the other; all are the first once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, count: int) -> int:
        taken = self._data[self._at : self._at + 2]
        self._at += 2
        return int.from_bytes(taken, "little") % count

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def once_in(self, count: int) -> bool:
        return self.below(count) == count - 1

    def rest(self) -> bytes:
        taken, self._at = self._data[self._at :], len(self._data)
        return taken


# -- wrong in every way ----------------------------------------------------------------------------


def plain(choices: Choices, value: Any) -> Any:
    """Plain data that differs from ``value`` somewhere, mostly in one place."""
    if choices.once_in(12):
        return choices.one_of(AWKWARD)
    match value:
        case dict() if value:
            key = choices.one_of(list(value))
            others = {k: v for k, v in value.items() if k != key}
            match choices.below(10):
                case 0:
                    return others
                case 1:
                    return others | {choices.one_of(["x", "", "type"]): value[key]}
                case _:
                    return others | {key: plain(choices, value[key])}
        case list() if value:
            at = choices.below(len(value))
            changed = plain(choices, value[at])
            between = choices.one_of([[changed], [changed], [changed, value[at]], []])
            return [*value[:at], *between, *value[at + 1 :]]
        case bool():
            return not value
        case int() | float():
            return value + choices.one_of([-1, 1, 64, 1 << 32])
        case str() | bytes():
            return choices.one_of([v for v in AWKWARD if type(v) is type(value)])
    return choices.one_of(AWKWARD)


def bent(choices: Choices, body: bytes) -> bytes:
    """Bytes that differ from ``body`` somewhere."""
    at = choices.below(len(body) + 1)
    match choices.below(5):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + bytes([choices.below(256)]) + body[at + 1 :]
        case 2:
            return (
                body[:at] + choices.one_of([b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc4"]) + body[at:]
            )
        case 3:
            return choices.one_of([b"\x91", b"\x81"]) * choices.below(3000) + body[at:]
        case _:
            return choices.rest()


def frame(choices: Choices, codec: m.Codec[Any], samples: Sequence[Any]) -> bytes:
    """A frame, mostly of a message that is wrong, mostly signed with the right key."""
    message = choices.one_of(samples)
    if choices.once_in(8):
        return codec.encode(message)
    told = msgspec.to_builtins(message, builtin_types=(bytes,))
    try:
        body = msgspec.msgpack.encode(plain(choices, told))
    except (OverflowError, UnicodeEncodeError):
        body = b""
    if choices.once_in(5):
        body = bent(choices, body)
    signed = codec._code(body) + body
    return bent(choices, signed) if choices.once_in(8) else signed


def decoded(frame: bytes, codec: m.Codec[Any], seen: Counter[str]) -> Any:
    """The message, or None if it is refused as it may be."""
    try:
        message = codec.decode(frame)
    except RefitProtocolError:
        seen["refused"] += 1
        return None
    seen[f"read {type(message).__name__}"] += 1
    return message


# -- who reads it ----------------------------------------------------------------------------------


def receiver_session(choices: Choices, seen: Counter[str]) -> None:
    session = ReceiverSession(
        FROM_RECEIVER[0], manifest=MANIFEST.digest, dtypes={}, deadline_s=60.0
    )
    perform(session, session.start())
    for message in script(choices, FROM_SENDER[:-1], SENDERS, FROM_SENDER, seen):
        perform(session, session.receive(message))
    seen[f"receiver {session.phase}"] += 1


def sender_session(choices: Choices, seen: Counter[str]) -> None:
    count = 1 + choices.below(2)
    session = SenderSession(OFFER, receivers=count, deadline_s=60.0)
    for message in script(choices, FROM_RECEIVER[:-1], RECEIVERS, FROM_RECEIVER, seen):
        for key in "ab"[:count]:
            told = message
            if isinstance(message, m.Hello):
                told = msgspec.structs.replace(message, receiver=message.receiver + key)
            if choices.once_in(40):
                perform(session, session.forget(key))
            perform(session, session.receive(key, told))
    seen[f"sender {session.phase}"] += 1


def script(
    choices: Choices,
    right: Sequence[Any],
    codec: m.Codec[Any],
    samples: Sequence[Any],
    seen: Counter[str],
) -> list[Any]:
    """A right conversation in which some messages are not, or come when they should not."""
    told = list(right)
    for _ in range(1 + choices.below(2)):
        at, instead = choices.below(len(told)), choices.below(3)
        wrong = decoded(frame(choices, codec, [told[at]] if instead else samples), codec, seen)
        if wrong is not None:
            told[at : at + 1] = [wrong] if instead else [wrong, told[at]]
    return told


def perform(session: Any, effects: list[Effect]) -> None:
    """Answers every effect as an endpoint does that never fails."""
    if session.error is not None and not isinstance(session.error, RLError):
        raise Finding(f"an error that is not ours: {session.error!r}")
    if session.phase in (Phase.ABORTED, Phase.TORN) and session.error is None:
        raise Finding("a failure without an error")
    for effect in effects:
        match effect:
            case Send(message):
                SENDERS.encode(message)
                following: list[Effect] = []
            case MakePlan():
                following = session.planned(PREPARE, 2)
            case Pack(index):
                following = session.packed(index, DIGESTS[index])
            case Confirm():
                following = session.confirmed("")
            case Attach():
                following = session.attached(PLAN.digest)
            case Load(index):
                session.touch()
                following = session.loaded(index)
            case Install(_, digest):
                following = session.installed(digest)
            case Publish():
                following = session.published()
            case _:
                following = []
        perform(session, following)


class Bytes(NoLane):
    def __init__(self) -> None:
        self.data, self.ref = torch.zeros(4096, dtype=torch.uint8), {"at": 1}


class Line:
    """Both ends of a line on which only these frames come; then its job is given up."""

    reads_memory = False
    job: Any

    def __init__(self, frames: list[bytes]) -> None:
        self.frames = frames
        self._pause = True

    def receive(self, timeout_s: float) -> Any:
        self._pause = not self._pause
        if self._pause and isinstance(self.job, Receiving):
            return None  # it loads what came before
        frame = self.frames.pop(0) if self.frames else None
        if frame is None:
            self.job.cancelled = "nothing more comes"
        if isinstance(self.job, Receiving):
            return frame
        return [] if frame is None else [("key", frame)]

    def send(self, *_: object) -> bool:
        return True

    def departed(self) -> list[str]:
        return []

    def lost(self) -> bool:
        return False

    def place(self, device: torch.device, _: object) -> torch.device:
        return device

    def lane(self, *_: object) -> Bytes:
        return Bytes()

    attach = lane

    def connect(self) -> None:
        """It always is."""

    disconnect = connect


def frames(
    choices: Choices, codec: m.Codec[Any], right: Sequence[Any], samples: Sequence[Any]
) -> list[bytes]:
    told = [codec.encode(message) for message in right]
    at, instead = choices.below(len(told)), choices.below(3)
    wrong = frame(choices, codec, [right[at]] if instead else samples)
    told[at : at + 1] = [wrong] if instead else [wrong, told[at]]
    return told


def engine(line: Any = None) -> RefitReceiver:
    """One that knows the trainer, and reaches it by this line."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    sink = DictSink(tensors)
    receiver = RefitReceiver(lambda: sink, name="engine", lock=threading.RLock())
    receiver.prepare(info())
    receiver._ends["ipc"] = (receiver._known_trainer().channels["ipc"], line)
    met: concurrent.futures.Future[None] = concurrent.futures.Future()
    met.set_result(None)
    receiver._meetings[line] = met
    return receiver


def info() -> dict[str, Any]:
    return {
        "protocol": m.PROTOCOL,
        "digest": MANIFEST.digest,
        "tensors": [dict(tensor) for tensor in MANIFEST.info],
        "token": TOKEN,
        "channels": {"ipc": {"endpoint": "ipc:///nowhere/rl-refit-0/socket"}},
    }


def receiver_job(choices: Choices, seen: Counter[str]) -> None:
    line = Line(frames(choices, SENDERS, FROM_SENDER[:-1], FROM_SENDER))
    receiver = engine(line)
    line.job = job = Receiving(receiver, "ipc", receiver._known_trainer(), 60.0)
    ends_typed("receiver's refit", job.refit, seen)
    if receiver.lock._is_owned():  # type: ignore[attr-defined]
        raise Finding("the engine stays locked")
    if receiver.torn != (job.session.phase is Phase.TORN):
        raise Finding(f"{job.session.phase} and torn={receiver.torn}")


def sender_job(choices: Choices, seen: Counter[str]) -> None:
    sender = RefitSender(lambda: DictSource(TENSORS), name="trainer")
    sender.token = TOKEN
    options = SendOptions(bucket_bytes=BUCKET, verify="none", mode="packed")
    line = Line([])
    line.job = job = Sending(sender, line, DictSource(TENSORS), options, 1)
    right = [
        msgspec.structs.replace(message, session=job.session.offer.session)
        if hasattr(message, "session")
        else message
        for message in FROM_RECEIVER
    ]
    line.frames = frames(choices, RECEIVERS, right[:-1], right)
    ends_typed("sender's refit", job.refit, seen)


def prepare(choices: Choices, seen: Counter[str]) -> None:
    given = plain(choices, info())
    if isinstance(given, dict) and choices.below(2):
        try:
            tensors = msgspec.convert(given.get("tensors"), tuple[TensorSpec, ...])
            given["digest"] = WeightManifest(tensors).digest
        except (msgspec.ValidationError, RLError):
            pass  # it is refused for that
    ends_typed("prepare", lambda: engine().prepare(given), seen)


def address(choices: Choices, seen: Counter[str]) -> None:
    endpoint = choices.one_of(["ipc://", "", "tcp://"]) + choices.one_of(
        [text for text in AWKWARD if isinstance(text, str)]
    )
    given = {"endpoint": endpoint} if choices.below(2) else plain(choices, {"endpoint": endpoint})

    def use() -> None:
        end = IPC.receiver(given)
        try:
            end.connect()
        finally:
            end.close()

    ends_typed("address", use, seen)


def handles(choices: Choices, seen: Counter[str]) -> None:
    codec = m.Codec[Any](m.Handles, TOKEN)
    given: Any = {"protocol": m.PROTOCOL, "frame": frame(choices, codec, [HANDLES])}
    if choices.once_in(4):
        given = plain(choices, given)
    receiver = engine(Line([]))
    ends_typed("handles", lambda: receiver.load_handles(given), seen)


@cache
def region() -> SharedRegion:
    return SharedRegion.create(4096, "/nowhere")


def reference(choices: Choices, seen: Counter[str]) -> None:
    given = plain(choices, dict(region().ref))
    ends_typed("reference", lambda: SharedRegion.attach(given).close(), seen)


def ends_typed(what: str, call: Callable[[], object], seen: Counter[str]) -> None:
    """Runs what may only succeed, or raise an error of ours."""
    try:
        call()
    except RLError as error:
        if type(error.__cause__) in (AssertionError, KeyError, IndexError, AttributeError):
            raise Finding(f"{what}: a mistake of ours behind {error!r}") from error
        seen[f"{what}: {type(error).__name__}"] += 1
    else:
        seen[f"{what}: done"] += 1


#: What reads, and how often it is tried.
TARGETS = (
    [receiver_session] * 20 + [sender_session] * 20 + [prepare] * 8 + [reference] * 8
    + [handles] * 4 + [receiver_job] * 2 + [sender_job] * 2
    + [address]
)  # fmt: skip


def one_input(data: bytes, seen: Counter[str]) -> None:
    """One attempt; raises if it ended as it may not."""
    choices = Choices(data)
    choices.one_of(TARGETS)(choices, seen)


def keyed(seed: int, number: int) -> bytes:
    """The input with this number of a run; between 16 and 400 bytes."""
    digest = hashlib.shake_128(f"{seed}/{number}".encode())
    return digest.digest(16 + int.from_bytes(digest.digest(2), "little") % 385)
