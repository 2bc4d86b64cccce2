"""G13, G14 and G15: waking, sleeping, shutting down, and versions of what is generated."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import time
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import pad_rows
from rl_conformance.checks.common import WAKINGS, Witness, two_engines
from rl_conformance.deadline import stretched
from rl_conformance.expect import raised, raises, require, same
from rl_conformance.faults import between_tensors, source_class
from rl_conformance.leftovers import left_each_time
from rl_conformance.refits import DEADLINE_S, attempt, fresh_engine, run_refit
from rl_conformance.registry import check, refusal
from rl_conformance.served import greedy, made_by, same_output
from rl_conformance.ways import exact, settable_trainer, shuffle
from rl_core.errors import LifecycleError, RLError

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import GenerationInterface


#: Of the engine that the calls of this module go to. Nothing ends a row by chance.
_CONFIG: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.5, "eos_token_id": []}


@check("G13")
def one_engine_sleeps_while_another_serves(ctx: Context) -> None:
    """The sleep of one engine has no effect on another."""
    check_both, (one, two) = two_engines(ctx)
    one.prepare_for_generation()
    with raises(LifecycleError):
        two.generate(ctx.prompts(5), greedy=True)
    two.prepare_for_generation()
    one.finish_generation()
    check_both("while the other sleeps", (1,))
    with raises(LifecycleError):
        one.generate(ctx.prompts(5), greedy=True)
    one.prepare_for_generation()
    check_both("after both woke")


@check("G14")
def shutting_one_engine_down_leaves_another_serving(ctx: Context) -> None:
    """The shutdown of one engine has no effect on another."""
    check_both, (one, two) = two_engines(ctx)
    for engine in (one, two):
        engine.prepare_for_generation()
    check_both("at first")
    one.shutdown()
    check_both("after the other was shut down", (1,))


@check("G14")
def a_refused_call_does_not_wake_the_engine(ctx: Context) -> None:
    """Asleep, awake in part or not yet awake: each call is refused, and then all is as before."""
    generation = ctx.fresh_generation(**_CONFIG)
    data = ctx.prompts(5, 3)
    _refused_twice(generation, data)
    generation.prepare_for_generation()
    witness = Witness(ctx, generation)
    for _ in range(2):
        generation.finish_generation()
        _refused_twice(generation, data)
        generation.prepare_for_generation()
        witness.testify("calls that were refused in its sleep")
    generation.shutdown()
    for _ in range(2):
        with raises(RLError):
            generation.generate(data, greedy=True)
    with raises(RLError):
        generation.prepare_for_generation()


def _refused_twice(generation: GenerationInterface, data: BatchedDataDict[Any]) -> None:
    for argmax in (True, False):
        with raises(LifecycleError):
            generation.generate(data, greedy=argmax)
    generation.prepare_for_generation(tags=["weights"])
    with raises(LifecycleError):
        generation.generate(data, greedy=True)
    generation.finish_generation()


@check("G15")
def all_rows_carry_the_version(ctx: Context) -> None:
    """Many rows, rows without room, samples: each has the version, and an empty batch none."""
    generation = ctx.generation(max_model_len=16, max_new_tokens=4)
    for data in (ctx.prompts(16, 5, 15, 3, 16, 9), ctx.prompts(16), pad_rows([])):
        output = generation.generate(data, greedy=True)
        made_by(output, generation.weights_version, generation.weights_origin)


@check("G15", needs=("generation", "pair"))
def a_refit_changes_only_its_own_engine(ctx: Context) -> None:
    """Versions and weights move in the engine that was refitted, and in no other."""
    from rl_conformance.refits import fresh_engine, run_refit, unequal_pair
    from rl_conformance.served import greedy, same_output

    policy, one = unequal_pair(ctx)
    two = fresh_engine(ctx)
    before = greedy(ctx, two, seed=0)
    for version in (1, 2):
        origin = run_refit(policy, one).origin
        after = greedy(ctx, two, seed=0)
        same_output(ctx, after, before)
        made_by(after, 0, 0, "the other")
        moved = one.generate(ctx.prompts(3, 9, 5, 2), greedy=True)
        made_by(moved, version, origin, "its own")


@check("G13")
def waking_is_idempotent(ctx: Context) -> None:
    """prepare_for_generation returns True each time and changes nothing."""
    generation = ctx.fresh_generation()
    same(generation.prepare_for_generation(), True, "result of prepare_for_generation")
    first = greedy(ctx, generation)
    same(generation.prepare_for_generation(), True, "result of a second prepare_for_generation")
    same_output(ctx, greedy(ctx, generation), first)


@check("G13")
def sleeping_is_idempotent(ctx: Context) -> None:
    """finish_generation returns True each time, also before the first prepare."""
    generation = ctx.fresh_generation()
    same(generation.finish_generation(), True, "result of finish_generation before prepare")
    generation.prepare_for_generation()
    same(generation.finish_generation(), True, "result of finish_generation")
    same(generation.finish_generation(), True, "result of a second finish_generation")


@check("G13")
def output_survives_a_sleep(ctx: Context) -> None:
    """After finish and prepare the same prompt gives the same tokens."""
    generation = ctx.fresh_generation()
    generation.prepare_for_generation()
    before = greedy(ctx, generation)
    generation.finish_generation()
    generation.prepare_for_generation()
    same_output(ctx, greedy(ctx, generation), before)


@check("G13", capability="sleep", device="cuda")
def sleeping_releases_device_memory(ctx: Context) -> None:
    """The declared fraction of what waking took is free after finish_generation."""
    generation = ctx.fresh_generation(model_name=str(ctx.large_model(512 << 20)))
    _wake_and_generate(ctx, generation)  # what a first use sets up is not given back
    generation.finish_generation()
    asleep_before = _device_bytes()
    _wake_and_generate(ctx, generation)
    awake = _device_bytes()
    generation.finish_generation()
    taken = awake - asleep_before
    require(taken > 0, "device memory taken by waking", "more than 0 bytes", taken)
    kept = (_device_bytes() - asleep_before) / taken
    ctx.measure("kept_fraction", kept, 1 - ctx.manifest.released_fraction)


def _wake_and_generate(ctx: Context, generation: GenerationInterface) -> None:
    generation.prepare_for_generation()
    generation.generate(ctx.prompts(5), greedy=True)


def _device_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@refusal("generation", "sleep")
def without_sleep_the_lifecycle_still_holds(ctx: Context) -> None:
    """Without sleep there is nothing to refuse: finish and prepare still return True."""
    generation = ctx.fresh_generation()
    for method in (generation.prepare_for_generation, generation.finish_generation):
        same(method(), True, f"result of {method.__name__}")


@check("G14")
def generating_before_prepare_is_refused(ctx: Context) -> None:
    """generate on a new backend raises LifecycleError."""
    with raises(LifecycleError):
        ctx.fresh_generation().generate(ctx.prompts(5), greedy=True)


@check("G14")
def generating_while_asleep_is_refused(ctx: Context) -> None:
    """generate after finish_generation raises LifecycleError."""
    generation = ctx.fresh_generation()
    generation.prepare_for_generation()
    generation.finish_generation()
    with raises(LifecycleError):
        generation.generate(ctx.prompts(5), greedy=True)


@check("G14")
def generating_after_shutdown_is_refused(ctx: Context) -> None:
    """generate after shutdown raises a typed error."""
    generation = ctx.fresh_generation()
    generation.prepare_for_generation()
    generation.shutdown()
    with raises(RLError):
        generation.generate(ctx.prompts(5), greedy=True)


@check("G14")
def shutting_down_is_idempotent(ctx: Context) -> None:
    """shutdown returns True each time."""
    generation = ctx.fresh_generation()
    same(generation.shutdown(), True, "result of shutdown")
    same(generation.shutdown(), True, "result of a second shutdown")


@check("G14", timeout_s=240.0)
def shutdown_leaves_nothing_behind(ctx: Context) -> None:
    """No process, socket, shared memory or device memory outlives the backend."""
    _use_once(ctx)  # what a first use sets up for good is not a leak
    left = left_each_time(lambda: _use_once(ctx))
    same(left, [], "left behind after shutdown, each time")


def _use_once(ctx: Context) -> None:
    generation = ctx.fresh_generation()
    generation.prepare_for_generation()
    generation.generate(ctx.prompts(5), greedy=True)
    generation.shutdown()


@check("G15")
def rows_carry_version_zero_at_first(ctx: Context) -> None:
    """Before any refit every row has version 0, as the backend does."""
    if ctx.settings.url is not None:
        ctx.not_run(
            "an earlier check refitted the server, and this one needs an engine before any refit",
            excused=True,
        )
    generation = ctx.fresh_generation()
    generation.prepare_for_generation()
    made_by(generation.generate(ctx.prompts(5, 3), greedy=True), 0, 0)
    same(generation.weights_origin, 0, "weights_origin before any refit")
    same(generation.weights_version, 0, "weights_version before any refit")


@check("G13", needs=("generation",))
def a_sleep_keeps_the_refitted_weights(ctx: Context) -> None:
    """After sleeping and waking, twice and part by part, the last refit's weights serve."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    for version, waking in enumerate(WAKINGS, 2):
        shuffle(policy, version)
        run_refit(policy, engine)
        for _ in range(2):
            engine.finish_generation()
            same(engine.weights_version, version, "weights_version while the engine sleeps")
            for tags in waking:
                engine.prepare_for_generation(**tags)
            exact(ctx, policy, engine, f"woken by {waking}", version)
    shuffle(policy, 9, ["model.norm.weight"])
    run_refit(policy, engine, delta=True)
    exact(ctx, policy, engine, "a delta after a sleep", version + 1)


