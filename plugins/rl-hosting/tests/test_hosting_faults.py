"""An engine that dies, hangs or misbehaves at any moment: its calls fail by name, and soon."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from fake_backend import prompts, until
from fake_engine import ENDLESS

from rl_core.errors import (
    DeadlineError,
    WorkerDiedError,
    WorkerError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

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


@pytest.mark.parametrize("moment", ["step", "wake", "call_workers"])
def test_an_engine_that_is_stopped_fails_the_call(start, moment):
    engine = start(fake={"acts": {moment: "stop"}, **LATER}, call_deadline_s=60.0)
    with pytest.raises(
        WorkerDiedError, match=rf"(?s){NAME}.*is stopped \({engine.pid}\)"
    ) as caught:
        CALLS[moment](engine)
    assert "the fake engine starts" in caught.value.details["log"]
    assert not psutil.pid_exists(engine.pid)


@pytest.mark.parametrize(
    ("moment", "act"), [*((moment, "hang") for moment in CALLS), ("step", "babble")]
)
def test_an_engine_that_hangs_fails_the_call(start, moment, act):
    engine = start(fake={"acts": {moment: act}, **LATER}, call_deadline_s=60.0)
    engine.answer_s = engine.silence_s = engine._remote._answer_s = 0.5  # once it is awake
    errors = (WorkerDiedError, DeadlineError)
    with pytest.raises(errors, match=f"(?s){NAME}.*(no sign of life|was not answered)") as caught:
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
    engine._process.give_up("is in the way")  # long before the fork server looks
    assert not memory.exists()
