"""What may arrive from outside, wrong in every way that bytes can choose.

:func:`one_input` turns bytes into one attempt at something that reads what others wrote: frames,
the sessions and endpoints behind them, ``prepare_refit_info`` dicts, references to
memory. It raises :class:`Finding` unless that ends as it may: with a result, or an error of ours.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import msgspec
import torch
from fuzz_choices import AWKWARD, Choices, bent, plain

from rl_backends import rank_job as _rank_job
from rl_backends.rank_job import RankJob
from rl_backends.tensors import NamedTensorSink, NamedTensorSource, tensor_specs
from rl_core.errors import RefitPeerError, RefitProtocolError, RLError
from rl_core.interfaces import TensorSpec
from rl_core.weights import RefitReceiver, RefitSender, SendOptions, WeightManifest
from rl_core.weights.connections import Connection
from rl_core.weights.data.parts import Partition
from rl_core.weights.data.plan import DataMode, make_plan
from rl_core.weights.protocol import frames
from rl_core.weights.protocol import messages as m
from rl_core.weights.protocol import session as of
from rl_core.weights.protocol.rank_session import RankSession
from rl_core.weights.protocol.receiver_session import ReceiverSession
from rl_core.weights.protocol.sender_session import SenderSession
from rl_core.weights.receiving.receiver import ReceiveJob
from rl_core.weights.sending import send_job as _send_job
from rl_core.weights.sending.send_job import SendJob
from rl_core.weights.transports.base import NoLane
from rl_core.weights.transports.ipc import IPC
from rl_core.weights.transports.memory import SharedRegion

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

T = TypeVar("T")

TOKEN, NONCE, BUCKET, SESSION = "token", b"n" * 16, 64, "session"
TENSORS = {"a": torch.arange(40.0), "b": torch.ones(3, 2), "c": torch.tensor(1.5)}
SPECS = tensor_specs(TENSORS)
MANIFEST = WeightManifest(tuple(SPECS))
PLAN = make_plan(Partition(MANIFEST), BUCKET, DataMode.PACKED)
DIGESTS = [bytes(16 * len(bucket.segments)) for bucket in PLAN.buckets]
OFFER = m.Offer(SESSION, "trainer", 1, MANIFEST.digest, "none", "quiesced", False, {})
LANES = {0: m.LaneInfo(PLAN.digest, b"", {"at": 1})}
PREPARE = m.Prepare(SESSION, BUCKET, False, {}, LANES, 60.0)
FROM_SENDER: list[Any] = [
    OFFER,
    PREPARE,
    *(m.BucketReady(SESSION, index, found) for index, found in enumerate(DIGESTS)),
    m.Seal(SESSION, ""),
    m.Commit(SESSION),
    m.Abort(SESSION, "RefitError", "enough"),
]
FROM_RECEIVER: list[Any] = [
    m.Hello("id", "engine", 1, NONCE, 1),
    m.Ready(SESSION, {}, b"", ("gpu",)),
    m.Prepared(SESSION),
    *(m.Loaded(SESSION, index) for index in range(len(PLAN.buckets))),
    m.Sealed(SESSION),
    m.Done(SESSION),
    m.Failed(SESSION, "RefitError", "enough", True),
]
#: The other rank of a trainer of two: what rank 0 sends it, and what it answers.
LANES_OF_TWO = dict.fromkeys((0, 1), LANES[0])
ALL = bytes([1] * len(MANIFEST.owned))
TO_RANK: list[Any] = [
    OFFER,
    m.HashParts(SESSION, {}, {}, ALL, BUCKET, "xxh3", True, TOKEN),
    m.PrepareRank(
        SESSION, {}, {}, b"", ALL, BUCKET, False, "xxh3", TOKEN, "ipc", {}, {"id": b""}, ((),)
    ),
    *(m.PackBucket(SESSION, index) for index in range(len(PLAN.buckets))),
    m.ConfirmRank(SESSION),
    m.Over(SESSION, {"version": 1}),
]
OF_RANK: list[Any] = [
    m.Hello("", "rank 1 of 2", 1, NONCE, 1, 1),
    m.RankReady(SESSION, 0, {}, 1, "host"),
    m.PartsHashed(SESSION, bytes(16 * len(ALL))),
    m.RankPrepared(SESSION, PLAN.digest),
    *(m.BucketPacked(SESSION, index, found) for index, found in enumerate(DIGESTS)),
    m.RankConfirmed(SESSION, 0),
]
#: All that arrives at rank 0 of two, in an order that is right.
OF_BOTH: list[Any] = [
    *FROM_RECEIVER[:2],
    *OF_RANK[:4],
    FROM_RECEIVER[2],
    *(
        message
        for index, packed in enumerate(OF_RANK[4:-1])
        for message in (packed, m.Loaded(SESSION, index), m.Loaded(SESSION, index, 1))
    ),
    OF_RANK[-1],
    *FROM_RECEIVER[-3:-1],
]


class Finding(AssertionError):
    """Something ended as it may not."""


class Author:
    """Signs whatever it is given as somebody who holds the token would, in order."""

    def __init__(self, side: frames.Side) -> None:
        self._channel = frames.Channel(TOKEN, NONCE, side)

    def encode(self, message: object, body: bytes = b"") -> bytes:
        """The next frame: of a message, or of a body in its place."""
        body = body or msgspec.msgpack.encode(message)
        if isinstance(message, m.Hello):
            return frames._hello.sign(body, frames._key(TOKEN, b"hello"), 0)
        channel = self._channel
        kind, key = frames._said_by[channel._side], channel._keys[channel._side]
        signed = kind.sign(body, key, channel._sent)
        channel._sent += 1
        if isinstance(message, m.Offer):
            self.bind(message.session, message.nonce)
        return signed

    def bind(self, session: str, nonce: bytes) -> None:
        """From here on as after an offer."""
        self._channel._bind(session.encode(), nonce)


def frame(choices: Choices, author: Author, samples: Sequence[Any]) -> bytes:
    """A frame, mostly of a message that is wrong, mostly signed with the right key."""
    message = choices.one_of(samples)
    if choices.once_in(8):
        return author.encode(message)
    told = msgspec.to_builtins(message, builtin_types=(bytes,))
    try:
        body = msgspec.msgpack.encode(plain(choices, told))
    except (OverflowError, UnicodeEncodeError):
        body = b""
    if choices.once_in(5):
        body = bent(choices, body)
    signed = author.encode(message, body or b"\0")
    return bent(choices, signed) if choices.once_in(8) else signed


def decoded(frame: bytes, reader: frames.Channel, seen: Counter[str]) -> Any:
    """The message, or None if it is refused as it may be."""
    try:
        message = frames.read_hello(frame, TOKEN) or reader.decode(frame)
    except RefitProtocolError:
        seen["refused"] += 1
        return None
    seen[f"read {type(message).__name__}"] += 1
    return message


# -- who reads it ----------------------------------------------------------------------------------


def receiver_session(choices: Choices, seen: Counter[str]) -> None:
    session = ReceiverSession(
        FROM_RECEIVER[0],
        manifest=MANIFEST.digest,
        ready=lambda _: FROM_RECEIVER[1],
        deadline_s=60.0,
    )
    perform(session, session.start())
    for message in script(choices, FROM_SENDER[:-1], "sender", FROM_SENDER, seen):
        perform(session, session.receive(message))
    seen[f"receiver {session.phase}"] += 1


def sender_session(choices: Choices, seen: Counter[str]) -> None:
    count = 1 + choices.below(2)
    session = SenderSession(OFFER, number=1, receivers=count, deadline_s=60.0)
    for message in script(choices, FROM_RECEIVER[:-1], "receiver", FROM_RECEIVER, seen):
        for key in "ab"[:count]:
            told = message
            if isinstance(message, m.Hello):
                told = msgspec.structs.replace(message, receiver=message.receiver + key)
            if choices.once_in(40):
                perform(session, session.lost(key))
            perform(session, session.receive(key, told))
    seen[f"sender {session.phase}"] += 1


def session_of_two(choices: Choices, seen: Counter[str]) -> None:
    ranks = ["rank 1 of 2"]
    session = SenderSession(OFFER, number=1, receivers=1, deadline_s=60.0, ranks=ranks)
    for message in script(choices, OF_BOTH, "receiver", [*FROM_RECEIVER, *OF_RANK], seen):
        of_rank = isinstance(message, m.FromRank) or bool(getattr(message, "rank", 0))
        key = "ar"[of_rank != choices.once_in(100)]
        if choices.once_in(100):
            perform(session, session.lost_rank(1, RefitPeerError("it has ended", rank=1)))
        perform(session, session.receive(key, message))
    seen[f"of two {session.phase}"] += 1


def rank_session(choices: Choices, seen: Counter[str]) -> None:
    session = RankSession(
        OF_RANK[0],
        leader="rank 0 of 2",
        manifest=MANIFEST.digest,
        failed=None,
        counted=True,
        deadline_s=60.0,
    )
    perform(session, session.start())
    for message in script(choices, TO_RANK, "sender", [*FROM_SENDER, *TO_RANK], seen):
        perform(session, session.receive(message))
    if session.phase is of.Phase.COMMITTED and session.report is None:
        raise Finding("committed without a report")
    seen[f"rank {session.phase}"] += 1


def script(
    choices: Choices,
    right: Sequence[Any],
    side: frames.Side,
    samples: Sequence[Any],
    seen: Counter[str],
) -> list[Any]:
    """A right conversation in which some messages are not, or come when they should not."""
    told = list(right)
    for _ in range(1 + choices.below(2)):
        at, instead = choices.below(len(told)), choices.below(3)
        written = frame(choices, Author(side), [told[at]] if instead else samples)
        other: frames.Side = "receiver" if side == "sender" else "sender"
        wrong = decoded(written, frames.Channel(TOKEN, NONCE, other), seen)
        if wrong is not None:
            told[at : at + 1] = [wrong] if instead else [wrong, told[at]]
    return told


def perform(session: Any, effects: list[of.Effect]) -> None:
    """Answers every effect as an endpoint does that never fails."""
    if session.error is not None and not isinstance(session.error, RLError):
        raise Finding(f"an error that is not ours: {session.error!r}")
    if session.phase in (of.Phase.ABORTED, of.Phase.TORN) and session.error is None:
        raise Finding("a failure without an error")
    for effect in effects:
        match effect:
            case of.Send(message):
                msgspec.msgpack.encode(message)
                following: list[of.Effect] = []
            case of.MakePlan(_, ranks) if ranks:
                following = session.ask({1: TO_RANK[1]}, m.PartsHashed)
            case of.Answered({1: m.PartsHashed()}):
                following = session.ask({1: TO_RANK[2]}, m.RankPrepared)
            case of.Answered({1: m.RankPrepared()}):
                of_two = msgspec.structs.replace(PREPARE, lanes=LANES_OF_TWO)
                sizes = dict.fromkeys(LANES_OF_TWO, (len(PLAN.buckets), 2))
                following = session.planned(dict.fromkeys(session.peers, of_two), sizes)
            case of.Answered():
                following = session.confirmed(dict.fromkeys(session.peers, ""))
            case of.Packed(index, digests, lane):
                following = session.packed(index, digests, lane)
            case of.Perform():
                following = session.answer(OF_RANK[1])
            case of.MakePlan():
                prepares = dict.fromkeys(session.peers, PREPARE)
                following = session.planned(prepares, {0: (len(PLAN.buckets), 2)})
            case of.Pack(index):
                following = session.packed(index, DIGESTS[index])
            case of.Confirm() if session.ranks:
                following = session.ask({1: TO_RANK[-2]}, m.RankConfirmed)
            case of.Confirm():
                following = session.confirmed(dict.fromkeys(session.peers, ""))
            case of.Attach():
                following = session.attached({0: len(PLAN.buckets)})
            case of.Load(index):
                session.mark_torn()
                following = session.loaded(index)
            case of.Install():
                following = session.installed()
            case of.Publish():
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
    private = True
    reason_not_shareable = None
    job: Any

    def __init__(self, frames: list[bytes]) -> None:
        self.frames = frames
        self._pause = True

    def receive(self, timeout_s: float) -> Any:
        self._pause = not self._pause
        if self._pause and isinstance(self.job, ReceiveJob | RankJob):
            return None  # it loads what came before
        frame = self.frames.pop(0) if self.frames else None
        if frame is None:
            self.job.cancelled = "nothing more comes"
        if isinstance(self.job, ReceiveJob | RankJob):
            return frame
        return [] if frame is None else [("key", frame)]

    def send(self, *_: object) -> bool:
        return True

    def departed(self) -> list[str]:
        return []

    def lost(self) -> bool:
        return False

    def lane_device(self, device: torch.device, _: object) -> torch.device:
        return device

    def lane(self, *_: object, direct: bool = False) -> Bytes:
        return Bytes()

    attach = lane

    def refused(self) -> None:
        """Nobody did."""

    def open(self) -> None:
        """It always is."""

    def connect(self, address: object) -> None:
        """It always is."""

    def disconnect(self) -> None:
        """It never is."""

    close = disconnect


def conversation(
    choices: Choices, author: Author, right: Sequence[Any], samples: Sequence[Any]
) -> list[bytes]:
    """All that one side says, and one frame that is wrong: each signed for its place."""
    at, instead = choices.below(len(right)), choices.below(3)
    told: list[bytes] = []
    for number, message in enumerate(right):
        if number == at:
            told.append(frame(choices, author, [message] if instead else samples))
        if number != at or not instead:
            told.append(author.encode(message))
    return told


def engine(line: Any = None) -> RefitReceiver:
    """One that knows the trainer, and reaches it by this line."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    sink, line = NamedTensorSink(tensors), line or Line([])
    receiver = RefitReceiver(lambda: sink, name="engine", lock=threading.RLock())
    receiver.prepare(info())
    found: concurrent.futures.Future[None] = concurrent.futures.Future()
    found.set_result(None)
    address = receiver._trainer.addresses["ipc"]
    receiver.connections["ipc"] = Connection(line, address, found)
    return receiver


