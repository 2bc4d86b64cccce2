"""The threads, locks and clock of the refit's own code, in the hands of a scheduler.

A refit's thread becomes a greenlet that stops wherever it would wait, and wherever a double of the
model says that something may come between. Nothing else of the code is changed.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import greenlet

from rl_core.errors import WorkerDiedError
from rl_core.weights.job import Runtime
from rl_core.weights.protocol.timing import DRIVER_GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from refit_model.world import World

DEADLINE_S = 10.0
TRAINERS = ("T", "U")
#: The other rank of the trainer T.
OTHER = "T1"
#: Where a task stands that calls somebody who is paused.
UNTIL_IT_GOES_ON = "until it goes on"

#: The world that the code runs in now.
_now: list[World] = []


class Task:
    """A thread of one process.

    Attributes:
        party: Whose.
        ident: Tells it from the others of its party.
        job: The refit that it performs, if it does.
        asks: It asks for a refit or for generation, and moves when the search says so.
        succeeds: Whether all calls that it waits for have, so that it only has to end.
        hears: Whether there is something new for one that performs none.
        deadline: When it must have ended.
        at: Where it stopped.
        waits: True while it waits for something outside of it, False in the middle of a step.
        wakes: Whether it can go on, if it waits.
        over: It ended, or was killed.
        killed: Its process is dead; it only unwinds, and nothing that it does has effects.
    """

    def __init__(self, party: str, ident: str, function: Callable[[], Any]) -> None:
        self.party = party
        self.ident = ident
        self.asks = False
        self.succeeds: Callable[[], bool] = lambda: False
        self.hears: Callable[[], bool] | None = None
        self.job: Any = getattr(function, "__self__", None)
        grace_s = 0.0 if self.job else 2 * DRIVER_GRACE_S
        self.deadline = _now[0].now + DEADLINE_S + grace_s
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.at = "start"
        self.waits = True
        self.wakes: Callable[[], bool] = lambda: True
        self.killed = False
        self.over = False
        self._function = function
        maker = running()  # a task that another one begins is the scheduler's like that one
        self.greenlet = greenlet.greenlet(self._run, maker and maker.greenlet.parent)

    def _run(self) -> None:
        try:
            result = self._function()
        except BaseException as error:
            self.future.set_exception(gone(self.party) if self.killed else error)
        else:
            self.future.set_result(result)
        self.over = True

    def go(self) -> None:
        """Runs until it stops again."""
        self.greenlet.switch()

    def stop(self, at: str, wakes: Callable[[], bool] | None = None) -> None:
        """Called by the task itself."""
        if self.killed:
            return
        self.at, self.waits = at, wakes is not None
        self.wakes = wakes or (lambda: True)
        self.greenlet.parent.switch()
        if self.killed:
            raise greenlet.GreenletExit

    def kill(self) -> None:
        """The process is gone. What is on its stack is unwound without effects."""
        self.killed = self.over = True
        if self.greenlet:
            self.greenlet.throw()
        elif not self.greenlet.dead:
            self.future.set_exception(gone(self.party))

    def has_news(self) -> bool:
        """Whether one that looks now and then would see something."""
        if self.job is None:
            return self.hears is not None and self.hears()
        end = getattr(self.job, "_end", None)
        connection = getattr(end, "connection", None)
        return bool(self.job.given_up or (connection and (connection.down or end.lost())))

    @property
    def failed(self) -> bool:
        return self.killed or (self.over and self.future.exception() is not None)


def gone(party: str) -> WorkerDiedError:
    """What a driver hears of a process that is gone."""
    return WorkerDiedError(f"{party} is gone")


def world() -> World:
    """The one that the code runs in."""
    return _now[0]


def running() -> Task | None:
    """The task whose code this is."""
    return _now[0].task_of(greenlet.getcurrent()) if _now else None


def point(at: str) -> None:
    """Here something may come between, if a task runs this and its world still has faults."""
    task = running()
    if task is not None and _now[0].interrupts(task):
        task.stop(at)


def dead() -> bool:
    """Whether the process that runs this is dead."""
    task = running()
    return task is not None and task.killed


def _spawn(
    name: str, function: Callable[[], Any], stop: Callable[[], None] | None = None
) -> concurrent.futures.Future[Any]:
    """Refits are tasks; what else has a thread is done at once."""
    if name.startswith("refit-"):
        return _now[0].spawn(name, function)
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result(function())
    return future


#: What the parties' refits take from outside of them: the world that the code runs in.
WORLD = Runtime(clock=lambda: _now[0].now, spawn=_spawn, transport=lambda name: _now[0].wire)


class Names:
    """Secrets that tell who drew them and which one it is, the same in every run."""

    def __init__(self) -> None:
        self._drawn: Counter[str] = Counter()

    def bytes(self, count: int) -> bytes:
        task = running()
        who = _now[0].constructing if task is None else task.ident
        self._drawn[who] += 1
        name = f"{who} {self._drawn[who]}"
        return hashlib.blake2b(name.encode(), digest_size=count).digest()


def inhabit(world: World | None) -> Iterator[None] | None:
    """From now on the code runs in this world."""
    _now[:] = [] if world is None else [world]
    return None