@check("G15", needs=("generation",), capability="async_generation")
def a_stream_keeps_its_version(ctx: Context) -> None:
    """Rows of a stream that began before a refit have the old weights and the old version."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    data = ctx.prompts(5, 9, 3, 40)
    expected = engine.generate(data, greedy=True)
    version, origin = engine.weights_version, engine.weights_origin
    shuffle(policy, 2)

    async def stream() -> dict[int, BatchedDataDict[Any]]:
        rows: dict[int, BatchedDataDict[Any]] = {}
        refitting: list[Any] = []
        async for index, row in engine.generate_async(data, greedy=True):
            if not refitting:
                refitting.append(asyncio.create_task(asyncio.to_thread(run_refit, policy, engine)))
            rows[index] = row
        await asyncio.gather(*refitting)
        return rows

    for index, row in asyncio.run(stream()).items():
        made_by(row, version, origin, f"row {index}, which began before the refit")
        length = int(expected["unpadded_sequence_lengths"][index])
        ctx.measure_error(row["logprobs"][0], expected["logprobs"][index, :length])
    exact(ctx, policy, engine, "after the stream", version + 1)


@check("G15", needs=("generation",), capability="async_generation")
def rows_that_wait_for_their_reader_keep_their_version(ctx: Context) -> None:
    """Rows that are read after a refit carry the version that made them."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    data, version = ctx.prompts(5, 9, 3, 40), engine.weights_version
    origin, successor = engine.weights_origin, settable_trainer(ctx)

    async def read() -> list[BatchedDataDict[Any]]:
        stream: Any = engine.generate_async(data, greedy=True)
        rows = [await anext(stream)]
        await asyncio.to_thread(run_refit, successor, engine, version=version + 1)
        rows += [row async for row in stream]
        return [row for _, row in rows]

    for row in asyncio.run(read()):
        made_by(row, version, origin, "rows that are read later")
    same(engine.weights_version, version + 1, "weights_version after the refit")


