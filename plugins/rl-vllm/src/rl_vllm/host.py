"""The engine's own process: ``python -m rl_vllm.host FD PARENT``.

Answers the calls that come through a pipe, one at a time, until the pipe is closed. It ends when
its parent is gone, however that ended and whatever it is doing: a thread of its own looks.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.errors import LifecycleError
from rl_vllm.shared_memory import SharedMemory
from rl_vllm.wire import Prompt, Reply, Request, decode, encode, failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_vllm.engine import Engine

__all__ = ["END_LOOK_S", "SOCKETS", "VLLMS_SOCKETS", "Host", "main", "run_host"]

#: Variables with the directory of the engine's sockets, which vLLM itself leaves behind: the first
#: tells vLLM, the second that it is ours to remove.
VLLMS_SOCKETS, SOCKETS = "VLLM_RPC_BASE_PATH", "RL_VLLM_SOCKETS"

#: Seconds between two looks at whether the parent is still there.
END_LOOK_S = 0.5
#: Seconds between two signs of life while rows are generated.
_ALIVE_S = 1.0


class Host:
    """What can be called.

    Args:
        pipe: To the backend.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._engine: Engine | None = None
        self.shared_memory: SharedMemory | None = None
        self._now = Request("")
        self.name = f"the vLLM engine (pid {os.getpid()})"

    def serve(self) -> None:
        """Answers until the pipe is closed."""
        try:
            while True:
                self._now = decode(self._pipe.recv_bytes(), type=Request)
                if self._now.method != "abort":  # of a call that was over already
                    self._answer(self._now)
        except (EOFError, OSError):
            return
        finally:
            if self._engine is not None:
                # vLLM collects garbage twice here, a second each; this process ends anyway.
                gc.collect = _nothing
                self._engine.shutdown()

    def _answer(self, request: Request) -> None:
        methods: dict[str, Callable[..., Any]] = {
            "start": self.start,
            "generate": self.generate,
            "refit": self.refit,
            "wake": self.wake,
            "sleep": self.sleep,
            "reset_caches": self.reset_caches,
        }
        try:
            reply = Reply(methods[request.method](**request.arguments))
        except Exception as error:
            reply = failure(error, self.name)
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        reply.number = self._now.number
        self._pipe.send_bytes(encode(reply))

    @property
    def engine(self) -> Engine:
        """The engine, once it is started."""
        if self._engine is None:
            raise LifecycleError(f"{self.name} was not started", fix="call start first")
        return self._engine

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Loads the model; the facts of it."""
        from rl_vllm.engine import start

        self._engine, facts = start(config)
        self.shared_memory = SharedMemory(os.getpid())
        return facts

    def generate(self, prompts: list[Any], sampling: dict[str, Any]) -> None:
        """Completes rows and sends each as soon as it is done."""
        rows = msgspec.convert(prompts, list[Prompt])
        spoke, made = time.monotonic(), 0
        for done in self.engine.complete(rows, sampling):
            alive = time.monotonic() - spoke > _ALIVE_S and self.engine.tokens_made != made
            if done or alive:
                self._send(Reply(rows=done, last=False))
                spoke, made = time.monotonic(), self.engine.tokens_made
            if self._pipe.poll(0):
                self._pipe.recv_bytes()  # the only thing said now is that nobody reads any more
                self.engine.abort()
                return

    def refit(self, call: bytes) -> list[bytes]:
        """Calls every worker's :class:`rl_vllm.worker.WorkerRefits`; an answer from each."""
        return self.engine.call_workers("rl_refit", call)

    def wake(self, tags: list[str]) -> None:
        """Takes memory again."""
        self.engine.wake(tags)

    def sleep(self, level: int) -> None:
        """Gives memory back."""
        self.engine.sleep(level)

    def reset_caches(self) -> bool:
        """Forgets the keys and values of prompts seen so far."""
        return self.engine.reset_caches()


def _nothing(generation: int = 2) -> int:
    del generation
    return 0


def _remove_sockets() -> None:
    if SOCKETS in os.environ:
        shutil.rmtree(os.environ[SOCKETS], ignore_errors=True)


def end_with(parent: int, host: Host) -> None:
    """Ends this process, and all that it started, at once when the parent is gone.

    The process leads a session of its own, so that its group has no other processes in it.
    """

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(END_LOOK_S)
        try:
            _remove_sockets()
            # An engine that has not even started has nothing from others.
            (host.shared_memory or SharedMemory(os.getpid())).remove()
        finally:
            os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, name="end-with-parent", daemon=True).start()


def run_host(pipe: int, parent: int) -> None:
    """Answers what comes through a pipe, until that is closed or the parent is gone; then ends."""
    host = Host(Connection(pipe))
    end_with(parent, host)
    status = 1
    try:
        host.serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    _remove_sockets()
    sys.stdout.flush()
    os._exit(status)  # with vLLM imported, an interpreter takes three seconds to clear its modules


def main() -> None:
    """The process."""
    run_host(*map(int, sys.argv[1:]))


if __name__ == "__main__":
    main()
