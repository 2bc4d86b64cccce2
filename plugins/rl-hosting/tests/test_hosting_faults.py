"""An engine that dies, hangs or misbehaves at any moment: its calls fail by name, and soon."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_backend import SOON, environment, prompts, until
from fake_engine import ENDLESS
from patience import enough_for

from rl_core.errors import (
    DeadlineError,
    WorkerDiedError,
    WorkerError,
)
from rl_hosting._fork_client import ForkedProcess

NAME = "fake engine"


def abandon(engine: Any) -> None:
    """Leaves a call, then makes another."""

    async def leave() -> None:
        rows = engine.generate_async(prompts(5, ENDLESS))
        async for _ in rows:
            break
        await rows.aclose()

    asyncio.run(leave())
    engine.generate(prompts(5))


def doze(engine: Any) -> None:
    engine.finish_generation()
    engine.prepare_for_generation()


#: What makes a driver wait for a method of the engine.
CALLS: dict[str, Callable[[Any], Any]] = {
    "submit": lambda engine: engine.generate(prompts(5)),
    "step": lambda engine: engine.generate(prompts(5, 6)),
    "cancel": abandon,
    "sleep": doze,
    "wake": doze,
    "reset_caches": lambda engine: engine.invalidate_kv_cache(),
    "call_workers": doze,
}
#: What becomes of a process: a word of the error.
DEATHS = {
    "kill": "exit status -9",
    "exit": "exit status 1",
    "interrupt": "exit status 1",
    "deaf": "closed its socket",
}


#: An engine with a fork server of its own.
ALONE = {"environment": {**environment(), "RL_ALONE": "1"}}
LATER = {"from_call": {"wake": 2}}


@pytest.mark.parametrize(
    ("moment", "act"),
    [
        *((moment, act) for moment in CALLS for act in ("kill", "exit")),
        ("step", "interrupt"),
        ("sleep", "interrupt"),
        ("step", "deaf"),
        ("sleep", "deaf"),
    ],
)
def test_an_engine_that_dies_fails_the_call(start, moment, act):
    engine = start(fake={"acts": {moment: act}, **LATER})
    with pytest.raises(WorkerDiedError, match=f"(?s){NAME}.*{DEATHS[act]}") as caught:
        CALLS[moment](engine)
    assert "the fake engine starts" in caught.value.details["log"]
    with pytest.raises(WorkerDiedError, match=DEATHS[act]):
        engine.invalidate_kv_cache()
    assert not psutil.pid_exists(engine.pid)


@pytest.mark.parametrize(
    ("moment", "act"),
    [
        *((moment, "hang") for moment in CALLS),
        *((moment, "stop") for moment in ("step", "wake", "call_workers")),
        ("step", "babble"),
    ],
)
def test_an_engine_that_hangs_fails_the_call(start, moment, act):
    engine = start(fake={"acts": {moment: act}, **LATER}, call_deadline_s=60.0)
    engine.answer_s = engine.silence_s = engine._remote._answer_s = 0.5  # once it is awake
    errors = (WorkerDiedError, DeadlineError)
    with pytest.raises(errors, match=f"(?s){NAME}.*(no sign of life|did not answer)") as caught:
        CALLS[moment](engine)
    assert caught.value.details["log"]


@pytest.mark.parametrize("moment", CALLS)
def test_an_engine_that_raises_fails_the_call_and_goes_on(start, moment):
    engine = start(fake={"acts": {moment: "raise"}, **LATER})
    with pytest.raises(OSError, match="on fire") as caught:
        CALLS[moment](engine)
    assert isinstance(caught.value, WorkerError)
    assert "the fake engine starts" in caught.value.details["log"]
    assert psutil.pid_exists(engine.pid)


def test_shared_memory_goes_with_an_engine_that_is_killed_as_soon_as_it_is_ready(start):
    engine = start(fake={"acts": {"start": "share"}})
    memory = Path(f"/dev/shm/rl-fake-{engine.pid}")
    assert memory.exists()
    os.kill(engine.pid, signal.SIGKILL)
    engine.shutdown()
    assert not memory.exists()


def test_memory_that_an_engine_just_made_is_removed_with_it_when_the_driver_kills_it(start):
    engine = start(fake={"acts": {"reset_caches": "share and hang"}})
    memory = Path("/dev/shm", f"rl-fake-{engine.pid}")
    engine._process.tell("reset_caches")
    until(lambda: str(memory) in Path(f"/proc/{engine.pid}/maps").read_text())
    engine._process.give_up("is in the way")  # perhaps before the fork server has looked
    assert not memory.exists()


@pytest.mark.parametrize("end", ["is killed", "is closed"])
def test_an_engine_removes_only_the_shared_memory_that_it_made(start, request, end):
    other = start(fake={"acts": {"start": "share"}})
    name = f"rl-fake-test-{os.getpid()}"
    early, late, held = (Path(f"/dev/shm/{name}-{when}") for when in ("early", "late", "held"))
    request.addfinalizer(lambda: [path.unlink() for path in (early, late, held)])
    early.write_bytes(b"of the user")
    kept = [early, late, held, Path(f"/dev/shm/rl-fake-{other.pid}")]
    engine = start(fake={"acts": {"start": "share"}, "maps": list(map(str, kept))})
    late.write_bytes(b"of the user, beside a running engine")
    with held.open("w+b") as file:
        file.write(b"of the driver, which closes it before the engine")
        file.flush()
        engine.invalidate_kv_cache()
    if end == "is killed":
        os.kill(engine.pid, signal.SIGKILL)
    engine.shutdown()
    assert not Path(f"/dev/shm/rl-fake-{engine.pid}").exists()
    assert [path for path in kept if not path.exists()] == []


def test_shared_memory_that_another_engine_has_outlives_the_one_that_made_it(start, request):
    maker = start(fake={"acts": {"start": "share"}})
    cache = Path(f"/dev/shm/rl-fake-{maker.pid}")
    request.addfinalizer(cache.unlink)
    engine = start(fake={"maps": [str(cache)]})
    engine.invalidate_kv_cache()
    os.kill(maker.pid, signal.SIGKILL)
    maker.shutdown()
    assert cache.exists()


def kept_open(pid: int) -> int:
    """Descriptors of a process, but for files of ``/proc``, which a look at processes opens."""
    found = 0
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found += not os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith("/proc/")
    return found


def test_an_engine_too_many_is_refused_and_the_others_go_on(start, imported):
    engine, server = start(), imported._process.pid
    limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
    used = kept_open(server)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (used + 4, limits[1]))
    try:
        with pytest.raises(WorkerDiedError, match=r"did not fork: .*file descriptors"):
            start()
    finally:
        resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
    for one in (engine, start()):
        assert one.generate(prompts(5)).size == 1
    assert kept_open(server) == used + 3


def test_a_fork_server_may_open_all_files_that_it_can_and_its_engines_as_many_as_the_driver(start):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        engine = start(hosting=ALONE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    server = psutil.Process(engine.pid).ppid()
    assert resource.prlimit(server, resource.RLIMIT_NOFILE) == (hard, hard)
    assert resource.prlimit(engine.pid, resource.RLIMIT_NOFILE) == (hard - 1, hard)


def test_an_engine_beside_a_stopped_fork_server_is_closed_soon(start):
    soon = enough_for(start(hosting=ALONE).shutdown, least=5.0)
    engine = start(hosting=ALONE)
    psutil.Process(psutil.Process(engine.pid).ppid()).suspend()
    begin = time.monotonic()
    engine.shutdown()
    assert time.monotonic() - begin < soon
    until(lambda: not psutil.pid_exists(engine.pid))


def test_an_engine_that_is_forked_too_late_is_named_with_the_time_it_was_given(start, monkeypatch):
    wait_for_fork = ForkedProcess.wait_for_fork

    def late(self: Any, timeout_s: float) -> None:
        wait_for_fork(self, SOON)
        time.sleep(timeout_s)

    monkeypatch.setattr(ForkedProcess, "wait_for_fork", late)
    with pytest.raises(DeadlineError, match="did not answer start within 1 s"):
        start(fake={"acts": {"start": "hang"}}, hosting={"start_timeout_s": 1.0})
