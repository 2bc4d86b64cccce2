"""One trainer, some engines, a driver that follows a script, and whatever may go wrong."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from refit_model.canonical import Canon
from refit_model.parties import BUCKET_BYTES, NAMES, Engine, Trainer, Weights
from refit_model.tasks import Names, Task, inhabit, running
from refit_model.wire import Connection, Recording, Wire
from rl_core.errors import RLError
from rl_core.refit.messages import PROTOCOL
from rl_core.refit.session import Phase

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Iterator

    import greenlet

DEADLINE_S = 10.0
HELLO_S = 0.5


@dataclass(frozen=True)
class Train:
    """The trainer's weights become these."""

    weights: Weights


@dataclass(frozen=True)
class Refit:
    """The driver asks for a refit; its version is its number, from 1 on."""

    engines: tuple[str, ...] = ("E0",)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """What happens, and what may go wrong.

    Attributes:
        script: What the driver does; it goes on once a step has ended, or has failed on one side.
        faults: What may happen, each once: ``pause``, ``crash`` or ``quit`` and a party, ``drop``
            (its weights) or ``load`` (others by itself) and an engine, ``silence`` (of whoever
            is paused), ``replay`` (of a frame), ``play`` (of a connection, to an engine) or
            ``pose`` (as an engine, to the trainer). All orders of requests and of frames are
            tried, so that what happens to one engine need not be tried with another.
        most: How many of them in one run; ``silence`` does not count.
        in_place: Engines have targets, which core writes by itself.
    """

    script: tuple[Train | Refit, ...]
    faults: tuple[str, ...] = ()
    most: int = 1
    in_place: bool = False

    @property
    def engines(self) -> list[str]:
        return sorted({e for step in self.script if isinstance(step, Refit) for e in step.engines})


