"""Processes of a test: each makes an object, and its methods are called there and raise here."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any, Self

import torch
from torch._C import _distributed_c10d as c10d

#: Seconds in which a process answers, unless something is wrong.
ANSWERS_S = 200.0


@cache
def warm_up() -> None:
    """Starts what a process has once, and keeps; others are forked from one that has imported."""
    multiprocessing.set_forkserver_preload(["rl_collective.collective"])
    multiprocessing.forkserver.ensure_running()
    multiprocessing.resource_tracker.ensure_running()
    c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Remote:
    """What ``make(*arguments, **options)`` returns, in a process of its own."""

    def __init__(self, make: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        warm_up()
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        what = (theirs, tempfile.gettempdir(), make, arguments, options)
        self.process = context.Process(target=_serve, args=what, daemon=True)
        self.process.start()
        theirs.close()

    def start(self, name: str, *arguments: Any, **options: Any) -> None:
        """Calls a method without waiting for it."""
        self.pipe.send((name, arguments, options))

    def result(self) -> Any:
        """What the method that was started returned."""
        assert self.pipe.poll(ANSWERS_S), "the process does not answer"
        ok, result = self.pipe.recv()
        if not ok:
            raise result
        return result

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.start(name, *arguments, **options)
            return self.result()

        return call

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.join(ANSWERS_S)
        assert self.process.exitcode is not None

    def stop(self) -> None:
        """Makes it hang; it can be killed still."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kills it, and closes what this side has of it. Idempotent."""
        if self.process is not None:
            self.kill()
            self.process.close()
            self.pipe.close()
            self.process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def _serve(
    pipe: Any,
    folder: str,
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """Answers calls until the process is killed."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    torch.set_num_threads(1)
    subject = make(*arguments, **options)
    while True:
        name, positional, named = pipe.recv()
        try:
            pipe.send((True, getattr(subject, name)(*positional, **named)))
        except Exception as error:
            pipe.send((False, error))
