"""A named test double: an engine without a model, which can be made to misbehave at any moment.

A row continues its last token t with t+1, t+2, ..., one token a step; a step takes ``pause``
seconds. The first tokens of some rows do things, see below; and ``{"fake": {"acts": {moment:
act}}}`` does something whenever a method is called, or ``from_call`` on.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rl_backends import Completion, FailedRow
from rl_core.errors import DataError
from rl_hosting._messages import Channel, Reply, encode
from rl_hosting.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from rl_backends import Row

#: First tokens: the engine raises, the row fails, the process exits, it never ends.
RAISES, FAILS, EXITS, ENDLESS = range(900, 904)


def on_fire() -> None:
    raise OSError("the fake engine is on fire")


def interrupted() -> None:
    raise KeyboardInterrupt


def hang() -> None:
    while True:
        time.sleep(1)


def babble() -> None:
    while True:
        os.write(1, b"bla bla\n" * 1000)


def leave_things() -> None:
    """A child that holds all descriptors, a daemon in a session of its own, and shared memory."""
    if not os.fork():
        hang()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if not os.fork():
        os.setsid()
        hang()
    share_memory()
    time.sleep(1.2)  # so that it is seen
    hang()


mapped: list[mmap.mmap] = []


def share_memory() -> None:
    with open(f"/dev/shm/rl-fake-{os.getpid()}", "w+b") as file:
        file.truncate(4096)
        mapped.append(mmap.mmap(file.fileno(), 4096))


def map_memory(paths: Sequence[str]) -> None:
    """Maps those that there are."""
    for path in paths:
        with suppress(FileNotFoundError), open(path, "rb") as file:
            mapped.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def channel() -> Any:
    return next(found for found in gc.get_objects() if isinstance(found, Channel))


def say(data: bytes) -> None:
    channel()._end.sendall(data)


ACTS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hang,
    "babble": babble,
    "raise": on_fire,
    "exit": lambda: sys.exit(3),
    "interrupt": interrupted,
    "leave": leave_things,
    "share": share_memory,
    "share and hang": lambda: (share_memory(), hang()),
    "deaf": lambda: (channel()._end.shutdown(2), hang()),
}


class FakeEngine(Engine):
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.fake: dict[str, Any] = config.get("fake", {})
        self.calls: dict[str, int] = {}
        print("the fake engine starts", flush=True)
        self.act("start")
        map_memory(self.fake.get("maps", ()))
        if self.fake.get("refuses"):
            raise DataError("it does not like you", fix="be nicer")
        self.rows: dict[int, tuple[Row, int]] = {}
        self.cancelled: list[int] = []
        facts = {"pad_token_id": 0, "eos_token_ids": [1], "vocab_size": 1000}
        self.facts = {**facts, "max_model_len": 10_000, "pid": os.getpid()}
        self.facts |= self.fake.get("facts", {})
        if "unspeakable" in self.fake:
            self.facts["engine"] = self

    @classmethod
    def start(cls, config: Mapping[str, Any]) -> FakeEngine:
        return cls(config)

    def act(self, moment: str) -> None:
        self.calls[moment] = self.calls.get(moment, 0) + 1
        act = self.fake.get("acts", {}).get(moment)
        if self.calls[moment] < self.fake.get("from_call", {}).get(moment, 1):
            return
        if isinstance(act, bytes):
            say(act)
        elif act:
            ACTS[act]()

    def submit(self, rows: Sequence[Row]) -> None:
        self.act("submit")
        self.rows |= {row.key: (row, 0) for row in rows}

    def step(self) -> list[Any]:
        self.act("step")
        if self.fake.get("needs_rows"):
            assert self.rows, "there is nothing to decode"
        time.sleep(self.fake.get("pause", 0.0))
        ended = [done for key in list(self.rows) if (done := self.advance(key))]
        for done in ended:
            del self.rows[done.row]
            self.cancelled.append(done.row)
        wrong = self.fake.get("wrong")
        if not wrong or not ended:
            return ended
        [done, *_] = ended
        assert isinstance(done, Completion)
        return {
            "twice": [done, done],
            "gone": [*(replace(done, row=key) for key in self.cancelled[: -len(ended)]), done],
            "unknown": [replace(done, row=1 << 40)],
            "negative": [replace(done, row=-1)],
            "text": ["done"],
            "none": None,
            "object": [replace(done, token_ids=[object()])],
            "words": [replace(done, token_ids=["a"])],
            "short": [replace(done, logprobs=[])],
            "long": [replace(done, token_ids=[5] * 36, logprobs=[-1.0] * 36)],
        }[wrong]

    def advance(self, key: int) -> Completion | FailedRow | None:
        row, count = self.rows[key]
        first = row.token_ids[0]
        self.rows[key] = row, count + 1
        if first == RAISES:
            on_fire()
        elif first == FAILS:
            return FailedRow(key, DataError(f"row {row.index} is bad", row=row.index))
        elif first == EXITS:
            print("last words")
            os._exit(7)
        elif first != ENDLESS and count + 1 == row.budget:
            new = [(row.token_ids[-1] + i) % 1000 for i in range(1, row.budget + 1)]
            return Completion(key, new, [self.logprob()] * len(new), True)
        return None

    def logprob(self) -> float:
        return -1.0

    def cancel(self, keys: Collection[int]) -> None:
        self.act("cancel")
        if self.fake.get("needs_rows"):
            assert {*self.cancelled, *self.rows}.issuperset(keys), "it was never given these rows"
        self.cancelled += keys
        for key in keys:
            self.rows.pop(key, None)

    def call_workers(self, frame: bytes) -> list[bytes]:
        self.act("call_workers")
        return [encode(Reply())]

    def wake(self, tags: Sequence[str]) -> None:
        self.act("wake")

    def sleep(self, tags: Sequence[str], level: int) -> None:
        self.act("sleep")

    def reset_caches(self) -> bool:
        self.act("reset_caches")
        map_memory(self.fake.get("maps", ()))
        return True

    def shutdown(self) -> None:
        self.act("shutdown")
        print("the fake engine ends", flush=True)