class World:
    """All of it. :meth:`choices` and :meth:`take` are how a search moves through it.

    Attributes:
        broken: What is wrong, if something is.
        now: Seconds.
        offered: The trainer's weights when a version was offered.
        decided: Versions that the sender decided to commit, each with a connection that is to.
        known_way: This was seen before, and need not be looked at.
        wrong_since: A fault happened in the refit that is going on.
    """

    def __init__(self, scenario: Scenario) -> None:
        inhabit(self)
        self.known_way = False
        self.scenario = scenario
        self.broken: str | None = None
        self.now = 0.0
        self.constructing = ""
        self.names = Names()
        self.tasks: list[Task] = []
        self._of: dict[greenlet.greenlet, Task] = {}
        self.connections: dict[str, Connection] = {}
        self.recordings: dict[str, Recording] = {}
        self.played: dict[str, str] = {}
        self.lanes: list[bytearray] = []
        self.offered: dict[int, Weights] = {0: dict.fromkeys(NAMES, 0.0)}
        self.decided: set[tuple[int, str]] = set()
        self.digested: dict[bytes, bytes] = {}
        self.left = list(scenario.faults)
        self.most = scenario.most
        self.paused: str | None = None
        self.wrong_since = False
        self.clean_start = True
        self.position = 0
        self.refit = 0
        self.asked: list[str] = []
        self.to_ask: list[str] = []
        self.futures: list[tuple[str, Task]] = []
        self.hellos_left = 0
        self.interrupted: Task | None = None
        self._next_play: str | None = None
        self._connected: Counter[str] = Counter()
        self.trainers = 0
        self.wire = Wire(self)
        self.trainer = self._new_trainer(dict.fromkeys(NAMES, 1.0))
        self.engines = {name: self._new_engine(name) for name in scenario.engines}
        self.advance()

    def _new_trainer(self, weights: Weights) -> Trainer:
        self.constructing = "T"
        self.trainers += 1
        return Trainer(self.trainers, weights)

    def _new_engine(self, name: str) -> Engine:
        self.constructing = name
        return Engine(self, name, in_place=self.scenario.in_place)

    # -- what the code asks for -------------------------------------------------------------------

    def spawn(self, name: str, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        task = Task(name.removeprefix("refit-"), function)
        self.tasks.append(task)
        self._of[task.greenlet] = task
        return task.future

    def task_of(self, current: greenlet.greenlet) -> Task | None:
        return self._of.get(current)

    def interrupts(self, task: Task) -> bool:
        return bool(self._interruptions(task))

    def connect(self, party: str, trainer: int) -> Connection:
        self._connected[party] += 1
        key = f"{party}#{self._connected[party]}"
        connection = self.connections[key] = Connection(key, trainer)
        self.recordings[key] = Recording()
        if self._next_play is not None:
            self.played[key], self._next_play = self._next_play, None
            connection.forged = deque(self.recordings[self.played[key]].down)
        return connection

    def overhear(self, place: tuple[int, int], data: bytes) -> None:
        for key, connection in self.connections.items():
            if not connection.closed:
                self.recordings[key].bytes.setdefault(place, data)

    def commits(self, engine: Engine, version: int) -> None:
        """An engine is about to serve a version."""
        task = running()
        assert task is not None
        key = task.job._end.connection.key
        if (version, key) not in self.decided:
            self._break(f"{engine.name} commits version {version}, which nobody decided on {key}")
        if version != task.job.number and PROTOCOL > 2:  # with 2, it cannot know
            self._break(
                f"{engine.name} commits version {version} where {task.job.number} was asked for"
            )
        engine.committed.append(version)
        engine.own = None

    def _break(self, what: str) -> None:
        self.broken = self.broken or what

    # -- moving -----------------------------------------------------------------------------------

    def advance(self) -> None:
        """Runs what nothing can come between, up to where something can.

        Engines go first: what one of them does with its frames touches nobody else's, so that no
        order among engines, or between them and the trainer, leads anywhere else. What does is
        where the trainer reads next, what the driver does, and what goes wrong.
        """
        while self.broken is None:
            task = next((t for t in self.tasks if self._ready(t)), None)
            if task is None:
                break
            task.go()
            self._after(task)
            if not task.over and not task.waits and task.party != self.paused:
                self.interrupted = task
                break
        self.tasks = [task for task in self.tasks if not task.over]

    def _ready(self, task: Task) -> bool:
        return not task.over and task.party != self.paused and (not task.waits or task.wakes())

    def _after(self, task: Task) -> None:
        """Looks at what a task left behind."""
        for job in [t.job for t in self.tasks if t.party == "T" and not t.killed]:
            if job.session.phase in (Phase.COMMIT, Phase.COMMITTED):
                self.decided.update((job.version, key) for key in job.session.peers)
        if task.future.done() and not task.killed:
            error = task.future.exception()
            if not isinstance(error, RLError | None):
                self._break(f"{task.party} ends with {type(error).__name__}: {error}")
            if error is None and task.party == "T":
                self._check_success(task.job.version)
        self._check_engines()

    def _check_success(self, version: int) -> None:
        for name in self.asked:
            engine = self.engines[name]
            if engine.asked == version and version not in engine.committed:
                self._break(f"T reports success of {version}, which {name} did not commit")

    def _check_engines(self) -> None:
        if self.known_way:
            return
        for engine in self.engines.values():
            receiver, weights = engine.receiver, engine.weights
            if engine.lock.held:
                continue
            expected = self.offered.get(receiver.version) if engine.own is None else engine.own
            if not receiver.torn and weights != expected:
                self._break(
                    f"{engine.name} serves version {receiver.version} as {weights}, not {expected}"
                )
            for name, digest in receiver.known.items():
                if self.digested[digest] != engine.tensor[name].numpy().tobytes():
                    self._break(f"{engine.name} knows {name} to be what it is not")

    # -- what can happen --------------------------------------------------------------------------

    def choices(self) -> list[str]:
        """What can happen next; first what happens if nothing goes wrong."""
        if self.broken:
            return []
        if self.interrupted is not None:
            task = self.interrupted
            return [f"{task.party} goes on", *self._interruptions(task)]
        found = [*self._readings(), *self._driver()]
        alive = [task for task in self.tasks if task.party != self.paused]
        if not found and alive:
            found.append("time passes")
        if not found and self.paused is None:
            return []
        if self.paused is not None:
            found.append(f"{self.paused} resumes")
            if "silence" in self.left:
                found.append(f"{self.paused} is silent")
        if self.most:
            for party in ("T", *self.engines):
                found += self._faults(party)
            found += self._replays()
        return found

    def _readings(self) -> Iterator[str]:
        tasks = [t for t in self.tasks if t.party == "T" and t.at == "receive"]
        if not tasks or self.paused == "T":
            return
        peers = tasks[0].job.session.peers
        for key, connection in self.connections.items():
            if connection.trainer != self.trainer.number:
                continue
            if connection.up and not connection.broken:
                yield f"T reads {key}"
            elif connection.gone and key in peers and not connection.reported:
                yield f"T sees that {key} is gone"

    def _driver(self) -> Iterator[str]:
        for party in self.to_ask:
            if party != self.paused:
                yield f"ask {party}"
        if self.to_ask or self.position == len(self.scenario.script):
            return
        step = self.scenario.script[self.position]
        done = [task.future.done() or task.killed for _, task in self.futures]
        failed = [
            task.killed or (task.future.done() and task.future.exception() is not None)
            for _, task in self.futures
        ]
        if not all(done) and not any(failed):
            return
        if isinstance(step, Train):
            if self.paused != "T":
                yield "train"
        elif self.paused not in ("T", *step.engines):
            yield f"refit {self.refit + 1}"

    def _interruptions(self, task: Task) -> list[str]:
        if not self.most:
            return []
        party, found = task.party, []
        if f"pause {party}" in self.left and self.paused is None:
            found.append(f"pause {party} at {task.at}")
        if f"crash {party}" in self.left:
            found.append(f"crash {party} at {task.at}")
        return [*found, *self._engine_events(party)]

    def _engine_events(self, party: str) -> Iterator[str]:
        engine = self.engines.get(party)
        if engine is not None and not engine.lock.held:
            events = (f"drop {party}", f"load {party}")
            yield from (event for event in events if event in self.left)

    def _faults(self, party: str) -> Iterator[str]:
        tasks = [task for task in self.tasks if task.party == party]
        if tasks and party != self.paused:
            if f"pause {party}" in self.left and self.paused is None:
                yield f"pause {party}"
            if f"quit {party}" in self.left and not tasks[0].job.cancelled:
                yield f"quit {party}"
        if tasks and f"crash {party}" in self.left:
            yield f"crash {party}"
        if party != self.paused and self.tasks:
            yield from self._engine_events(party)

    def _replays(self) -> Iterator[str]:
        old = [key for key, recording in self.recordings.items() if recording.down]
        if "play" in self.left:
            for party in self.to_ask:
                if party != "T" and party != self.paused:
                    yield from (f"ask {party} and play {key}" for key in old)
        if "pose" in self.left and any(task.party == "T" for task in self.tasks):
            yield from (f"pose {key}" for key in old)
        if "replay" not in self.left:
            return
        for live, connection in self.connections.items():
            if connection.closed or connection.broken or connection.forged is not None:
                continue
            for key in old:
                recording = self.recordings[key]
                yield from (f"replay up {i} of {key} on {live}" for i in range(len(recording.up)))
                yield from (
                    f"replay down {i} of {key} on {live}" for i in range(len(recording.down))
                )

    def take(self, choice: str) -> None:
        """Makes it happen, and what follows at once."""
        inhabit(self)
        task, self.interrupted = self.interrupted, None
        match choice.split():
            case [_, "goes", "on"]:
                pass
            case ["T", "reads", key]:
                self._reader().chosen = key
            case ["T", "sees", "that", key, "is", "gone"]:
                self.connections[key].reported = True
                self._reader().gone.append(key)
            case ["ask", party]:
                self._ask(party)
            case ["ask", party, "and", "play", key]:
                self._happens("play")
                self._next_play = key
                self._ask(party)
            case ["train"]:
                step = self.scenario.script[self.position]
                assert isinstance(step, Train)
                self.trainer.train(step.weights)
                self.position += 1
            case ["refit", _]:
                self._begin()
            case ["time", "passes"]:
                self._time_passes()
            case [party, "resumes"]:
                self.paused = None
                self.wrong_since = True
            case [party, "is", "silent"]:
                self.left.remove("silence")
                self._cut_off(party)
            case ["pause", party, *_]:
                self._happens(f"pause {party}")
                self.paused = party
            case ["crash", party, *_]:
                self._happens(f"crash {party}")
                self._crash(party)
            case ["quit", party]:
                self._happens(f"quit {party}")
                next(t for t in self.tasks if t.party == party).job.cancelled = "given up"
            case ["drop", party]:
                self._happens(f"drop {party}")
                self.engines[party].drop()
                self.interrupted = task
            case ["load", party]:
                self._happens(f"load {party}")
                self.engines[party].load_own()
                self.interrupted = task
            case ["replay", way, number, "of", key, "on", live]:
                self._happens("replay")
                frame = getattr(self.recordings[key], way)[int(number)]
                getattr(self.connections[live], way).append(frame)
            case ["pose", key]:
                self._happens("pose")
                stranger = self.connect("X", self.trainer.number)
                stranger.up.extend(self.recordings[key].up)
            case _:
                raise ValueError(choice)
        if self.interrupted is None:
            self.advance()
        else:
            self._check_engines()

    # -- how it happens ---------------------------------------------------------------------------

    def _happens(self, fault: str) -> None:
        self.left.remove(fault)
        self.most -= 1
        self.wrong_since = True

    def _reader(self) -> Any:
        return self.trainer.sender.end("ipc")

    def _begin(self) -> None:
        step = self.scenario.script[self.position]
        assert isinstance(step, Refit)
        self._check_last()
        self.position += 1
        self.refit += 1
        self.wrong_since = self.paused is not None
        self.clean_start = not self.tasks
        self.hellos_left = 1
        self.asked = list(step.engines)
        self.to_ask = ["T", *step.engines]
        self.futures = []
        info = self.trainer.sender.prepare()
        for name in step.engines:
            self.constructing = name
            self.engines[name].receiver.prepare(info)

    def _ask(self, party: str) -> None:
        self.constructing = party
        self.to_ask.remove(party)
        step = self.scenario.script[self.position - 1]
        assert isinstance(step, Refit)
        if party == "T":
            self.offered[self.refit] = self.trainer.weights
            options = {
                "receivers": len(step.engines),
                "deadline_s": DEADLINE_S,
                "bucket_bytes": BUCKET_BYTES,
                "version": self.refit,
            }
            self.trainer.sender.send(**options | step.options)
        else:
            self.engines[party].asked = self.refit
            self.engines[party].receiver.receive(deadline_s=DEADLINE_S)
        task = self.tasks[-1]
        task.job.number = self.refit
        self.futures.append((party, task))

    def _time_passes(self) -> None:
        """Nobody can do anything before the next deadline, or the next time to say hello."""
        waiting = [
            t
            for t in self.tasks
            if t.party != self.paused and t.job.session.phase is Phase.DISCOVER
        ]
        if self.hellos_left and any(task.party != "T" for task in waiting):
            self.hellos_left -= 1
            self.now += HELLO_S
            return
        if self.paused is None and not self.wrong_since:
            who = ", ".join(sorted(t.party for t in self.tasks))
            self._break(f"{who} wait until the deadline, though nothing is wrong")
        self.now = math.floor(self.now) + DEADLINE_S + 1

    def _cut_off(self, party: str) -> None:
        for key, connection in self.connections.items():
            if party == "T" or key.startswith(party):
                connection.broken = True

    def _crash(self, party: str) -> None:
        if self.paused == party:
            self.paused = None
        for task in [t for t in self.tasks if t.party == party]:
            task.kill()
        self.tasks = [task for task in self.tasks if not task.over]
        if party == "T":
            for connection in self.connections.values():
                connection.up.clear()
            self.trainer = self._new_trainer(self.trainer.weights)
        else:
            for key, connection in self.connections.items():
                if key.startswith(party):
                    connection.closed = True
            self.engines[party] = self._new_engine(party)
        if party in self.to_ask:  # whoever asks finds nobody who knows of this refit
            self.to_ask.remove(party)

    # -- the end ----------------------------------------------------------------------------------

    def _check_last(self) -> None:
        """A refit in which nothing went wrong was committed everywhere."""
        if self.refit and self.clean_start and not self.wrong_since:
            for name in self.asked:
                if self.engines[name].receiver.version != self.refit:
                    self._break(f"{name} did not commit {self.refit}, though nothing was wrong")

    def finish(self) -> None:
        """Nothing happens any more."""
        self._check_last()
        if self.tasks:
            self._break("somebody waits for ever")

    def close(self) -> None:
        """Ends whatever is left."""
        inhabit(self)
        for task in self.tasks:
            task.kill()
        inhabit(None)

    def key(self) -> bytes:
        """The state."""
        canon = Canon()
        for task in self.tasks:
            canon.out.append((task.party, task.at, task.waits, task.over))
            canon.add(task.job)
            canon.stack(task.greenlet)
        for name, value in vars(self).items():
            if name not in _NOT_STATE:
                canon.out.append(name)
                canon.add(value)
        if self.most and {"replay", "play", "pose"} & set(self.left):
            canon.add(self.recordings)
        return canon.digest()


#: What has no influence on what follows, or is written down by itself.
_NOT_STATE = {
    "scenario", "names", "tasks", "_of", "recordings", "digested", "wire", "broken", "known_way",
}  # fmt: skip
Canon.stops_at(World)
