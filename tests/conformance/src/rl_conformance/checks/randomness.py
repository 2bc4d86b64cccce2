"""G9, G10, G17: where the random numbers come from, and that no two draws share theirs."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated, random_rows
from rl_conformance.checks.calls import text_row
from rl_conformance.draws import quantiles, same_draws
from rl_conformance.expect import raises, require
from rl_conformance.refits import run_refit
from rl_conformance.registry import check
from rl_conformance.statistics import chi_square_p_value
from rl_conformance.ways import settable_trainer
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rl_conformance.context import Context

_SEEDS = [0, 1, 5, 2**31 - 1, 2**31, 2**32 + 5, 2**40 + 3, 2**62 + 9]
#: Nothing ends a row by chance: short rows may be equal.
_CONFIG: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 6, "eos_token_id": []}


@check("G9")
def a_row_draws_from_its_own_seed(ctx: Context) -> None:
    """Whatever its place, its company and the calls before, a row draws what its seed says."""
    generation = ctx.generation(**_CONFIG)
    rows = random_rows([5, 17, 3, 9, 5, 1, 12, 7], seed=8)
    stops = [None, list("aeiouAEIOU"), None, ["e"], None, list("stlnr"), None, None]
    data = ctx.batch(rows, stop_strings=stops)
    data["seed"] = torch.tensor(_SEEDS)
    together = generated(data, generation.generate(data))
    order = [4, 7, 0, 2, 6, 1, 5, 3]
    moved = generated(data.select_indices(order), generation.generate(data.select_indices(order)))
    alone = [
        generated(one, generation.generate(one))[0]
        for one in (data.slice(row, row + 1) for row in range(len(rows)))
    ]
    same_draws(ctx, alone, together, data["seed"])
    same_draws(ctx, moved, [together[i] for i in order], data["seed"][order])


@check("G9")
def equal_seeds_draw_alike_and_others_do_not(ctx: Context) -> None:
    """Of rows with one prompt, those with one seed are equal, also large ones and 0."""
    prompt = random_rows([5], seed=2)[0]
    seeds = [*_SEEDS, *_SEEDS, 2, 4, 6]
    data = ctx.batch([prompt] * len(seeds))
    data["seed"] = torch.tensor(seeds)
    rows = generated(data, ctx.generation(**_CONFIG).generate(data))
    count = len(_SEEDS)
    same_draws(ctx, rows[:count], rows[count : 2 * count], data["seed"])
    # Generators of 32 bits take 5 and 2**32 + 5 for one.
    others = [row for row, seed in zip(rows, seeds, strict=True) if seed != 2**32 + 5]
    distinct = {tuple(row) for row in others}
    require(len(distinct) >= count + 2, f"{count + 2} seeds draw {len(distinct)} different rows")


@check("G9", cases={"zero": {"seed": 0}, "large": {"seed": 2**31 + 11}})
def a_configured_seed_of_any_size_is_one(ctx: Context, seed: int) -> None:
    """Engines with it repeat each other, call by call; unlike another seed's."""
    data = ctx.prompts(*[5, 7, 3, 6] * 4)
    calls = []
    for each in (seed, seed, 12345):
        generation = ctx.fresh_generation(seed=each, **_CONFIG)
        generation.prepare_for_generation()
        calls.append([generated(data, generation.generate(data)) for _ in range(2)])
    for first, second in zip(*calls[:2], strict=True):
        same_draws(ctx, second, first)
    _no_row_twice(calls[0][0], calls[2][0], "engines with different seeds")


@check("G9")
def the_ith_row_draws_from_the_ith_stream(ctx: Context) -> None:
    """In whatever calls rows come, and whatever rows came in between."""
    data = ctx.prompts(*[5, 7, 3, 6] * 3)
    whole, parts = (ctx.fresh_generation(seed=11, **_CONFIG) for _ in range(2))
    whole.prepare_for_generation()
    expected = generated(data, whole.generate(data))
    parts.prepare_for_generation()
    drawn = []

    def draw(first: int, end: int) -> None:
        rows = data.slice(first, end)
        drawn.extend(generated(rows, parts.generate(rows)))

    draw(0, 1)
    draw(1, 2)
    parts.generate(data.slice(0, 2), greedy=True)
    seeded: BatchedDataDict[Any] = BatchedDataDict(data.slice(0, 3))
    seeded["seed"] = torch.tensor([1, 2, 3])
    parts.generate(seeded)
    draw(2, 6)
    refused: BatchedDataDict[Any] = BatchedDataDict(data.slice(6, 8))
    refused["input_lengths"] = torch.tensor([0, 3])
    with raises(DataError):
        parts.generate(refused)
    drawn.extend(expected[6:8])  # these rows were asked for
    draw(8, 12)
    same_draws(ctx, drawn, expected)


