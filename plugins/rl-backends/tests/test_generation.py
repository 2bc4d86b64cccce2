"""What the base class of generation backends promises for any engine."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from counting_engine import CONTEXT, PAD, CountingEngine, collect
from prompt_rows import prompts
from simple_pair import Trainer

from rl_backends import Completion
from rl_core.batch import BatchedDataDict
from rl_core.errors import (
    ConfigError,
    DataError,
    LifecycleError,
    PluginError,
    WeightsTornError,
)
from rl_core.futures import wait
from rl_core.weights import refit

SOON = 20.0
KEYS = {
    "output_ids",
    "generation_lengths",
    "unpadded_sequence_lengths",
    "logprobs",
    "truncated",
    "weights_version",
    "weights_origin",
}


@pytest.fixture
def make() -> Iterator[Callable[..., CountingEngine]]:
    engines = []

    def build(**config: Any) -> CountingEngine:
        engines.append(CountingEngine(**config))
        engines[-1].prepare_for_generation()
        return engines[-1]

    yield build
    for engine in engines:
        engine.before_row = lambda row: None
        engine.shutdown()


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


def test_ragged_rows_are_laid_out_prompt_first_then_tokens_then_padding(make):
    out = make().generate(prompts([9, 5], [7], [4, 4, 47]), greedy=True)
    assert out["output_ids"].tolist() == [
        [9, 5, 6, 7, 8, 9, PAD],
        [7, 8, 9, 10, 11, PAD, PAD],
        [4, 4, 47, 48, 49, 0, 1],
    ]
    assert out["generation_lengths"].tolist() == [4, 4, 4]
    assert out["unpadded_sequence_lengths"].tolist() == [6, 5, 7]
    assert out["truncated"].tolist() == [True, True, False]
    assert out["logprobs"][0].tolist() == [0, 0, -0.5, -0.5, -0.5, -0.5, 0]
    assert out["logprobs"].dtype == torch.float32
    assert out["weights_version"].tolist() == [0, 0, 0]
    assert out["weights_origin"].tolist() == [0, 0, 0]


def test_logprobs_are_float32_under_another_default_dtype(make):
    torch.set_default_dtype(torch.float64)
    try:
        assert make().generate(prompts([5]))["logprobs"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_row_without_room_is_truncated_and_never_reaches_the_engine(make):
    full = list(range(2, 2 + CONTEXT))
    data = prompts([5], full, [8])
    out = make().generate(data, greedy=True)
    assert out["generation_lengths"].tolist() == [4, 0, 4]
    assert out["truncated"].tolist() == [True, True, True]
    assert out["output_ids"][1].tolist() == full
    assert not out["logprobs"][1].any()
    assert dict(collect(make().generate_async(data)))[1]["generation_lengths"].tolist() == [0]


def test_only_rows_without_room_need_no_engine(make):
    engine = make()
    engine.before_row = lambda row: pytest.fail("nothing to complete")
    assert engine.generate(prompts([5] * CONTEXT))["output_ids"].shape == (1, CONTEXT)


def test_max_model_len_bounds_prompt_and_tokens(make):
    out = make(max_model_len=6).generate(prompts([5] * 4, [5]))
    assert out["unpadded_sequence_lengths"].tolist() == [6, 5]
    with pytest.raises(ConfigError, match="max_model_len"):
        CountingEngine(max_model_len=CONTEXT + 1)
    with pytest.raises(DataError, match="row 1"):
        make(max_model_len=3).generate(prompts([5], [5] * 4))


# -- empty batches and further keys ----------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [BatchedDataDict(), prompts(), prompts(id=[], x=torch.zeros(0, 2))]
)
@pytest.mark.parametrize("samples", [1, 3])
def test_an_empty_batch_gives_an_empty_result_of_the_right_keys(make, data, samples):
    out = make(num_generations=samples).generate(data)
    assert set(out) == KEYS | (set(data) - {"input_ids", "input_lengths"})
    assert out.size == 0
    assert out["output_ids"].shape == (0, 0)
    assert collect(make(num_generations=samples).generate_async(data)) == []


def test_further_keys_stay_with_their_rows(make):
    out = make(num_generations=2).generate(
        prompts([5], [8], id=["a", "b"], x=torch.tensor([[1], [2]]), note=None), greedy=True
    )
    assert out["id"] == ["a", "a", "b", "b"]
    assert out["x"].tolist() == [[1], [1], [2], [2]]
    assert out["note"] is None
    assert "input_ids" not in out
    assert "input_lengths" not in out


def test_a_further_key_of_another_length_is_refused(make):
    with pytest.raises(DataError, match="id: 1"):
        make().generate(prompts([5], [8], id=["a"]))


# -- sampling -----------------------------------------------------------------------------------


def test_stop_strings_of_config_and_row_meet_in_their_row_only(make):
    engine = make(stop_strings=["all"])
    seen: list[Any] = []
    complete = engine.complete
    engine.complete = lambda p, s: seen.append(p.stop_strings) or complete(p, s)
    engine.generate(prompts([5], [8], [9], stop_strings=[["own", "all"], None, []]))
    assert seen == [[("all", "own"), ("all",), ("all",)]]


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


def test_a_reader_that_leaves_early_frees_the_engine(make):
    engine = make()
    second_row, may_go_on = threading.Event(), threading.Event()

    def hold(row: int) -> None:
        if row == 1:
            second_row.set()
            assert may_go_on.wait(SOON)
        assert row > 0, "the engine went on for nobody"

    engine.before_row = hold

    async def read_one() -> None:
        stream = engine.generate_async(prompts([5], [8], [9]))
        assert (await anext(stream))[0] == 2
        assert await asyncio.to_thread(second_row.wait, SOON)
        await stream.aclose()

    asyncio.run(read_one())
    may_go_on.set()
    assert lock_is_free(engine)
    assert engine.closed_in == ["generate-CountingEngine"]
    assert not [t for t in threading.enumerate() if t.name.startswith("generate-") and t.join(SOON)]


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


def test_shutdown_happens_once_and_refuses_everything_after(make):
    engine = make()
    assert engine.shutdown() is True
    assert engine.shutdown() is True
    assert engine.calls.count("shutdown") == 1
    for call in (
        lambda: engine.generate(prompts([5])),
        lambda: collect(engine.generate_async(prompts([5]))),
        engine.prepare_for_generation,
        engine.finish_generation,
        engine.receive_weights,
        lambda: engine.prepare_refit_info({}),
    ):
        with pytest.raises(LifecycleError):
            call()


# -- refit --------------------------------------------------------------------------------------


def test_rows_carry_the_version_that_made_them_and_a_torn_engine_makes_none(make):
    engine, trainer = make(), Trainer({"w": torch.ones(3)})
    refit(trainer, engine, version=7, deadline_s=SOON)
    assert engine.weights_version == 7
    rows = engine.generate(prompts([5], [8]))
    assert rows["weights_version"].tolist() == [7, 7]
    assert rows["weights_origin"].tolist() == [trainer.sender.origin] * 2
    assert engine.weights_origin == trainer.sender.origin
    assert torch.equal(engine.weights["w"], torch.ones(3))
    engine.invalidate_kv_cache = lambda: 1 / 0
    with pytest.raises(Exception, match="division by zero"):
        refit(trainer, engine, deadline_s=SOON)
    assert lock_is_free(engine)
    with pytest.raises(WeightsTornError):
        engine.generate(prompts([5]))
    assert engine.weights_version == 7
    trainer.sender.close()


def test_weights_arrive_over_a_collective(make, keep):
    engine, trainer = make(), keep(Trainer({"w": torch.ones(3)}))
    port = trainer.prepare_refit_info()["port"]
    opening = trainer.sender.open("collective", SOON, ip="127.0.0.1", port=port, receivers=1)
    wait([opening, *engine.init_collective("127.0.0.1", port, 2)], SOON)
    info = trainer.prepare_refit_info()
    sending = trainer.sender.send(transport="collective", deadline_s=SOON)
    wait([sending, *engine.update_weights_from_collective(info, deadline_s=SOON)], SOON)
    assert engine.weights_version == 1
    assert torch.equal(engine.weights["w"], torch.ones(3))


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
