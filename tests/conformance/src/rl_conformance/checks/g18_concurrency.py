"""G18: calls at the same time."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated, random_rows
from rl_conformance.checks.common import Recital
from rl_conformance.draws import same_draws
from rl_conformance.expect import fail, raises, require, same
from rl_conformance.refits import run_refit
from rl_conformance.registry import check, refusal
from rl_conformance.served import greedy, same_output
from rl_conformance.ways import exact, settable_trainer, shuffle
from rl_core.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict


#: Characters of two, three and four bytes, each byte a token.
ACCENT, IDEOGRAPH, FACE = "\u00e9", "\u6f22", "\N{HUGGING FACE}"


#: Tokens of a prompt, and of what is generated.
_PROMPT, _STEPS = 6, 12


#: Of the engine that most calls of this module go to. Nothing ends a row by chance.
_CONFIG: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.5, "eos_token_id": []}


#: Tokens of a context in which a prompt of all but two has room for two more, and a short one for
#: many times as many.
_CONTEXT, _LONG, _SHORT = 130, 4, 128


_LONG_CONFIG: dict[str, Any] = {
    "max_model_len": _CONTEXT,
    "max_new_tokens": _CONTEXT,
    "eos_token_id": [],
}


#: How often a measurement of time is repeated.
_TRIES = 4


#: Seconds of a deadline: at least so many, and so many times what a short call takes.
_DEADLINE_S, _SHORT_CALLS = 0.5, 20


#: So many deadlines may pass until rows that cannot be stopped have ended.
_PATIENCE = 100


def _at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call returned, all of them made by threads of their own at one moment."""
    ready = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        ready.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def _certain_rows(ctx: Context) -> list[Any]:
    return ctx.certain(3, 9, 5, 20, 3, 9, 5, 33)


@check("G18")
def calls_from_threads_do_not_mix_their_rows(ctx: Context) -> None:
    """Greedy calls and calls with seeds, of one row and of several: each gives what is its."""
    generation, certain = ctx.generation(**_CONFIG), _certain_rows(ctx)
    drawn = ctx.prompts(*[6, 4, 9, 5] * 4)
    drawn["seed"] = torch.arange(16) * 1000
    alone = generated(drawn, generation.generate(drawn))
    calls: list[Callable[[], Any]] = []
    for first in range(8):
        rows = [certain[(first + i) % 8] for i in range(1 + first % 3)]
        data = ctx.batch([row.prompt for row in rows])
        calls.append(lambda data=data: generation.generate(data, greedy=True))  # type: ignore[misc]
        part = drawn.slice(2 * first, 2 * first + 2)
        calls.append(lambda part=part: generation.generate(part))  # type: ignore[misc]
    for _ in range(3):
        outputs = _at_once(calls)
        for first, output in enumerate(outputs[::2]):
            expected = [certain[(first + i) % 8].tokens for i in range(1 + first % 3)]
            data = ctx.batch([certain[(first + i) % 8].prompt for i in range(1 + first % 3)])
            got = generated(data, output)
            same(got, expected, f"greedy tokens of call {first}, beside 15 others")
        parts = [drawn.slice(2 * n, 2 * n + 2) for n in range(8)]
        got = [row for n in range(8) for row in generated(parts[n], outputs[2 * n + 1])]
        same_draws(ctx, got, alone, drawn["seed"])


@check("G18")
def concurrent_calls_do_not_mix_their_stop_strings(ctx: Context) -> None:
    """Many calls at once; every row has a different stop string."""
    recital = Recital(ctx)
    strings = [FACE, "op", "none of this", ACCENT, IDEOGRAPH, "st", "y", f"p{IDEOGRAPH}"]
    calls: list[Callable[[], Any]] = [
        lambda n=n: recital.check(range(n, n + 3), [strings[(n + 3 * i) % 8] for i in range(3)])  # type: ignore[misc]
        for n in range(12)
    ]
    for _ in range(3):
        _at_once(calls)