@check("G9")
def no_stream_starts_over_for_a_sleep_or_a_refit(ctx: Context) -> None:
    """The row after either draws from the stream after the last row's."""
    data = ctx.prompts(5, 7, 3, 6)
    config = {**_CONFIG, "temperature": 1.0, "model_name": str(ctx.model("qwen2", seed=0))}
    whole, parts = (ctx.fresh_generation(seed=11, **config) for _ in range(2))
    for engine in (whole, parts):
        engine.prepare_for_generation()
    expected = generated(data, whole.generate(data))
    drawn = generated(data.slice(0, 1), parts.generate(data.slice(0, 1)))
    parts.finish_generation()
    parts.prepare_for_generation()
    drawn += generated(data.slice(1, 2), parts.generate(data.slice(1, 2)))
    run_refit(settable_trainer(ctx, seed=0), parts)  # of the weights that it has
    drawn += generated(data.slice(2, 4), parts.generate(data.slice(2, 4)))
    same_draws(ctx, drawn, expected)


@check("G9", capability="async_generation")
def streamed_rows_take_their_streams_as_they_are_asked_for(ctx: Context) -> None:
    """One row per call, many at once, of one prompt: in the order of calls, a row given up too."""
    data = ctx.batch([random_rows([5], seed=2)[0]] * 6)
    whole, parts = (ctx.fresh_generation(seed=12, **_CONFIG) for _ in range(2))
    for engine in (whole, parts):
        engine.prepare_for_generation()
    expected = generated(data, whole.generate(data))
    streams = [parts.generate_async(data.slice(row, row + 1)) for row in range(6)]

    async def read(stream: AsyncIterator[tuple[int, BatchedDataDict[Any]]]) -> list[int]:
        [(_, output)] = [item async for item in stream]
        return generated(data.slice(0, 1), output)[0]

    async def everything() -> list[list[int]]:
        last_first = [read(stream) for stream in reversed(streams)]
        return (await asyncio.gather(*last_first))[::-1]

    del streams[2]  # nobody reads it
    same_draws(ctx, asyncio.run(everything()), expected[:2] + expected[3:])
    require(len({tuple(row) for row in expected}) == 6, "rows of one prompt draw the same tokens")


@check("G9")
def engines_without_a_seed_differ(ctx: Context) -> None:
    """Two new engines draw other tokens, in their first call and in their second."""
    data = ctx.batch([random_rows([5], seed=2)[0]] * 12)
    drawn = []
    for _ in range(2):
        generation = ctx.fresh_generation(**_CONFIG)
        generation.prepare_for_generation()
        drawn += [row for _ in range(2) for row in generated(data, generation.generate(data))]
    distinct = len({tuple(row) for row in drawn})
    require(distinct == len(drawn), f"of {len(drawn)} unseeded rows {distinct} are different")


def _no_row_twice(first: list[list[int]], second: list[list[int]], who: str) -> None:
    same = [row for row, (a, b) in enumerate(zip(first, second, strict=True)) if a == b]
    require(not same, f"{who} draw the same tokens in rows {same}")


@check("G9")
def the_program_s_own_random_numbers_stay_random(ctx: Context) -> None:
    """What the program draws after a call is not what it drew after an earlier one."""
    data = ctx.prompts(5, 3, 4)
    data_seeded: BatchedDataDict[Any] = BatchedDataDict({**data, "seed": torch.tensor([1, 2, 3])})
    generation = ctx.generation(seed=3, **_CONFIG)
    calls = {
        "greedy": (data, True),
        "seeded": (data, False),
        "seeded by row": (data_seeded, False),
    }
    for what, (batch, greedy) in calls.items():
        numbers = []
        for seed in (101, 202):
            _seed_everything(seed)
            generation.generate(batch, greedy=greedy)
            numbers.append((float(torch.rand(())), random.random(), _numpy_number()))
        for library, one, two in zip(("torch", "random", "numpy"), *numbers, strict=True):
            require(one != two, f"a {what} call resets the random state of {library}")


def _seed_everything(seed: int) -> None:
    import numpy as np

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _numpy_number() -> float:
    import numpy as np

    return float(np.random.random())


# -- G10: all of a row, and all rows ---------------------------------------------------------------

_ROWS, _STEPS, _BINS = 512, 5, 32
#: Of a test that is repeated for every step, prompt and neighbour.
_ERROR_RATE = 1e-6
#: Row and step from one draw to another that could share its random number with it.
_NEIGHBOURS = {
    "the row after it": (1, 0),
    "the step after it": (0, 1),
    "the row after, the step before": (1, -1),
    "the row and the step after": (1, 1),
    "the row four places on": (4, 0),
}
_WAYS: dict[str, dict[str, Any]] = {
    "temperature": {"how": {"temperature": 1.5}},
    "truncated": {"how": {"temperature": 1.5, "top_k": 40, "top_p": 0.9}},
    "unseeded": {"how": {"temperature": 1.4}, "seeded": False},
}


