"""One trainer, some engines, a driver that follows a script, and whatever may go wrong."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from refit_model.canonical import Canon
from refit_model.parties import BUCKET_BYTES, NAMES, Engine, Trainer, Weights
from refit_model.people import Generation, Policy, drive, give_up, keep, read
from refit_model.promises import (
    check_commit,
    check_end,
    check_engines,
    check_last,
    check_patience,
)
from refit_model.ranks import TwoRanks
from refit_model.tasks import (
    DEADLINE_S,
    OTHER,
    TRAINERS,
    UNTIL_IT_GOES_ON,
    Names,
    Task,
    inhabit,
    running,
)
from refit_model.wire import Connection, Group, Recording, Wire
from rl_backends.rank_job import follow
from rl_core.weights.protocol.session import Phase

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable

    import greenlet

HELLO_S = 0.5
#: A refit that was requested: number of the trainer's process, and that of the refit there.
Request = tuple[int, int]


@dataclass(frozen=True)
class Train:
    """The trainer's weights become these."""

    weights: Weights


@dataclass(frozen=True)
class Refit:
    """The driver asks for a refit; its version is its number, from 1 on.

    Attributes:
        engines: Who takes it.
        options: How.
        given: Both sides are given its number; or else they count.
        trainer: Who sends; ``U`` is another one, with weights of its own.
        later: It is asked for when the one before has ended on all sides, not on one.
    """

    engines: tuple[str, ...] = ("E0",)
    options: dict[str, Any] = field(default_factory=dict)
    given: bool = True
    trainer: str = "T"
    later: bool = False


@dataclass(frozen=True)
class Scenario:
    """What happens, and what may go wrong.

    Attributes:
        script: What the driver does; it goes on once a step has ended, or has failed on one side.
        faults: What may happen, each once: ``pause``, ``crash`` or ``quit`` and a party, ``lose``
            (a rank that follows) and a trainer, ``drop``
            (its weights) or ``load`` (others by itself) and an engine, ``silence`` (of whoever
            is paused), ``replay`` (of a frame), ``play`` (of a connection, to an engine) or
            ``pose`` (as an engine, to the trainer), or ``flood`` (of frames that are none, on a
            connection to the trainer that is closed then). All orders of requests and of frames are
            tried, so that what happens to one engine need not be tried with another.
        most: How many of them in one run; ``silence`` does not count.
        in_place: Engines have targets, which core writes by itself.
        drivers: Refits that are asked for at the same time, each from a thread of its own, once
            the script is over.
        given_up: Whose refits somebody else gives up on both sides: numbers of drivers, from 0 on,
            in the order in which they ask.
        readers: How many generate at the first engine meanwhile.
        tokens: How many steps each of them decodes.
        writers: How many others keep that engine from generating, as one does that sleeps.
        apart: Drivers are in processes of their own, so that they do not take turns.
        grain: Where others may go first while somebody asks for a refit: 0 nowhere, 1 between two
            calls, 2 also within ``send`` and ``receive``, 3 also while an engine is prepared.
        hellos: How often engines may say hello again before somebody must have answered.
        engine: What its engines are made of.
        group: Bytes go through a group, of which every member has its own, not shared memory.
        ranks: The trainer has a second rank, ``T1``, which gives one of the two tensors. Its faults
            are those of others, ``step``: it trains while rank 0 does not, and ``drift``: its
            tensors get other values, of which nothing tells.
        copies: Both ranks have both tensors.
        prompt: Refits begin as soon as they are asked for, not when the search says so.
    """

    script: tuple[Train | Refit, ...] = ()
    faults: tuple[str, ...] = ()
    most: int = 1
    in_place: bool = False
    drivers: tuple[Refit, ...] = ()
    given_up: tuple[int, ...] = ()
    readers: int = 0
    tokens: int = 1
    writers: int = 0
    apart: bool = False
    grain: int = 2
    hellos: int = 1
    engine: Callable[..., Engine] = Engine
    group: bool = False
    ranks: bool = False
    copies: bool = False
    prompt: bool = False

    @property
    def engines(self) -> list[str]:
        steps = [step for step in (*self.script, *self.drivers) if isinstance(step, Refit)]
        return sorted({engine for step in steps for engine in step.engines})