def info() -> dict[str, Any]:
    return {
        "protocol": m.PROTOCOL,
        "digest": MANIFEST.digest,
        "tensors": [dict(tensor) for tensor in MANIFEST.info],
        "token": TOKEN,
        "number": 1,
        "addresses": {"ipc": {"endpoint": "ipc:///nowhere/rl-refit-0/socket"}},
    }


def receiver_job(choices: Choices, seen: Counter[str]) -> None:
    line = Line(conversation(choices, Author("sender"), FROM_SENDER[:-1], FROM_SENDER))
    receiver = engine(line)
    line.job = job = ReceiveJob(receiver, "ipc", receiver._trainer, 60.0, "")
    job._channel = frames.Channel(TOKEN, NONCE, "receiver")
    ends_typed("receiver's refit", job.refit, seen)
    if receiver.lock._is_owned():  # type: ignore[attr-defined]
        raise Finding("the engine stays locked")
    if receiver.torn != (job.session.phase is of.Phase.TORN):
        raise Finding(f"{job.session.phase} and torn={receiver.torn}")


def sender_job(choices: Choices, seen: Counter[str]) -> None:
    sender = RefitSender(lambda: NamedTensorSource(TENSORS), name="trainer")
    sender.kept.token = TOKEN
    options = SendOptions(bucket_bytes=BUCKET, verify="none", mode="packed")
    line = Line([])
    line.job = job = SendJob(
        sender, sender.kept, None, Connection(line), NamedTensorSource(TENSORS), options, 1, 1
    )
    right = [
        msgspec.structs.replace(message, session=job.session.offer.session)
        if hasattr(message, "session")
        else message
        for message in FROM_RECEIVER
    ]
    author = Author("receiver")
    author.bind(job.session.offer.session, NONCE)
    line.frames = conversation(choices, author, right[:-1], right)
    with mock.patch.object(_send_job, "secrets", mock.Mock(token_bytes=lambda _: NONCE)):
        ends_typed("sender's refit", job.refit, seen)


def rank_job(choices: Choices, seen: Counter[str]) -> None:
    line = Line(conversation(choices, Author("sender"), TO_RANK, [*FROM_SENDER, *TO_RANK]))
    sender = RefitSender(lambda: NamedTensorSource(TENSORS), name="rank")
    sender.kept.connections["ipc"] = Connection(line, {})
    ranks: Any = mock.Mock(rank=1, token=TOKEN, pid=1, host="host", names=["rank 0", "rank 1"])
    ranks.connect = lambda: line
    source = NamedTensorSource(TENSORS)
    line.job = job = RankJob(sender, sender.kept, ranks, source, SendOptions(), 1)
    with mock.patch.object(_rank_job, "secrets", mock.Mock(token_bytes=lambda _: NONCE)):
        ends_typed("rank's refit", job.refit, seen)


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
            end.connect(given)
        finally:
            end.close()

    ends_typed("address", use, seen)


@cache
def region() -> SharedRegion:
    return SharedRegion.create(4096)


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
    + [receiver_job] * 2 + [sender_job] * 2
    + [session_of_two] * 10 + [rank_session] * 6 + [rank_job] * 2
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
