"""An engine in a process of its own: calls, faults, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_engine
import psutil
import pytest
import torch
from fake_engine import ENDLESS, EXITS, FAILS, RAISES, STOPS, FakeGeneration

from rl_core.batch import BatchedDataDict
from rl_core.errors import (
    DataError,
    DeadlineError,
    IncompatiblePluginError,
    LifecycleError,
    WorkerDiedError,
    WorkerError,
)
from rl_hosting import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOON = 30.0


def prompts(*tokens: int) -> BatchedDataDict[Any]:
    ids = torch.tensor([[token] for token in tokens])
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.ones(len(tokens)).long()})


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(params=["started", "forked"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., FakeGeneration]]:
    made = []

    def build(**config: Any) -> FakeGeneration:
        hosting = {"preload": ["torch"]} if request.param == "forked" else {}
        made.append(FakeGeneration(hosting=hosting, **config))
        return made[-1]

    yield build
    for engine in made:
        engine.shutdown()


def test_many_callers_share_the_engine(start):
    engine = start()
    with ThreadPoolExecutor(32) as pool:
        outputs = list(pool.map(lambda i: engine.generate(prompts(i, i + 100)), range(20, 84)))
    for i, output in zip(range(20, 84), outputs, strict=True):
        assert output["output_ids"].tolist() == [
            [t, t + 1, t + 2, t + 3, t + 4] for t in (i, i + 100)
        ]


def test_a_row_fails_alone_and_an_engine_that_fails_goes_on(start):
    engine = start()
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(engine.generate, prompts(5)) for _ in range(3)]
        with pytest.raises(DataError, match="row 1 is bad") as caught:
            engine.generate(prompts(6, FAILS))
        assert isinstance(caught.value, WorkerError)
        assert "the fake engine starts" in caught.value.details["log"]
        for call in good:
            assert call.result(SOON)["generation_lengths"].tolist() == [4]
    with pytest.raises(OSError, match="on fire"):
        engine.generate(prompts(RAISES))
    assert engine.generate(prompts(5))["output_ids"].tolist() == [[5, 6, 7, 8, 9]]


def test_a_process_that_ends_fails_the_calls_in_it_with_its_last_words(start):
    engine = start()
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(engine.generate, prompts(ENDLESS)) for _ in range(3)]
        until(lambda: len(engine._rows._rows) == 3)
        with pytest.raises(WorkerDiedError, match="last words"):
            engine.generate(prompts(EXITS))
        for other in others:
            with pytest.raises(WorkerDiedError, match="exit status 7"):
                other.result(SOON)
    with pytest.raises(WorkerDiedError):
        engine.generate(prompts(5))


def test_a_process_that_is_stopped_is_given_up_by_its_callers(start):
    engine = start(call_deadline_s=1.0)
    with pytest.raises(DeadlineError, match="call_deadline_s"):
        engine.generate(prompts(STOPS))
    started = time.monotonic()
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        engine.generate(prompts(5))
    assert time.monotonic() - started < 10


def test_rows_that_nobody_reads_are_taken_back(start):
    engine = start(fake={"pause": 0.01})

    async def leave() -> None:
        rows = engine.generate_async(prompts(5, ENDLESS, ENDLESS))
        async for row, _ in rows:
            assert row == 0
            break
        await rows.aclose()

    asyncio.run(leave())
    engine.finish_generation()  # which waits for rows that are decoded
    assert not engine._rows.busy


def test_a_refusal_to_start_is_an_error_of_its_class(start):
    with pytest.raises(DataError, match="does not like you"):
        start(fake={"refuses": True})


@pytest.mark.parametrize("moment", ["idle", "decoding"])
def test_a_driver_that_is_killed_takes_its_engine_with_it(moment, tmp_path):
    code = f"""
        import sys, threading, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from fake_engine import FakeGeneration, ENDLESS
        from test_hosting import prompts
        engine = FakeGeneration()
        if {moment!r} == "decoding":
            threading.Thread(target=engine.generate, args=(prompts(ENDLESS),), daemon=True).start()
            time.sleep(0.3)
        print(engine.pid, flush=True)
        time.sleep(60)
    """
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    driver.stdout.close()
    until(lambda: not psutil.pid_exists(pid))


def test_a_forked_child_does_not_end_the_engine_and_cannot_call_it(start):
    engine = start()
    child = os.fork()
    if not child:
        try:
            engine._process.call("reset_caches", 1.0)
        except LifecycleError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.generate(prompts(5)).size == 1


def test_a_large_frame_reaches_a_busy_engine(start):
    engine = start(fake={"pause": 0.2}, max_new_tokens=3)
    with ThreadPoolExecutor(2) as pool:
        small = pool.submit(engine.generate, prompts(5))
        ids = torch.full((400, 9000), 7)
        large = BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((400,), 9000)})
        assert engine.generate(large)["generation_lengths"].unique().tolist() == [3]
        small.result(SOON)


def test_another_version_of_the_wire_is_refused(start, monkeypatch):
    monkeypatch.setattr(wire, "WIRE", 99)
    with pytest.raises(IncompatiblePluginError, match=r"version 1 .* this one 99"):
        FakeGeneration()


def test_nonsense_on_the_wire_ends_the_calls_by_name(start):
    engine = start()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, prompts(ENDLESS))
        until(lambda: engine._rows.busy)
        engine._process._channel._end.shutdown(0)
        with pytest.raises(WorkerDiedError):
            call.result(SOON)


def test_the_engine_ends_with_its_owner_and_leaves_nothing(start):
    engine = start()
    pid, directory = engine.pid, engine._process._owned[3]
    assert os.path.isdir(directory)
    engine.shutdown()
    assert not psutil.pid_exists(pid)
    assert not os.path.exists(directory)
    assert fake_engine.SIZE
