"""G13 to G16: waking, sleeping, shutting down, versions, and rows as they finish."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.continuations import find_stop
from rl_conformance.expect import raises, require, same_tensor
from rl_conformance.leftovers import Leftovers
from rl_conformance.registry import check, refusal
from rl_conformance.served import greedy, made_by, same_output
from rl_core.errors import CapabilityError, LifecycleError, RLError

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import GenerationInterface


@check("G13")
def waking_twice_is_waking_once(ctx: Context) -> None:
    """prepare_for_generation returns True each time and changes nothing."""
    generation = ctx.fresh_generation()
    require(generation.prepare_for_generation() is True, "prepare did not return True")
    first = greedy(ctx, generation)
    require(generation.prepare_for_generation() is True, "a second prepare did not return True")
    same_output(ctx, greedy(ctx, generation), first)


@check("G13")
def sleeping_twice_is_sleeping_once(ctx: Context) -> None:
    """finish_generation returns True each time, also before the first prepare."""
    generation = ctx.fresh_generation()
    require(generation.finish_generation() is True, "finish before prepare did not return True")
    generation.prepare_for_generation()
    require(generation.finish_generation() is True, "finish did not return True")
    require(generation.finish_generation() is True, "a second finish did not return True")


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
    require(taken > 0, "waking took no device memory that could be released")
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
        require(method() is True, f"{method.__name__} did not return True")


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
def shutting_down_twice_is_shutting_down_once(ctx: Context) -> None:
    """shutdown returns True each time."""
    generation = ctx.fresh_generation()
    require(generation.shutdown() is True, "shutdown did not return True")
    require(generation.shutdown() is True, "a second shutdown did not return True")


@check("G14", timeout_s=240.0)
def shutdown_leaves_nothing_behind(ctx: Context) -> None:
    """No process, socket, shared memory or device memory outlives the backend."""
    _use_once(ctx)  # what a first use sets up for good is not a leak
    gone: list[str] = []
    for _ in range(2):  # others in this process open files too; a leak does it every time
        before = Leftovers.now()
        _use_once(ctx)
        if not (gone := before.wait_until_back()):
            break
    require(not gone, f"left behind after shutdown: {gone}")


def _use_once(ctx: Context) -> None:
    generation = ctx.fresh_generation()
    generation.prepare_for_generation()
    generation.generate(ctx.prompts(5), greedy=True)
    generation.shutdown()


@check("G15")
def rows_carry_version_zero_at_first(ctx: Context) -> None:
    """Before any refit every row says version 0, as the backend does."""
    generation = ctx.fresh_generation()
    generation.prepare_for_generation()
    made_by(generation.generate(ctx.prompts(5, 3), greedy=True), 0, 0)
    require(generation.weights_origin == 0, f"weights_origin is {generation.weights_origin}")
    require(generation.weights_version == 0, f"weights_version is {generation.weights_version}")


@check("G16")
def streamed_rows_equal_generate(ctx: Context) -> None:
    """The union of the streamed rows is what generate returns."""
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows], label=["a", "b", "c"])
    generation = ctx.generation(max_new_tokens=4)
    whole = generation.generate(data, greedy=True)
    streamed = dict(_stream(generation, data))
    require(sorted(streamed) == [0, 1, 2], f"rows {sorted(streamed)} were yielded")
    for index, row in streamed.items():
        end = int(whole["unpadded_sequence_lengths"][index])
        same_tensor(row["output_ids"][0], whole["output_ids"][index, :end], f"row {index}")
        ctx.measure_error(row["logprobs"][0], whole["logprobs"][index, :end])
        require(row["label"] == [data["label"][index]], f"row {index} lost its label")


@check("G16")
def rows_are_yielded_as_they_finish(ctx: Context) -> None:
    """A short row comes before a long one that stands before it."""
    stop = find_stop(ctx.oracle(), 8, ctx.lead)
    generation = ctx.generation(stop_token_ids=[stop.token])
    data = ctx.batch([stop.other_prompt, stop.prompt])
    order = [index for index, _ in _stream(generation, data)]
    require(order == [1, 0], f"rows were yielded in the order {order}")


@check("G16")
def a_broken_off_stream_leaves_the_engine_usable(ctx: Context) -> None:
    """Whoever stops reading midway can generate again."""
    generation, data = ctx.generation(), ctx.prompts(3, 9, 5)
    before = greedy(ctx, generation)

    async def first_row_only() -> None:
        stream: Any = generation.generate_async(data, greedy=True)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(first_row_only())
    same_output(ctx, greedy(ctx, generation), before)


@refusal("generation", "async_generation")
def streaming_is_refused(ctx: Context) -> None:
    """A backend without async_generation refuses and still generates."""
    generation = ctx.generation()
    before = greedy(ctx, generation)
    with raises(CapabilityError):
        _stream(generation, ctx.prompts(5))
    same_output(ctx, greedy(ctx, generation), before)


def _stream(
    generation: GenerationInterface, data: BatchedDataDict[Any]
) -> list[tuple[int, BatchedDataDict[Any]]]:
    async def collect() -> list[tuple[int, BatchedDataDict[Any]]]:
        return [item async for item in generation.generate_async(data, greedy=True)]

    return asyncio.run(collect())
