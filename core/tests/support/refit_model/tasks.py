"""The threads, locks and clock of the refit's own code, in the hands of a scheduler.

A refit's thread becomes a greenlet that stops wherever it would wait, and wherever a double of the
model says that something may come between. Nothing else of the code is changed.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import itertools
import secrets
import types
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import greenlet

from refit_model.promises import check_frame
from rl_core.refit import _job, _send_job
from rl_core.refit import sender as sender_module
from rl_core.refit._job import Runtime
from rl_core.refit.frames import Channel
from rl_core.refit.hashing import Hasher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from refit_model.world import World

#: The world that the code runs in now.
_now: list[World] = []


class Task:
    """A thread of one process.

    Attributes:
        party: Whose.
        job: The refit that it performs.
        at: Where it stopped.
        waits: True while it waits for something outside of it, False in the middle of a step.
        wakes: Whether it can go on, if it waits.
        over: It ended, or was killed.
        killed: Its process is dead; it only unwinds, and nothing that it does has effects.
    """

    def __init__(self, party: str, function: Callable[[], Any]) -> None:
        self.party = party
        self.job: Any = getattr(function, "__self__", None)
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.at = "start"
        self.waits = True
        self.wakes: Callable[[], bool] = lambda: True
        self.killed = False
        self.over = False
        self._function = function
        self.greenlet = greenlet.greenlet(self._run)

    def _run(self) -> None:
        try:
            result = self._function()
        except BaseException as error:
            self.future.set_exception(error)
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
            self.future.cancel()

    @property
    def failed(self) -> bool:
        return self.killed or (self.over and self.future.exception() is not None)


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


class Lock:
    """A lock of a process; whoever waits for it wakes when it is free or time has passed."""

    def __init__(self) -> None:
        self.holder: Task | None = None
        self.held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world, task = _now[0], running()
        end = world.now + timeout
        while self.held:
            if task is None or timeout == 0 or world.now >= end or task.killed:
                return False
            task.stop("lock", lambda: not self.held or world.now >= end)
        self.held, self.holder = True, task
        return True

    def release(self) -> None:
        self.held, self.holder = False, None


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
        party = _now[0].constructing if task is None else task.party
        self._drawn[party] += 1
        name = f"{party} {self._drawn[party]}"
        return hashlib.blake2b(name.encode(), digest_size=count).digest()


def _hooked(honest: Callable[[Hasher], Any]) -> Callable[[Hasher], Any]:
    def begin(hasher: Hasher) -> Any:
        task = running()
        reads = task is not None and task.party != "T"  # what it has not written itself
        if reads:
            point("hash")
        result = honest(hasher)
        _now[0].digested.update(zip(result(), map(bytes, hasher._blocks), strict=True))
        if reads:
            point("hashed")
        return result

    return begin


def _noted(decode: Callable[..., Any]) -> Callable[..., Any]:
    def decodes(channel: Channel, frame: bytes) -> Any:
        message = decode(channel, frame)
        check_frame(_now[0], frame)
        return message

    return decodes


def product_in_hand() -> ExitStack:
    """Puts what :data:`WORLD` does not have of the refit's code into the hands of a world."""
    stack = ExitStack()
    ticks = itertools.count()

    def enter(module: Any, name: str, value: object) -> None:
        if hasattr(module, name):
            stack.enter_context(patch.object(module, name, value))

    # Whether to look is asked of this clock, which always says yes.
    enter(_job, "time", types.SimpleNamespace(monotonic=lambda: float(next(ticks))))
    # It divides by seconds, of which none pass here.
    enter(_send_job.SendJob, "_report", lambda *given: types.SimpleNamespace(as_dict=dict))
    enter(sender_module, "_meeting_point", dict)
    enter(Hasher, "begin", _hooked(Hasher.begin))
    enter(Channel, "decode", _noted(Channel.decode))
    enter(secrets, "token_hex", lambda n=32: _now[0].names.bytes(n).hex())
    enter(secrets, "token_bytes", lambda n=32: _now[0].names.bytes(n))
    return stack


def inhabit(world: World | None) -> Iterator[None] | None:
    """From now on the code runs in this world."""
    _now[:] = [] if world is None else [world]
    return None
