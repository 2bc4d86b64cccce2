"""A trainer and engines whose network, memory and clock are in the hands of a test.

The jobs, sessions, frames, plans, digests and loaders are the product's own; what is a double here
is the transport (queues of frames, bytes in this process), the clock, and the two models.
"""

from __future__ import annotations

import secrets
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rl_core.errors import RefitAborted, RLError, WeightsTornError
from rl_core.weights.job import Runtime
from rl_core.weights.protocol import frames
from rl_core.weights.protocol.messages import Hello, Sealed
from rl_core.weights.protocol.session import Phase
from rl_core.weights.receiving import receiver as _receiver
from simulation.parties import (
    DEADLINE_S,
    SPECS,
    BackendFault,
    Clock,
    Engine,
    Kind,
    Trainer,
    Weights,
    bytes_of,
)
from simulation.wire import MemoryLane, TrainerEnd, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from concurrent.futures import Future

    from rl_core.weights.job import Job
    from rl_core.weights.options import SendOptions
    from rl_core.weights.receiving.receiver import ReceiveJob
    from rl_core.weights.sending.send_job import SendJob

#: Seconds that a thread may take to get somewhere; none does, unless a test fails.
_PATIENCE_S = 60


class Stepped:
    """Refits that are begun as always, and then wait for a test to drive them step by step."""

    def __init__(self) -> None:
        self._arrived: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._gates: dict[Job[Any], threading.Event] = {}
        self._futures: dict[Job[Any], Future[dict[str, Any]]] = {}

    def drive(self, job: Job[Any]) -> None:
        """In the job's thread: what :class:`Runtime` drives a job with."""
        gate = self._gates[job] = threading.Event()
        self._arrived.put(job)
        gate.wait()
        if not job.session.phase.terminal:
            raise RefitAborted("the process died")

    def begin(self, future: Future[dict[str, Any]]) -> Any:
        """The job behind a refit that was asked for, once it would be driven."""
        arrived = self._arrived
        future.add_done_callback(lambda _: arrived.put(None))
        job = arrived.get(timeout=_PATIENCE_S)
        assert job is not None, future.exception()
        self._arrived = SimpleQueue()
        self._futures[job] = future
        return job

    def end(self, job: Job[Any]) -> BaseException | None:
        """Lets a job draw its conclusions; what it failed with."""
        self._gates.pop(job).set()
        return self._futures.pop(job).exception(_PATIENCE_S)

    def close(self) -> None:
        for job in list(self._gates):
            self.end(job)


@dataclass
class Refit:
    """What is known of one refit from outside of it.

    Attributes:
        receivers: How many take part.
        version: What they are to become.
        weights: What they are to get.
        step: Of the trainer's weights when it began.
        options: With which it was begun.
        sealed: Receivers that said so.
        published: Receivers that serve it, or did before they died.
        succeeded: The trainer reported success.
        counts: Whether the trainer's version is that of this refit, now that it is over.
    """

    receivers: int
    version: int
    weights: Weights
    step: int
    options: SendOptions
    sealed: set[str] = field(default_factory=set)
    published: set[str] = field(default_factory=set)
    succeeded: bool = False
    counts: bool | None = None


def _unmet(job: SendJob) -> frames.Channel:
    return frames.Channel(job.endpoint.kept.token, b"", "sender")


def _signed(reader: frames.Channel, message: object) -> bytes:
    """The frame that a channel would take next, if it were this message."""
    kind = frames._said_by[reader._peer]
    return kind.write(message, reader._keys[reader._peer], reader._received)


