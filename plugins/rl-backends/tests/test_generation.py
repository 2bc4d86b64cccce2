"""What the base class of generation backends promises for any engine."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import torch
from counting_engine import CountingEngine, collect
from prompt_rows import prompts
from simple_pair import Trainer

from rl_backends import Completion
from rl_core.errors import (
    ConfigError,
    DataError,
    LifecycleError,
    PluginError,
)

SOON = 60.0


def lock_is_free(engine: CountingEngine) -> bool:
    """Whether a refit could begin now."""
    got = []

    def attempt() -> None:
        if engine._lock.acquire(timeout=SOON):
            got.append(True)
            engine._lock.release()

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(got)


# -- layout -------------------------------------------------------------------------------------


def test_logprobs_are_float32_under_another_default_dtype(make):
    torch.set_default_dtype(torch.float64)
    try:
        assert make().generate(prompts([5]))["logprobs"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


# -- empty batches and further keys ----------------------------------------------------------------


def test_a_further_key_of_another_length_is_refused(make):
    with pytest.raises(DataError, match="id: 1"):
        make().generate(prompts([5], [8], id=["a"]))


# -- faults of an engine ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "completions",
    [
        [],
        [Completion(0, [5], [-1.0], True), Completion(0, [5], [-1.0], True)],
        [Completion(1, [5], [-1.0], True)],
        [Completion(0, [5] * 5, [-1.0] * 5, True)],
        [Completion(0, [5, 6], [-1.0], True)],
        [Completion(0, [5], [math.nan], True)],
    ],
    ids=["lost row", "row twice", "no such row", "over budget", "log-prob missing", "NaN"],
)
def test_completions_that_do_not_fit_the_prompts_are_the_plugins_fault(make, completions):
    engine = make()
    engine.complete = lambda prompts, sampling: iter(completions)
    with pytest.raises(PluginError, match="CountingEngine"):
        engine.generate(prompts([5]))
    with pytest.raises(PluginError, match="CountingEngine"):
        collect(engine.generate_async(prompts([5])))


# -- rows as they finish ------------------------------------------------------------------------


def test_an_error_in_the_engine_reaches_the_reader_after_the_rows_before_it(make):
    engine = make()

    def fail(row: int) -> None:
        if row == 0:
            raise OSError("engine broke")

    engine.before_row = fail
    rows = []

    async def read() -> None:
        async for row, _ in engine.generate_async(prompts([5], [8])):
            rows.append(row)

    with pytest.raises(OSError, match="engine broke"):
        asyncio.run(read())
    assert rows == [1]
    assert lock_is_free(engine)


@pytest.mark.parametrize("error", ["asleep", "bad batch"])
def test_a_refusal_reaches_the_reader(make, error):
    engine = make()
    if error == "asleep":
        engine.finish_generation(tags=["kv_cache"])
    kind = LifecycleError if error == "asleep" else DataError
    with pytest.raises(kind):
        collect(engine.generate_async(prompts([])))


# -- lifecycle ----------------------------------------------------------------------------------


def test_parts_wake_and_sleep_once_and_generation_needs_both(make):
    engine = make()
    assert engine.finish_generation() is True
    assert engine.finish_generation() is True
    assert engine.prepare_for_generation(tags=["weights"]) is True
    with pytest.raises(LifecycleError, match="kv_cache"):
        engine.generate(prompts([5]))
    engine.prepare_for_generation()
    engine.generate(prompts([5]))
    assert engine.calls == [
        "wake ['kv_cache', 'weights']",
        "sleep ['kv_cache', 'weights']",
        "wake ['weights']",
        "wake ['kv_cache']",
    ]
    with pytest.raises(ConfigError, match="caches"):
        engine.prepare_for_generation(tags=["caches"])


def test_a_failed_wake_leaves_the_engine_asleep(make):
    engine = make()
    engine.finish_generation()

    def no_memory(tags: frozenset[str]) -> None:
        raise MemoryError

    engine.on_wake = no_memory
    with pytest.raises(MemoryError):
        engine.prepare_for_generation()
    with pytest.raises(LifecycleError):
        engine.generate(prompts([5]))


# -- refit --------------------------------------------------------------------------------------


def test_weights_from_a_collective_that_was_not_opened_are_a_lifecycle_error(make, keep):
    trainer = keep(Trainer({"w": torch.ones(3)}))
    with pytest.raises(LifecycleError, match="init_collective"):
        make().update_weights_from_collective(trainer.prepare_refit_info())


class ResidentEngine(CountingEngine):
    """Has its weights in memory from the start."""

    initially_resident = frozenset({"weights"})


def test_memory_that_is_there_from_the_start_is_not_taken_again():
    engine = ResidentEngine()
    with pytest.raises(LifecycleError):
        engine.generate(prompts([5]))
    engine.prepare_for_generation()
    assert engine.calls == ["wake ['kv_cache']"]
    engine.shutdown()


def test_memory_that_was_not_asked_for_can_be_given_back():
    engine = ResidentEngine()
    engine.finish_generation()
    assert engine.calls == ["sleep ['weights']"]
    engine.shutdown()


def test_brought_memory_is_not_taken_again_and_does_not_allow_to_generate():
    engine = CountingEngine()
    engine.wake(frozenset({"weights"}))
    with pytest.raises(LifecycleError):
        engine.generate(prompts([5]))
    engine.prepare_for_generation()
    assert engine.calls == ["wake ['weights']", "wake ['kv_cache']"]
    engine.shutdown()