@check("G10", cases=_WAYS)
def every_draw_follows_the_declared_distribution(
    ctx: Context, how: dict[str, Any], seeded: bool = True
) -> None:
    """At every step and for every prompt, and no two draws depend on each other."""
    prompts = random_rows([6] * 4, seed=31)
    data = ctx.batch([prompts[row % 4] for row in range(_ROWS)])
    if seeded:
        data["seed"] = torch.arange(_ROWS) + 1000
    output = ctx.generation(max_new_tokens=_STEPS, **how).generate(data)
    places = quantiles(ctx, output, 6, **how)
    steps = places.shape[1]
    groups = {f"step {step}": places[:, step] for step in range(steps)}
    groups |= {f"prompt {n}": places[n::4].flatten() for n in range(4)}
    for name, values in groups.items():
        drawn = values[~values.isnan()]
        counts = (drawn * _BINS).long().bincount(minlength=_BINS)
        p_value = chi_square_p_value(counts, torch.full((_BINS,), 1 / _BINS))
        ctx.measure(f"1 - p_value of {name}", 1 - p_value, 1 - _ERROR_RATE)
    for name, (rows, step) in _NEIGHBOURS.items():
        one = places[: _ROWS - rows, max(0, -step) : steps - max(0, step)]
        two = places[rows:, max(0, step) : steps + min(0, step)]
        both = ~(one.isnan() | two.isnan())
        a, b = one[both] - 0.5, two[both] - 0.5
        # 12 is the reciprocal of the variance of a uniform number.
        sigmas = float((a * b).sum().abs() * 12 / both.sum().sqrt())
        ctx.measure(f"correlation with {name}", sigmas, 5.0, "sigma")


# -- G17 -------------------------------------------------------------------------------------------


@check("G17")
def sample_k_draws_from_seed_plus_k(ctx: Context) -> None:
    """All samples of rows with seeds of their own, not only the first two."""
    count = 5
    data = ctx.prompts(5, 7, 3, 6)
    data["seed"] = torch.tensor([0, 100, 2**31 - 2, 7])
    several = ctx.generation(num_samples=count, **_CONFIG).generate(data)
    rows = data.repeat_interleave(count)
    rows["seed"] = torch.tensor([seed + k for seed in data["seed"].tolist() for k in range(count)])
    single = ctx.generation(**_CONFIG).generate(rows)
    same_draws(ctx, generated(rows, several), generated(rows, single), rows["seed"])
    drawn = generated(rows, several)
    for row in range(4):
        distinct = len({tuple(one) for one in drawn[row * count : (row + 1) * count]})
        require(distinct == count, f"{count} samples of row {row} are {distinct} different ones")


@check("G17")
def samples_draw_as_rows_of_their_own(ctx: Context) -> None:
    """With a configured seed, sample k of row i is what row n * i + k is without samples."""
    data = ctx.prompts(5, 7)
    several = ctx.fresh_generation(seed=13, num_samples=3, **_CONFIG)
    single = ctx.fresh_generation(seed=13, **_CONFIG)
    drawn = []
    for engine in (several, single):
        engine.prepare_for_generation()
    rows = data.repeat_interleave(3)
    for first in (0, 1):
        one = data.slice(first, first + 1)
        drawn += generated(one.repeat_interleave(3), several.generate(one))
    same_draws(ctx, drawn, generated(rows, single.generate(rows)))


@check("G17")
def every_column_is_repeated(ctx: Context) -> None:
    """Stop strings, lengths and further columns belong to all samples of their row."""
    stopped, word = text_row(ctx)
    data = ctx.batch([row.prompt for row in (stopped, *ctx.certain(3, 9))])
    data["stop_strings"] = [[word], None, []]
    data["score"], data["label"] = torch.arange(6.0).view(3, 2), [["a"], ["b", "c"], []]
    several = ctx.generation(num_samples=4, max_new_tokens=4).generate(data, greedy=True)
    single = ctx.generation(max_new_tokens=4).generate(data, greedy=True).repeat_interleave(4)
    require(set(several) == set(single), f"columns {sorted(several)}, not {sorted(single)}")
    for key, value in single.items():
        if key == "logprobs":
            ctx.measure_error(several[key], value)
        elif isinstance(value, torch.Tensor):
            require(torch.equal(several[key], value), f"{key} of the samples is not the row's")
        else:
            require(several[key] == value, f"{key} is {several[key]}, expected {value}")


@check("G17")
def unseeded_samples_differ(ctx: Context) -> None:
    """Samples without any seed are different, in one call and in the next."""
    generation = ctx.generation(num_samples=6, **_CONFIG)
    data = ctx.prompts(5, 7)
    repeated = data.repeat_interleave(6)
    first, second = (generated(repeated, generation.generate(data)) for _ in range(2))
    for start in (0, 6):
        rows = [tuple(row) for row in (*first[start : start + 6], *second[start : start + 6])]
        require(len(set(rows)) == 12, f"12 unseeded samples are {len(set(rows))} different ones")