class Network:
    """One trainer, some engines, and every frame between them."""

    def __init__(self, engines: int = 1, kind: Kind | None = None) -> None:
        self.clock = Clock()
        self.kind = kind or Kind()
        self.up: list[tuple[str, bytes]] = []
        self.down: list[tuple[str, bytes]] = []
        self.seen_up: list[bytes] = []
        self.seen_down: list[bytes] = []
        self.said: dict[bytes, tuple[Any, Callable[[object], bytes]]] = {}
        self.connections = count()
        self.closed: set[str] = set()
        self.lanes: list[MemoryLane] = []
        self.versions = count(1)
        self.refits: dict[str, Refit] = {}
        self.history: dict[int, Weights] = {
            0: {name: bytes_of(tensor) for name, tensor in self.kind.blank().items()}
        }
        self.errors: list[RLError] = []
        self.wrongly_sealed: list[Refit] = []
        self._patches = ExitStack()
        self._stepped = Stepped()
        self._wire = Wire(self)
        self.runtime = Runtime(
            clock=self.clock, transport=lambda name: self._wire, drive=self._stepped.drive
        )
        self._record()
        self._draw()
        self.trainer = self._new_trainer(0, None)
        self.engines = [self._new_engine(number) for number in range(engines)]
        self._introduce()

    def _record(self) -> None:
        """Keeps what is said, to say it again or something like it."""

        def encode(channel: frames.Channel, message: object) -> bytes:
            side = channel._side
            key, number = channel._keys[side], channel._sent
            frame = plain(channel, message)
            again = partial(frames._said_by[side].write, key=key, count=number)
            self.said[frame] = message, again
            return frame

        def write_hello(hello: Hello, token: str) -> bytes:
            frame = frames.write_hello(hello, token)
            self.said[frame] = hello, partial(frames.write_hello, token=token)
            return frame

        plain = frames.Channel.encode
        self._patches.enter_context(patch.object(frames.Channel, "encode", encode))
        self._patches.enter_context(patch.object(_receiver, "write_hello", write_hello))

    def _draw(self) -> None:
        """Makes what is random elsewhere the same in every run."""
        numbers = count()

        def token_bytes(nbytes: int) -> bytes:
            return next(numbers).to_bytes(nbytes, "big")

        def token_hex(nbytes: int) -> str:
            return token_bytes(nbytes).hex()

        self._patches.enter_context(patch.object(secrets, "token_bytes", token_bytes))
        self._patches.enter_context(patch.object(secrets, "token_hex", token_hex))

    def close(self) -> None:
        self._stepped.close()
        self._patches.close()

    def _new_trainer(self, number: int, before: Trainer | None) -> Trainer:
        trainer = Trainer(number, before, self.runtime)
        trainer.end = TrainerEnd(self, trainer)
        return trainer

    def _new_engine(self, number: int) -> Engine:
        def published(receiver: str, job: ReceiveJob) -> None:
            assert job.session.offer is not None
            self.refits[job.session.offer.session].published.add(receiver)

        return Engine(number, self.kind, self.clock, published, self.runtime)

    def _introduce(self, engines: Collection[Engine] = ()) -> None:
        info = self.trainer.sender.prepare()
        for engine in engines or self.engines:
            engine.receiver.prepare(info)

    # -- refits -----------------------------------------------------------------------------------

    def trained(self) -> Weights:
        """The trainer's weights as an engine would have them."""
        blank = self.kind.blank()
        tied = {s.name: s.alias_of or s.name for s in SPECS}
        return {
            name: bytes_of(self.trainer.tensor[tied[name]].to(tensor.dtype))
            for name, tensor in blank.items()
        }

    def send(self, *, again: bool = False, **given: Any) -> Refit:
        """The trainer begins a refit, or sends what was committed again; none may be going on."""
        self._introduce()
        options = {"receivers": len(self.engines), "deadline_s": DEADLINE_S} | given
        sender = self.trainer.sender
        options["version"] = sender.version if again else next(self.versions)
        if not again:
            self.history[options["version"]] = self.trained()
        job = self.trainer.job = self._stepped.begin(sender.send(**options))
        version, step = job.version, self.trainer.step
        refit = Refit(len(self.engines), version, self.history[version], step, job.options)
        self.refits[job.session.offer.session] = refit
        for lane in self.lanes:
            lane.published.clear()
        return refit

    @property
    def refit(self) -> Refit | None:
        """The one that the trainer is at."""
        job = self.trainer.job
        return None if job is None else self.refits[job.session.offer.session]

    def receive(self, engine: Engine) -> None:
        """An engine waits for a refit, unless it does already."""
        if engine.job is not None:
            return
        self._wire.engine = engine
        engine.before = engine.weights, engine.receiver.torn
        engine.job = self._stepped.begin(engine.receiver.receive(deadline_s=DEADLINE_S))

    def start(self, **given: Any) -> Refit:
        """All take part in a refit."""
        refit = self.send(**given)
        for engine in self.engines:
            self.receive(engine)
        return refit

    # -- frames -----------------------------------------------------------------------------------

    def sent(self, engine: Engine, key: str, frame: bytes) -> None:
        """An engine sent a frame."""
        message, _ = self.said[frame]
        if isinstance(message, Sealed):
            refit = self.refits[message.session]
            refit.sealed.add(engine.receiver.id)
            # A trainer that has trained meanwhile will not confirm what it sent.
            if refit.step == self.trainer.step and engine.weights != refit.weights:
                self.wrongly_sealed.append(refit)
        self.up.append((key, frame))

    def to_trainer_by_token(self, engine: Engine, message: object) -> tuple[str, bytes]:
        """What somebody with the token says in the name of an engine."""
        key, job = engine.end.key, self.trainer.job
        assert job is not None
        return key, _signed(job._channels.get(key) or _unmet(job), message)

    def to_engine_by_token(self, engine: Engine, message: object) -> tuple[str, bytes]:
        """What somebody with the token says to an engine in the trainer's name."""
        assert engine.job is not None
        return engine.end.key, _signed(engine.job._channel, message)

    def by_key(self, key: str) -> Engine | None:
        """The engine behind a connection, if it is still at the refit of that connection."""
        found = (e for e in self.engines if e.job is not None and e.end.key == key)
        return next(found, None)

    def deliver_up(self, *positions: int) -> None:
        """The trainer takes some frames at once."""
        frames = [self.up.pop(p % len(self.up)) for p in positions if self.up]
        self.seen_up += [frame for _, frame in frames]
        self.to_trainer(*frames)

    def to_trainer(self, *frames: tuple[str, bytes]) -> None:
        trainer = self.trainer
        trainer.end.inbox += frames
        if trainer.job is not None:
            trainer.job.pump(0.0)
        self.conclude()

    def deliver_down(self, *positions: int) -> None:
        """Engines take some frames; those that one takes at once are those of one call."""
        frames = [self.down.pop(p % len(self.down)) for p in positions if self.down]
        self.seen_down += [frame for _, frame in frames]
        self.to_engines(*frames)

    def to_engines(self, *frames: tuple[str, bytes]) -> None:
        found = {key: self.by_key(key) for key, _ in frames}
        for key, frame in frames:
            if (engine := found[key]) is not None:
                engine.end.inbox.append(frame)
        for engine in found.values():
            if engine is not None:
                self.work(engine)

    def work(self, engine: Engine) -> None:
        """An engine takes what is there, and loads a bucket."""
        if engine.job is not None:
            engine.job.pump(0.0)
        self.conclude()

    def step(self) -> bool:
        """The oldest frame of each side arrives; False if nothing is left to happen."""
        if self.trainer.job is not None and self.up:
            self.deliver_up(0)
        if self.down:
            self.deliver_down(0)
        else:
            for engine in self.engines:
                self.work(engine)
        return bool(self.down or (self.up and self.trainer.job is not None))

    def settle(self, steps: int = 10_000) -> None:
        """All goes well until nothing is left to happen."""
        while steps and self.step():
            steps -= 1

    def look(self) -> None:
        """Everybody looks at the clock and at who is gone."""
        for job in [self.trainer.job, *(engine.job for engine in self.engines)]:
            if job is not None:
                job.look()
        self.conclude()

    # -- what goes wrong --------------------------------------------------------------------------

    def engine_dies(self, number: int) -> None:
        """An engine's process dies; a new one takes its place and knows nothing."""
        before = self.engines[number]
        if before.job is not None:
            self._stepped.end(before.job)
        engine = self.engines[number] = self._new_engine(number)
        self._introduce([engine])

    def trainer_dies(self) -> None:
        """The trainer's process dies; a new one goes on with a copy of the weights."""
        for engine in self.engines:
            if engine.job is not None:
                engine.end.is_lost = True
        if self.trainer.job is not None:
            self._stepped.end(self.trainer.job)
        self.up.clear()
        self.trainer = self._new_trainer(self.trainer.number + 1, self.trainer)
        self._introduce()

    def damage(self, position: int) -> None:
        """A byte changes that was published in this refit, on its way to the engines."""
        lane = self.lanes[-1]
        begin, end = lane.published[position % len(lane.published)]
        lane.memory[begin + position % (end - begin)] ^= 1 << position % 8

    def heal(self) -> None:
        """Nothing will go wrong any more; what is going on runs into its deadline."""
        self.trainer.faults.armed.clear()
        for engine in self.engines:
            engine.faults.armed.clear()
            engine.lock.looks = 0
        self.up.clear()
        self.down.clear()
        self.clock.now += 2 * DEADLINE_S
        self.look()

    # -- what must hold ---------------------------------------------------------------------------

    def assert_whole(self) -> None:
        """An engine that may generate has the weights of its version."""
        for engine in self.engines:
            if not engine.receiver.torn and not engine.lock.held:
                assert engine.weights == self.history[engine.receiver.version]

    def assert_all_or_none(self) -> None:
        """Nobody publishes unless all were sealed, and the trainer's version is then the new one.

        Success is reported only if all published.
        """
        assert not self.wrongly_sealed
        for refit in self.refits.values():
            assert not refit.published or len(refit.sealed) == refit.receivers
            assert not refit.published or refit.counts is not False
            assert not refit.succeeded or len(refit.published) == refit.receivers

    def assert_recovers(self, *, delta: bool) -> None:
        """Nothing is stuck, nothing failed for an unknown reason, and the next refit commits."""
        self.heal()
        assert self.trainer.job is None
        assert all(engine.job is None and not engine.lock.held for engine in self.engines)
        for error in self.errors:
            assert error.details["phase"] in list(Phase)
            assert isinstance(error.__cause__, RLError | BackendFault | None), error.__cause__
        self.trainer.train(["a"], back=2)
        refit = self.start(delta=delta, bucket_bytes=128)
        self.settle()
        assert refit.succeeded, self.errors[-1]
        for engine in self.engines:
            assert engine.receiver.version == refit.version
            assert not engine.receiver.torn
            assert engine.weights == self.trained()

    # -- how it ends ------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Sessions that ended let go of what they hold, as their jobs do."""
        trainer = self.trainer
        if trainer.job is not None and trainer.job.session.phase.terminal:
            refit, job = self.refits[trainer.job.session.offer.session], trainer.job
            trainer.job = None
            refit.succeeded = self._conclude(job)
            refit.counts = trainer.sender.version == refit.version
        for engine in self.engines:
            if engine.job is not None and engine.job.session.phase.terminal:
                engine.faults.armed.discard("lose a write")
                job, engine.job = engine.job, None
                self._assert_told(engine, job, self._conclude(job))

    def _assert_told(self, engine: Engine, job: ReceiveJob, succeeded: bool) -> None:
        """What an engine says of a refit that is over is how it is."""
        phase = job.session.phase
        assert succeeded == (phase is Phase.COMMITTED)
        if phase is Phase.TORN:
            assert engine.receiver.torn
        elif not (succeeded or isinstance(self.errors[-1], WeightsTornError)):
            assert (engine.weights, engine.receiver.torn) == engine.before

    def _conclude(self, job: Job[Any]) -> bool:
        error = self._stepped.end(job)
        if error is None:
            return True
        assert isinstance(error, RLError), error
        self.errors.append(error)
        return False