@check("G18", capability="async_generation")
def tasks_and_threads_do_not_mix_their_rows(ctx: Context) -> None:
    """Streams of many tasks beside calls of threads, of which some are given up."""
    generation, certain = ctx.generation(**_CONFIG), _certain_rows(ctx)

    async def stream(first: int) -> None:
        rows = [certain[(first + i) % 8] for i in range(3)]
        data = ctx.batch([row.prompt for row in rows], label=[f"{first}.{i}" for i in range(3)])
        found: set[int] = set()
        stream = generation.generate_async(data, greedy=True)
        async for index, output in stream:
            tokens = output["output_ids"][0, len(rows[index].prompt) :].tolist()
            same(tokens, rows[index].tokens, f"greedy tokens of row {index} of stream {first}")
            same(output["label"], [f"{first}.{index}"], f"label of row {index} of stream {first}")
            found.add(index)
            if first % 4 == 3:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        require(
            first % 4 == 3 or found == {0, 1, 2}, f"rows of stream {first}", "0, 1 and 2", found
        )

    async def streams() -> None:
        await asyncio.gather(*(stream(first) for first in range(16)))

    def call(first: int) -> None:
        row = certain[first % 8]
        got = generated(batch := ctx.batch([row.prompt]), generation.generate(batch, greedy=True))
        same(got, [row.tokens], "greedy tokens of a call beside the streams")

    calls: list[Callable[[], Any]] = [lambda n=n: call(n) for n in range(6)]  # type: ignore[misc]
    _at_once([*calls, lambda: asyncio.run(streams())])


@check("G18", capability="async_generation")
def calls_draw_in_the_order_in_which_they_are_made(ctx: Context) -> None:
    """Of a configured seed: calls that run together draw what they draw one after the other."""
    config = {**_CONFIG, "seed": 11}
    data = [ctx.prompts(6, 4, 9, seed=n) for n in range(6)]
    one = ctx.fresh_generation(**config)
    one.prepare_for_generation()
    expected = [generated(each, one.generate(each)) for each in data]
    other = ctx.fresh_generation(**config)
    other.prepare_for_generation()

    async def read(each: BatchedDataDict[Any], stream: Any) -> list[list[int]]:
        rows = {index: output async for index, output in stream}
        lengths = enumerate(each["input_lengths"].tolist())
        return [rows[i]["output_ids"][0, length:].tolist() for i, length in lengths]

    async def together() -> list[list[list[int]]]:
        streams = [other.generate_async(each) for each in data]
        pairs = list(zip(data, streams, strict=True))
        last_first = [read(each, stream) for each, stream in reversed(pairs)]
        return list(reversed(await asyncio.gather(*last_first)))

    for got, alone in zip(asyncio.run(together()), expected, strict=True):
        same_draws(ctx, got, alone)