@check("G14", needs=("pair",), timeout_s=180.0)
def a_shutdown_ends_a_refit(ctx: Context) -> None:
    """An engine is shut down during a refit: both sides raise, and the trainer goes on."""
    policy = settable_trainer(ctx)
    engine = fresh_engine(ctx)
    run_refit(policy, engine)
    shutting = concurrent.futures.ThreadPoolExecutor(1)
    futures: queue.SimpleQueue[concurrent.futures.Future[bool]] = queue.SimpleQueue()

    def shut_down() -> None:
        futures.put(shutting.submit(engine.shutdown))
        time.sleep(stretched(0.2))

    started, deadline_s = time.monotonic(), stretched(DEADLINE_S)
    with shutting, between_tensors(source_class(policy), after=5, act=shut_down):
        error = attempt(policy, engine, mode="packed", bucket_bytes=4096)
        shut = futures.get(timeout=deadline_s)  # the refit may be over before it is put there
        same(shut.result(deadline_s), True, "result of shutdown during a refit")
    raised(error, RLError)
    took = time.monotonic() - started
    require(
        took < deadline_s, "seconds until both sides ended", f"< {deadline_s:.0f}", f"{took:.1f}"
    )
    with raises(RLError):
        engine.prepare_for_generation()
    with raises(RLError):
        run_refit(policy, engine)
    other = ctx.refit_generation()
    shuffle(policy, 3)
    run_refit(policy, other)
    exact(ctx, policy, other, "another engine's refit", other.weights_version)
