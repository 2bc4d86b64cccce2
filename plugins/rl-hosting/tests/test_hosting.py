"""A hosted engine: its calls, its ends, its log, and children of its driver."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
import torch
from fake_backend import HERE, SOON, prompts, until
from fake_engine import ENDLESS, EXITS, FAILS, RAISES
from patience import enough_for

from rl_core.batch import BatchedDataDict
from rl_core.errors import (
    DataError,
    DeadlineError,
    LifecycleError,
    RLError,
    WorkerDiedError,
    WorkerError,
)

# -- calls -----------------------------------------------------------------------------------------


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


def test_a_call_that_is_late_says_so_with_the_log_and_the_engine_goes_on(start):
    seconds = enough_for(lambda: start().generate(prompts(5)), least=3.0)
    engine = start(call_deadline_s=seconds, fake={"pause": 0.01})
    with pytest.raises(DeadlineError, match="rows in the engine: 1") as caught:
        engine.generate(prompts(ENDLESS))
    assert "the fake engine starts" in caught.value.details["log"]
    assert engine.generate(prompts(5)).size == 1


def test_a_hung_engine_is_found_out_by_calls_that_are_shorter_than_its_patience(start):
    engine = start(call_deadline_s=0.3, fake={"acts": {"step": "hang"}})
    engine.silence_s = 1.5  # once it is awake

    def gives_up() -> bool:
        with pytest.raises((DeadlineError, WorkerDiedError)) as caught:
            engine.generate(prompts(5))
        return "no sign of life" in str(caught.value)

    until(gives_up)
    assert not psutil.pid_exists(engine.pid)


def test_a_large_frame_reaches_a_busy_engine(start):
    engine = start(fake={"pause": 0.1}, max_new_tokens=3)
    with ThreadPoolExecutor(2) as pool:
        small = pool.submit(engine.generate, prompts(5))
        ids = torch.full((400, 9000), 7)
        large = BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((400,), 9000)})
        assert engine.generate(large)["generation_lengths"].unique().tolist() == [3]
        small.result(SOON)


def test_an_engine_that_is_stopped_for_a_moment_goes_on(start):
    engine = start(fake={"pause": 0.05})
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, prompts(*range(5, 30)))
        until(lambda: engine._rows.busy)
        os.kill(engine.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(engine.pid, signal.SIGCONT)
        assert call.result(SOON).size == 25


# -- how it starts ---------------------------------------------------------------------------------


def test_a_refusal_to_start_is_an_error_of_its_class(start):
    with pytest.raises(DataError, match="does not like you"):
        start(fake={"refuses": True})


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("kill", WorkerDiedError),
        ("exit", WorkerDiedError),
        ("stop", DeadlineError),
        ("deaf", WorkerDiedError),
        ("raise", OSError),
        ("hang", DeadlineError),
        ("babble", DeadlineError),
    ],
)
def test_a_start_that_fails_is_told_by_name_and_in_time(start, act, error):
    late = {"start_timeout_s": enough_for(start, least=3.0)} if error is DeadlineError else {}
    with pytest.raises(error, match=r"(?s)fake engine|FakeEngine") as caught:
        start(fake={"acts": {"start": act}}, hosting=late)
    assert caught.value.details["log"]


# -- how it ends -----------------------------------------------------------------------------------


def test_the_engine_ends_with_its_owner_and_leaves_nothing(start):
    engine = start()
    pid, directory = engine.pid, engine._process._owned[3]
    assert os.path.isdir(directory)
    engine.shutdown()
    assert not psutil.pid_exists(pid)
    assert not os.path.exists(directory)
    assert engine.shutdown()  # once more


@pytest.mark.parametrize("act", ["kill", "raise", "exit"])
def test_a_shutdown_that_fails_in_the_engine_ends_it(start, act):
    engine = start(fake={"acts": {"shutdown": act}})
    engine.shutdown()
    assert not psutil.pid_exists(engine.pid)


def test_an_engine_that_nobody_has_any_more_ends(imported, start):
    pid = start().pid
    start.__closure__[0].cell_contents.clear()  # what the fixture keeps
    gc.collect()
    until(lambda: not psutil.pid_exists(pid))


def test_an_engine_outlives_the_thread_that_built_it(start):
    built = []
    thread = threading.Thread(target=lambda: built.append(start()))
    thread.start()
    thread.join()
    time.sleep(1)
    assert built[0].generate(prompts(5)).size == 1


def test_engines_leave_no_descriptor_in_the_driver(start):
    def live() -> int:
        engine = start()
        engine.generate(prompts(5))
        engine.shutdown()
        return psutil.Process().num_fds()

    live()
    before = live()
    assert max(live() for _ in range(4)) <= before


def test_the_interpreter_ends_with_calls_in_flight(imported):
    code = f"""
        import sys, threading
        sys.path.insert(0, {HERE!r})
        from fake_backend import FakeGeneration, prompts, until
        from fake_engine import ENDLESS
        engine = FakeGeneration()
        for _ in range(3):
            threading.Thread(target=engine.generate, args=(prompts(ENDLESS),), daemon=True).start()
        until(lambda: engine._rows.busy)
        print(engine.pid, flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=SOON
    )
    assert done.returncode == 0, done.stderr
    until(lambda: not psutil.pid_exists(int(done.stdout)))


# -- its log ---------------------------------------------------------------------------------------


def test_what_it_prints_is_shown_and_kept(start, capfd):
    engine = start(hosting={"verbose": True})
    with pytest.raises(WorkerDiedError, match="last words") as caught:
        engine.generate(prompts(EXITS))
    assert "last words" in caught.value.details["log"]
    engine.shutdown()
    assert "the fake engine starts\nlast words" in capfd.readouterr().err


def test_the_log_of_an_engine_that_prints_without_end_is_cut(start):
    engine = start(fake={"acts": {"step": "babble"}})
    log = engine._process._log
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, prompts(5))
        until(lambda: os.fstat(log.fileno()).st_size > 400 << 20, "400 MiB of a log")
        os.kill(engine.pid, signal.SIGSTOP)
        until(lambda: os.fstat(log.fileno()).st_blocks * 512 < 100 << 20, "the cut")
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="bla bla"):
            call.result(SOON)


# -- children of the driver ------------------------------------------------------------------------


@pytest.mark.parametrize("decodes", [False, True])
def test_a_forked_child_does_not_end_the_engine_and_cannot_call_it(start, decodes):
    engine = start()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, prompts(ENDLESS)) if decodes else None
        until(lambda: engine._rows.busy or not decodes)
        child = os.fork()
        if not child:
            signal.alarm(20)
            wrong = 0
            for method in ("generate", "finish_generation", "prepare_for_generation", "shutdown"):
                with suppress(LifecycleError):
                    wrong += bool(getattr(engine, method)(*[prompts(5)][: method == "generate"]))
            del engine
            gc.collect()
            os._exit(wrong)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        if call:
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(RLError):
                call.result(SOON)
        else:
            assert engine.generate(prompts(5)).size == 1


def test_a_forked_child_that_lives_on_keeps_nothing(start):
    engine = start()
    child = os.fork()
    if not child:
        time.sleep(600)
    try:
        engine.shutdown()
        assert not psutil.pid_exists(engine.pid)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
