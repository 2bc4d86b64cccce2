"""G13 to G15, R1, R5, R8, R10: refits between sleeping, failing, and shutting down."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import time
from typing import TYPE_CHECKING, Any

from rl_conformance.expect import raises, require
from rl_conformance.faults import (
    between_tensors,
    failing_finish,
    failing_write,
    in_the_engine,
    source_class,
)
from rl_conformance.refits import (
    DEADLINE_S,
    attempt,
    equal,
    fresh_engine,
    run_refit,
    unequal_pair,
)
from rl_conformance.registry import check
from rl_conformance.served import greedy, made_by, same_output
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.ways import by_ticket, exact, settable_trainer, shuffle, ticket_for, ways_of
from rl_conformance.weights import engine_weights, same_weights
from rl_core.errors import LifecycleError, RLError, WeightsTornError

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict


#: What was called since all was awake, and the ways in which the rest is woken.
_ASLEEP: dict[str, list[dict[str, Any]]] = {
    "all": [],
    "all_but_the_weights": [{"tags": ["weights"]}],
    "all_but_the_cache": [{"tags": ["kv_cache"]}],
}
_WAKINGS: tuple[list[dict[str, Any]], ...] = (
    [{}],
    [{"tags": ["weights"]}, {"tags": ["kv_cache"]}],
    [{"tags": ["kv_cache"]}, {"tags": ["weights"]}],
)


@check("G13", needs=("generation",))
def a_sleep_keeps_what_a_refit_brought(ctx: Context) -> None:
    """After sleeping and waking, twice and part by part, the last refit's weights serve."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    for version, waking in enumerate(_WAKINGS, 2):
        shuffle(policy, version)
        run_refit(policy, engine)
        for _ in range(2):
            engine.finish_generation()
            require(engine.weights_version == version, f"asleep at {engine.weights_version}")
            for tags in waking:
                engine.prepare_for_generation(**tags)
            exact(ctx, policy, engine, f"woken by {waking}", version)
    shuffle(policy, 9, ["model.norm.weight"])
    run_refit(policy, engine, delta=True)
    exact(ctx, policy, engine, "a delta after a sleep", version + 1)


@check("R1", needs=("generation",), cases={name: {"woken": w} for name, w in _ASLEEP.items()})
def a_refit_of_a_sleeper_serves_once_it_is_awake(ctx: Context, woken: list[dict[str, Any]]) -> None:
    """Asleep or half awake: what the last refit brought serves, however the rest is woken.

    Until then it is refused to generate, before the refit and after it.
    """
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    for version, waking in enumerate([*_WAKINGS, *_WAKINGS[:1]], 2):
        engine.finish_generation()
        for tags in woken:
            engine.prepare_for_generation(**tags)
        shuffle(policy, version)
        with raises(LifecycleError):
            engine.generate(ctx.prompts(5), greedy=True)
        run_refit(policy, engine, delta=version == 3)
        with raises(LifecycleError):
            engine.generate(ctx.prompts(5), greedy=True)
        if version == 2 + len(_WAKINGS):  # it may fall asleep again before it serves
            engine.finish_generation()
        for tags in waking:
            engine.prepare_for_generation(**tags)
        exact(ctx, policy, engine, f"woken by {waking}", version)