class World:
    """All of it, as it is between two choices of :mod:`refit_model.events`.

    Attributes:
        broken: What is wrong, if something is.
        now: Seconds.
        offered: The trainer's weights when a version was offered.
        versions: Those of the refits that were requested.
        decided: Versions that the sender decided to commit, each with a connection that is to.
        committed: Those that were committed there.
        drivers_requests: Those of the drivers.
        policies, generations: What the drivers of one process have, by trainer and by engines.
        newest: The one that was sent last.
        given_up: Those that were given up before their bytes were on the way.
        known_way: This was seen before, and need not be looked at.
        read: Frames that somebody took for authentic.
        ran: Parties that did something since the last choice.
        served: A driver got its refit.
        stirred: Something happened since then that somebody who was paused would see.
        others: All second ranks of trainers that did not die.
        reported: The refits of which rank 0 reported success.
        happened: The faults.
        confirmed: Trainers and ranks, each with a refit of which it confirmed its weights.
        wrong_since: A fault happened in the refit that is going on.
        unheard: A side cannot say any more what became of it.
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
        self.groups: dict[int, Group] = {}
        self.offered: dict[int, Weights] = {0: dict.fromkeys(NAMES, 0.0)}
        self.versions: dict[Request, int] = {}
        self.decided: set[tuple[int, str]] = set()
        self.committed: set[tuple[int, str]] = set()
        self.drivers_requests: list[Request] = []
        self.policies: dict[int, Policy] = {}
        self.generations: dict[tuple[str, ...], Generation] = {}
        self.newest: Request = (0, 0)
        self.given_up: set[Request] = set()
        self.digested: dict[bytes, bytes] = {}
        self.read: set[bytes] = set()
        self.left = list(scenario.faults)
        self.most = scenario.most
        self.paused: str | None = None
        self.wrong_since = False
        self.unheard = False
        self.clean_start = True
        self.position = 0
        self.refit = 0
        self.number: int | None = None
        self.asked: list[str] = []
        self.to_ask: list[str] = []
        self.asked_tasks: list[Task] = []
        self.hellos_left = 0
        self.people_came = False
        self.served = False
        self.interrupted: Task | None = None
        self.ran: set[str] = set()
        self.stirred = False
        self.next_play: str | None = None
        self._connected: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()
        self._made = 0
        self.second: Trainer | None = None
        self.others: list[Trainer] = []
        self.reported: set[Request] = set()
        self.happened: list[str] = []
        self.confirmed: set[tuple[str, int, int]] = set()
        self.wire = Wire(self)
        self.trainer = self._new_trainer(dict.fromkeys(NAMES, 1.0))
        if any(step.trainer == "U" for step in scenario.drivers):
            self.second = self._new_trainer(dict.fromkeys(NAMES, 2.0), "U")
        self.engines = {name: self._new_engine(name) for name in scenario.engines}
        self.advance()

    def trainer_of(self, party: str) -> Trainer:
        return self.trainer if party == "T" or self.second is None else self.second

    @property
    def trainers(self) -> list[Trainer]:
        return [self.trainer, *filter(None, [self.second])]

    def lives(self, number: int) -> bool:
        """Whether a trainer's process does."""
        return any(trainer.number == number for trainer in self.trainers)

    def has(self, process: Trainer | Engine) -> bool:
        """Whether it was not killed."""
        living = (*self.trainers, *self.others, *self.engines.values())
        return any(one is process for one in living)

    def _new_trainer(self, weights: Weights, party: str = "T") -> Trainer:
        self.constructing = party
        self._made += 1
        if not self.scenario.ranks:
            return Trainer(party, self._made, weights)
        gives = (NAMES, NAMES) if self.scenario.copies else (NAMES[:1], NAMES[1:])
        trainer = Trainer(party, self._made, weights, gives[0])
        trainer.other = Trainer(OTHER, self._made, weights, gives[1])
        self.others.append(trainer.other)
        for rank, its in enumerate((trainer, trainer.other)):
            its.sender.ranks = TwoRanks(self, rank, trainer)
        return trainer

    def _new_engine(self, name: str) -> Engine:
        self.constructing = name
        return self.scenario.engine(self, name, in_place=self.scenario.in_place)

    # -- what the code asks for -------------------------------------------------------------------

    @property
    def jobs(self) -> list[Task]:
        """The tasks that perform a refit."""
        return [task for task in self.tasks if task.job is not None]

    def spawn(self, name: str, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        return self.begin_task(name.removeprefix("refit-"), function).future

    def begin_task(self, party: str, function: Callable[[], Any], *, asks: bool = False) -> Task:
        maker = running()
        if maker is not None and maker.asks:  # the tasks of its refit have its number
            number = maker.ident.split("-")[1]
        else:
            self._begun[party] += 1
            number = str(self._begun[party])
        task = Task(party, f"{party}-{number}", function)
        task.asks = asks
        if task.job is not None:
            task.job.wanted = self.versions.get(self.request_of(task.job))
        self.tasks.append(task)
        self._of[task.greenlet] = task
        return task

    def request_of(self, job: Any) -> Request:
        """The refit that a job is for."""
        token = job.trainer.token if hasattr(job, "trainer") else job.endpoint.kept.token
        every = (*self.trainers, *self.others)
        found = [each.number for each in every if each.sender.kept.token == token]
        return (*found, 0)[0], job.number

    def task_of(self, current: greenlet.greenlet) -> Task | None:
        return self._of.get(current)

    def interrupts(self, task: Task) -> bool:
        """Whether anything can come between two steps of a task."""
        kinds = ("pause", "crash", "lose", "step", "drift", "drop", "load")
        return self.most > 0 and any(f"{kind} {task.party}" in self.left for kind in kinds)

    def connect(self, party: str, trainer: int) -> Connection:
        self._connected[party] += 1
        key = f"{party}#{self._connected[party]}"
        if self.people_came and (task := running()) is not None:
            key = task.ident.replace("-", "#")
        connection = self.connections[key] = Connection(key, trainer)
        self.recordings[key] = Recording()
        if self.next_play is not None:
            self.played[key], self.next_play = self.next_play, None
            connection.forged = deque(self.recordings[self.played[key]].down)
        return connection

    def overhear(self, place: tuple[int, int], data: bytes) -> None:
        self.stirred = True
        for key, connection in self.connections.items():
            if not connection.closed:
                self.recordings[key].bytes.setdefault(place, data)

    def commits(self, engine: Engine, version: int) -> None:
        """An engine is about to serve a version."""
        task = running()
        assert task is not None
        connection = (version, task.job._end.connection.key)
        check_commit(self, engine, task, connection)
        self.committed.add(connection)
        engine.own = None

    def fails(self, what: str) -> None:
        self.broken = self.broken or what

    # -- moving -----------------------------------------------------------------------------------

    def advance(self) -> None:
        """Runs what nothing can come between, up to where something can.

        Engines go first: what one of them does with its frames touches nobody else's, so that no
        order among engines, or between them and the trainer, leads anywhere else. What does is
        where the trainer reads next, what the driver does, and what goes wrong.
        """
        while self.broken is None:
            ready = (t for t in self.tasks if self.ready(t) and not self.chosen(t))
            task = next(ready, None)
            if task is None:
                ranks = self.trainer.sender.ranks
                if isinstance(ranks, TwoRanks) and self.paused != "T" and ranks.see_off():
                    continue
                break
            self.move(task)
            if self.interrupted is not None:
                break
        self.tasks = [task for task in self.tasks if not task.over]

    def move(self, task: Task) -> None:
        """Lets a task run until it stops again."""
        task.go()
        self.ran.add(task.party)
        self._after(task)
        if not task.over and not task.waits and task.party != self.paused:
            self.interrupted = task

    def ready(self, task: Task) -> bool:
        return not task.over and task.party != self.paused and (not task.waits or task.wakes())

    def bounds(self, task: Task) -> bool:
        """Whether time ends what it waits for; readers and who keeps them out wait for ever."""
        return task.party not in (self.paused, "R", "W", "C") and task.at != UNTIL_IT_GOES_ON

    def chosen(self, task: Task) -> bool:
        """Whether it matters when this one goes on: who asks, and whose turn it is at a lock."""
        if task.asks:
            return not (task.at == "wait" and task.succeeds())
        begins = not self.scenario.prompt and task.at == "start"
        return self.people_came and (begins or task.at in ("lock", "condition"))

    def people_come(self) -> None:
        """Everybody who asks for something at the same time; each begins when the search says."""
        self.people_came = True
        self.hellos_left = self.scenario.hellos
        for step in self.scenario.drivers:
            self.begin_task("D", lambda step=step: drive(self, step), asks=True)  # type: ignore[misc]
        engine = next(iter(self.engines.values()))
        for number in self.scenario.given_up:
            self.begin_task("C", lambda number=number: give_up(self, number), asks=True)  # type: ignore[misc]
        for _ in range(self.scenario.readers):
            self.begin_task("R", lambda: read(self, engine), asks=True)
        for _ in range(self.scenario.writers):
            self.begin_task("W", lambda: keep(engine), asks=True)

    def _after(self, task: Task) -> None:
        """Looks at what a task left behind."""
        for job in [t.job for t in self.jobs if t.party in TRAINERS and not t.killed]:
            if job.session.phase in (Phase.COMMIT, Phase.COMMITTED):
                self.decided.update((job.version, key) for key in job.session.peers)
        if task.over and not task.killed:
            check_end(self, task)
        if not self.known_way:
            check_engines(self)

    # -- what the driver and the outside do -------------------------------------------------------

    def begin(self) -> None:
        step = self.scenario.script[self.position]
        assert isinstance(step, Refit)
        check_last(self)
        self.position += 1
        self.refit += 1
        self.wrong_since = self.paused is not None
        self.clean_start = not self.tasks
        self.hellos_left = self.scenario.hellos
        self.asked = list(step.engines)
        self.to_ask = ["T", *(OTHER for _ in self.others[:1]), *step.engines]
        self.asked_tasks = []
        info = self.trainer.sender.prepare()
        self.number = info["number"] if step.given else None
        for name in step.engines:
            self.constructing = name
            self.engines[name].receiver.prepare(info)

    def ask(self, party: str) -> None:
        self.constructing = party
        self.to_ask.remove(party)
        step = self.scenario.script[self.position - 1]
        assert isinstance(step, Refit)
        if party == "T":
            self.offered[self.refit] = self.trainer.weights if self.trainer.whole else {}
            self.versions[self.trainer.number, self.trainer.sender.number + 1] = self.refit
            options = {
                "receivers": len(step.engines),
                "deadline_s": DEADLINE_S,
                "bucket_bytes": BUCKET_BYTES,
                "version": self.refit,
                "number": self.number,
            }
            self.trainer.sender.send(**options | step.options)
        elif party == OTHER:
            options = {"deadline_s": DEADLINE_S, "number": self.number}
            follow(self.others[-1].sender, **options)
        else:
            receiver = self.engines[party].receiver
            receiver.receive(deadline_s=DEADLINE_S, number=self.number)
        task = self.tasks[-1]
        task.job.wanted = self.refit
        self.asked_tasks.append(task)

    def time_passes(self) -> None:
        """Nobody can do anything before the next deadline, or the next time to say hello."""
        waiting = [
            t for t in self.jobs if t.party != self.paused and t.job.session.phase is Phase.DISCOVER
        ]
        if self.hellos_left and any(task.party not in TRAINERS for task in waiting):
            self.hellos_left -= 1
            self.now += HELLO_S
            return
        check_patience(self)
        self.now = math.floor(self.now) + DEADLINE_S + 1

    def cut_off(self, party: str) -> None:
        for connection in self.connections_of(party):
            connection.broken = True

    def connections_of(self, party: str) -> list[Connection]:
        if party not in TRAINERS:
            return [c for key, c in self.connections.items() if key.startswith(party)]
        number = self.trainer_of(party).number
        return [c for c in self.connections.values() if c.trainer == number]

    def crash(self, party: str) -> None:
        if self.paused == party:
            self.paused = None
        for task in [t for t in self.tasks if t.party == party]:
            task.kill()
        self.tasks = [task for task in self.tasks if not task.over]
        for connection in self.connections_of(party):
            if party in TRAINERS:
                connection.up.clear()
            else:
                connection.closed = True
        if party in TRAINERS:
            trainer = self._new_trainer(self.trainer_of(party).weights, party)
            setattr(self, "trainer" if party == "T" else "second", trainer)
        elif party == OTHER:
            self.others = [one for one in self.others if one is not self.trainer.other]
            self.trainer.other = None
            end: Any = self.trainer.sender.connection("ipc").end
            end.gone.append(f"{OTHER} has ended")
        else:
            self.engines[party] = self._new_engine(party)
        if party in self.to_ask:  # whoever asks finds nobody who knows of this refit
            self.to_ask.remove(party)

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
            canon.out.append((task.ident, task.at, task.waits, task.over))
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
    "scenario", "names", "tasks", "_of", "recordings", "digested", "read", "wire",
    "broken", "known_way", "policies", "generations",
}  # fmt: skip
Canon.stops_at(World)