@check("G18", needs=("generation",), timeout_s=180.0)
def every_call_uses_one_version(ctx: Context) -> None:
    """Refits among calls that never pause: each refit gets its turn, each call one version."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    data, expected = ctx.prompts(5, 9, 3, 40), {}
    begin, stop = engine.weights_version, threading.Event()
    outputs: list[BatchedDataDict[Any]] = []

    def call() -> None:
        while not stop.is_set():
            outputs.append(engine.generate(data, greedy=True))

    with ThreadPoolExecutor(4) as pool:
        callers = [pool.submit(call) for _ in range(4)]
        try:
            for version in range(begin, begin + 4):
                expected[version] = engine.generate(data, greedy=True)
                rows = expected[version]["weights_version"].tolist()
                same(rows, [version] * 4, "weights_version of the rows of a call")
                if version < begin + 3:
                    shuffle(policy, version)
                    run_refit(policy, engine)
        finally:
            stop.set()
        for caller in callers:
            caller.result()
    require(len(outputs) > 4, "calls served beside the refits", "more than 4", len(outputs))
    for output in outputs:
        version, *others = set(output["weights_version"].tolist())
        same(others, [], f"versions of the rows of one call, beside {version}")
        right, alike = expected[version], 0
        for row, end in enumerate(right["unpadded_sequence_lengths"].tolist()):
            if torch.equal(output["output_ids"][row, :end], right["output_ids"][row, :end]):
                ctx.measure_error(output["logprobs"][row, :end], right["logprobs"][row, :end])
                alike += 1
        # Where two tokens are as likely, rounding chooses, and that depends on a row's company.
        what = f"rows of a call of version {version} with the tokens of that version's weights"
        require(alike >= 2, what, "at least 2 of 4", alike)
    exact(ctx, policy, engine, "after the calls", begin + 3)


@check("G18")
def no_call_waits_forever(ctx: Context) -> None:
    """Among callers that never pause, one that comes later is served while each has a few turns."""
    generation, stop = ctx.generation(**_CONFIG), threading.Event()
    data, turns = ctx.prompts(5, 9, 3), [0] * 6
    late: Any = None

    def call(caller: int) -> None:
        while not stop.is_set():
            generation.generate(data, greedy=True)
            turns[caller] += 1

    most, waited = 10 * len(turns), 0
    with ThreadPoolExecutor(len(turns) + 1) as pool:
        callers = [pool.submit(call, n) for n in range(len(turns))]
        try:
            while not all(turns) and max(turns) <= most and not any(c.done() for c in callers):
                time.sleep(0.001)
            waited = max(turns) if not all(turns) else 0
            for _ in range(5):
                before = sum(turns)
                late = pool.submit(generation.generate, data, True)
                while not late.done() and waited <= most:
                    time.sleep(0.001)
                    waited = max(waited, sum(turns) - before)
        finally:
            stop.set()
        for caller in (*callers, late):
            caller.result()  # also what it raised
    require(waited <= most, "later calls that were served before a call", f"<= {most}", waited)


@check("G18")
def a_long_call_makes_progress_among_short_ones(ctx: Context) -> None:
    """Callers of one token each, who never pause, do not keep a call of many tokens from ending."""
    generation, stop = ctx.generation(**_LONG_CONFIG), threading.Event()
    long, short, turns = ctx.prompts(_LONG), ctx.prompts(_CONTEXT - 1), [0] * 6

    def call(caller: int) -> None:
        while not stop.is_set():
            generation.generate(short, greedy=True)
            turns[caller] += 1

    most = 3 * _CONTEXT * len(turns)
    late: Any = None
    with ThreadPoolExecutor(len(turns) + 1) as pool:
        callers = [pool.submit(call, n) for n in range(len(turns))]
        try:
            late = pool.submit(generation.generate, long, True)
            while not late.done() and sum(turns) <= most:
                time.sleep(0.001)
            waited = sum(turns)
        finally:
            stop.set()
        for caller in (*callers, late):
            caller.result()
    what = f"later calls that were served before one of {_CONTEXT - _LONG} tokens"
    require(waited <= most, what, f"<= {most}", waited)


def _seconds(generation: Any, prompts: BatchedDataDict[Any]) -> float:
    """How long a greedy call takes here and now."""
    started = time.perf_counter()
    generation.generate(prompts, greedy=True)
    return time.perf_counter() - started


@check("G18")
def a_call_has_a_deadline(ctx: Context) -> None:
    """With ``call_deadline_s`` a call that takes longer is given up, and the next one is served."""
    short, deadline_s = ctx.prompts(_SHORT), _DEADLINE_S
    if ctx.settings.url is None:  # a server is one engine
        alone = min(_seconds(ctx.generation(**_LONG_CONFIG), short) for _ in range(3))
        deadline_s = max(_DEADLINE_S, _SHORT_CALLS * alone)
    generation = ctx.fresh_generation(**_LONG_CONFIG, call_deadline_s=deadline_s)
    generation.prepare_for_generation()
    rows = 4
    try:
        # Each call takes at most twice as long as the one before: what cannot be stopped ends soon.
        while rows < 4096:
            rows *= 2
            took = _seconds(generation, ctx.prompts(*[_LONG] * rows))
            what, most = f"seconds, with call_deadline_s={deadline_s:.1f}", 3 * deadline_s
            require(took < most, what, f"< {most:.1f}", f"{took:.1f}")
        ctx.not_run(
            f"no call passed its deadline: {rows} rows of 126 tokens took {took:.1f} s",
            excused=True,
        )
    except DeadlineError as error:
        named = "call_deadline_s" in str(error)
        require(named, "the DeadlineError", "it names call_deadline_s", error)
    lengths, patience = None, time.monotonic() + _PATIENCE * deadline_s
    while lengths is None and time.monotonic() < patience:
        with suppress(DeadlineError):  # on a busy machine, or behind what cannot be stopped
            lengths = generation.generate(short, greedy=True)["generation_lengths"].tolist()
    what = f"generation_lengths of a call {_PATIENCE} deadlines after one that passed its deadline"
    same(lengths, [2], what)
    started, most = time.monotonic(), _PATIENCE * deadline_s
    generation.finish_generation()
    took = time.monotonic() - started
    what = "seconds of finish_generation after the deadline"
    require(took < most, what, f"< {most:.0f}", f"{took:.0f}")


@check("G18", capability="concurrent_calls")
def a_short_call_does_not_wait_for_a_long_one(ctx: Context) -> None:
    """Calls of two tokens are made and done while one of many tokens goes on."""
    generation = ctx.generation(**_LONG_CONFIG)
    short, finished, long_enough = ctx.prompts(_SHORT), [], 0
    alone = min(_seconds(generation, short) for _ in range(3))
    for rows in (8, 64, 512, 4096):  # until short calls fit into the time of a long one
        prompts, started, count = ctx.prompts(*[_LONG] * rows), time.perf_counter(), 0
        with ThreadPoolExecutor(1) as pool:
            going_on = pool.submit(generation.generate, prompts, True)
            time.sleep(0.005)
            while not going_on.done():
                generation.generate(short, greedy=True)
                count += not going_on.done()
        finished.append(count)
        if count > 2:
            return
        long_enough += time.perf_counter() - started > 20 * alone
        if long_enough == 2:
            break
    fail("short calls that ended before a long one, of 8 rows and more", "> 2", finished)


@check("G18", capability="concurrent_calls", timeout_s=180.0)
def rows_that_are_given_up_are_freed_at_once(ctx: Context) -> None:
    """After an abandoned stream, a call does not wait for the rest of that stream."""
    generation = ctx.generation(**_LONG_CONFIG)
    short, rows = ctx.prompts(_SHORT), random_rows([_SHORT] + [_LONG] * 1023)

    async def leave() -> None:
        stream = generation.generate_async(ctx.batch(rows), True)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    before, ratios = min(_seconds(generation, short) for _ in range(5)), []
    for _ in range(_TRIES):
        asyncio.run(leave())
        generation.finish_generation(release_gpu=False)  # once the step that went on has ended
        # Rows that went on would slow all of them.
        ratios.append(min(_seconds(generation, short) for _ in range(3)) / before)
        if ratios[-1] <= 5:
            return
        time.sleep(1)
    listed = ", ".join(f"{ratio:.0f}" for ratio in ratios)
    fail("a call after the stream was left: its time, relative to before", "at most 5", listed)


@refusal("generation", "concurrent_calls")
def calls_are_served_in_turn(ctx: Context) -> None:
    """A backend without concurrent_calls serves calls that are made at once, one by one."""
    generation = ctx.generation()
    before = greedy(ctx, generation)
    for output in _at_once([lambda: greedy(ctx, generation)] * 4):
        same_output(ctx, output, before)


@check("G18", capability="async_generation")
def a_stream_has_a_deadline(ctx: Context) -> None:
    """With ``call_deadline_s`` a stream that takes longer ends with a DeadlineError."""
    generation = ctx.fresh_generation(**_LONG_CONFIG, call_deadline_s=0.001)
    generation.prepare_for_generation()
    data = ctx.prompts(*[_LONG] * 16)

    async def read() -> None:
        async for _ in generation.generate_async(data, greedy=True):
            pass

    with raises(DeadlineError, "call_deadline_s"):
        asyncio.run(read())