@check("R8", needs=("generation",))
def whole_weights_alone_end_a_torn_state(ctx: Context) -> None:
    """Neither sleep nor preparing again mends torn weights; a refit by any way does."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    ways = ways_of(ctx, policy, "engine", "direct", "packed", "delta", "staged", "ticket")
    for number, (name, way) in enumerate([*ways.items(), *ways.items()], 2):
        before = engine.weights_version
        committed = {key: value.clone() for key, value in policy.model.state_dict().items()}
        shuffle(policy, 10 * number)
        fault, how = (failing_write, {"after": 3}) if number % 2 else (failing_finish, {})
        with in_the_engine(engine, fault, **how):
            failed = attempt(policy, engine, delta=number == 3)
        require(failed is not None, "a refit that failed is reported as done")
        engine.prepare_refit_info(policy.prepare_refit_info() or {})
        with raises(WeightsTornError):
            engine.generate(ctx.prompts(5), greedy=True)
        engine.finish_generation()
        engine.prepare_for_generation()
        with raises(WeightsTornError):
            engine.generate(ctx.prompts(5), greedy=True)
        require(engine.weights_version == before, f"the version is {engine.weights_version}")
        if number > 1 + len(ways):  # the engine has lost what it had, should it be asked for again
            policy.model.load_state_dict(committed)
        way(policy, engine)
        version = engine.weights_version
        require(version > before, f"{name} after a failure: version {version}")
        exact(ctx, policy, engine, f"{name} after a failure", version)


@check("R5", needs=("generation",))
def a_ticket_is_for_one_refit(ctx: Context) -> None:
    """One that another refit has followed, or that was taken, brings nothing any more."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    before = engine.weights_version
    exact(ctx, policy, engine, "a refit before tickets", before)
    old = ticket_for(policy, engine, deadline_s=1.0)
    shuffle(policy, 2)
    by_ticket(policy, engine)
    shuffle(policy, 3)
    taken = ticket_for(policy, engine, deadline_s=DEADLINE_S)
    engine.update_weights(taken)
    weights = engine_weights(engine)
    for ticket in (old, taken | {"deadline_s": 1.0}):
        with raises(RLError):
            engine.update_weights(ticket)
    require(engine.weights_version == before + 2, f"the version is {engine.weights_version}")
    same_weights(engine_weights(engine), weights, "after tickets that were used up")
    exact(ctx, policy, engine, "a refit by a ticket", before + 2)
    run_refit(policy, engine, delta=True)
    exact(ctx, policy, engine, "a refit after tickets", before + 3)


@check("G15", needs=("generation",), capability="async_generation")
def a_stream_keeps_its_version(ctx: Context) -> None:
    """Rows of a stream that began before a refit are those of the old weights, and say so."""
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
    """Rows that are read after a refit say the version that made them."""
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
    require(engine.weights_version == version + 1, f"the version is {engine.weights_version}")


@check("G14", needs=("pair",), timeout_s=180.0)
def a_shutdown_ends_a_refit(ctx: Context) -> None:
    """An engine that is shut down amid a refit: both sides say so, and the trainer goes on."""
    policy = settable_trainer(ctx)
    engine = fresh_engine(ctx)
    run_refit(policy, engine)
    shutting = concurrent.futures.ThreadPoolExecutor(1)
    futures: queue.SimpleQueue[concurrent.futures.Future[bool]] = queue.SimpleQueue()

    def shut_down() -> None:
        futures.put(shutting.submit(engine.shutdown))
        time.sleep(0.2)

    started = time.monotonic()
    with shutting, between_tensors(source_class(policy), after=5, act=shut_down):
        error = attempt(policy, engine, mode="packed", bucket_bytes=4096)
        shut = futures.get(timeout=DEADLINE_S)  # the refit may be over before it is put there
        require(shut.result(DEADLINE_S) is True, "shutdown did not return True")
    require(isinstance(error, RLError), f"not an error of ours but {error!r}")
    took = time.monotonic() - started
    require(took < DEADLINE_S, f"it took {took:.1f} s, the deadline is {DEADLINE_S:g} s")
    with raises(RLError):
        engine.prepare_for_generation()
    with raises(RLError):
        run_refit(policy, engine)
    other = ctx.refit_generation()
    shuffle(policy, 3)
    run_refit(policy, other)
    exact(ctx, policy, other, "another engine's refit", other.weights_version)


@check("R10")
def training_between_refits_shows_after_the_next_alone(ctx: Context) -> None:
    """What a trainer learns reaches nobody before a refit, not even over a sleep."""
    policy, generation = unequal_pair(ctx)
    run_refit(policy, generation, mode="auto")
    before, weights = greedy(ctx, generation, seed=0), engine_weights(generation)
    policy.prepare_for_training()
    policy.train(training_batch((9, 14, 6)), NegativeLogLikelihood())
    generation.prepare_refit_info(policy.prepare_refit_info() or {})
    generation.finish_generation()
    generation.prepare_for_generation()
    same_weights(engine_weights(generation), weights, "before the next refit")
    same_output(ctx, greedy(ctx, generation, seed=0), before)
    run_refit(policy, generation)
    equal(policy, generation)
