"""G9, G10 and G17: seeds, distributions and samples."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_conformance.batches import generated, generated_mask, random_rows
from rl_conformance.checks.common import read_stream, text_row, with_penalty
from rl_conformance.draws import declared_logprobs, quantiles, same_draws
from rl_conformance.expect import raises, require, same, same_tensor
from rl_conformance.models import families_of
from rl_conformance.oracle import penalised
from rl_conformance.refits import run_refit
from rl_conformance.registry import check, refusal
from rl_conformance.served import greedy, same_output
from rl_conformance.statistics import chi_square_p_value
from rl_conformance.ways import settable_trainer
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, DataError, LifecycleError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rl_conformance.context import Context


@check("G9")
def two_engines_keep_their_seeds(ctx: Context) -> None:
    """An engine draws from its own seed, also when one with another seed was made after it."""
    data = ctx.prompts(*[5, 7] * 8)
    drawn = []
    for beside in (False, True):
        engine = ctx.fresh_generation(seed=7, temperature=1.5, max_new_tokens=4)
        engine.prepare_for_generation()
        if beside:
            other = ctx.fresh_generation(seed=8, temperature=0.9, max_new_tokens=4)
            other.prepare_for_generation()
            other.generate(data)
        drawn.append([generated(data, engine.generate(data)) for _ in range(2)])
    for alone, mixed in zip(*drawn, strict=True):
        same_draws(ctx, mixed, alone)


#: Probability of rejecting a right distribution, for each combination that is tested.
_ERROR_RATE = 1e-4


_DRAWS = 2048


#: Rows are long and hot enough that no two are equal by chance.
_HOT: dict[str, Any] = {"temperature": 1.5, "eos_token_id": []}


@check("G9")
def a_seed_makes_sampling_reproducible(ctx: Context) -> None:
    """Two engines with one seed draw the same tokens, call after call."""
    data, draws = ctx.prompts(*[5, 7, 3, 6] * 8), []
    for _ in range(2):
        generation = ctx.fresh_generation(seed=7, **_HOT)
        generation.prepare_for_generation()
        calls = [generated(data, generation.generate(data)) for _ in range(2)]
        draws.append([row for rows in calls for row in rows])
    one, other = draws
    same_draws(ctx, one, other)


@check("G9")
def another_seed_draws_other_tokens(ctx: Context) -> None:
    """A different seed gives different tokens."""
    data = ctx.prompts(*[5] * 16)
    first = ctx.generation(seed=7, **_HOT).generate(data)
    second = ctx.generation(seed=8, **_HOT).generate(data)
    _all_differ(generated(data, first), generated(data, second), "two seeds")


@check("G9")
def a_seeded_engine_draws_new_samples_in_each_call(ctx: Context) -> None:
    """One prompt, call after call: a seed makes a run reproducible, not its samples equal."""
    data, generation = ctx.prompts(5), ctx.generation(seed=7, temperature=1.5)
    rows = {tuple(generated(data, generation.generate(data))[0]) for _ in range(8)}
    require(len(rows) > 1, "one prompt in eight calls", "different completions", rows)


@check("G9")
def a_row_with_a_seed_is_reproducible(ctx: Context) -> None:
    """Only the seed of a row decides what it draws, whatever was called before."""
    generation = ctx.generation(seed=7, temperature=1.5)
    data = ctx.prompts(*[5, 7, 3, 6] * 8)
    data["seed"] = torch.arange(32) * 1000
    first, second = (generated(data, generation.generate(data)) for _ in range(2))
    same_draws(ctx, second, first, data["seed"])


@check("G9")
def without_a_seed_calls_differ(ctx: Context) -> None:
    """Two unseeded calls draw different tokens."""
    data = ctx.prompts(*[5] * 16)
    generation = ctx.generation(**_HOT)
    first, second = generation.generate(data), generation.generate(data)
    _all_differ(generated(data, first), generated(data, second), "two unseeded calls")


def _all_differ(first: list[list[int]], second: list[list[int]], who: str) -> None:
    """Fails if a row is drawn twice; at this temperature that does not happen by chance."""
    alike = [row for row, (a, b) in enumerate(zip(first, second, strict=True)) if a == b]
    same(alike, [], f"rows in which {who} draw the same tokens")


@check("G9")
def rows_of_a_seeded_batch_differ(ctx: Context) -> None:
    """Equal prompts in one seeded batch draw independently."""
    prompt = random_rows([5])[0]
    data = ctx.batch([prompt] * 16)
    rows = generated(data, ctx.generation(seed=7, **_HOT).generate(data))
    distinct = len({tuple(row) for row in rows})
    same(distinct, 16, "different completions of 16 rows with one prompt")


_COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "temperature_and_top_k": {"temperature": 1.5, "top_k": 12},
    "temperature_and_top_p": {"temperature": 1.5, "top_p": 0.8},
    "all_three": {"temperature": 1.5, "top_k": 20, "top_p": 0.9},
    "top_k_none_is_off": {"top_k": None},
    "top_k_minus_one_is_off": {"top_k": -1},
    "top_k_zero_is_off": {"top_k": 0},
}


@check("G10", cases={name: {"how": how} for name, how in _COMBINATIONS.items()})
def first_tokens_follow_the_declared_distribution(ctx: Context, how: dict[str, Any]) -> None:
    """A chi-square test of the first token does not reject at 1e-4."""
    prompt = random_rows([6], seed=21)[0]
    data = ctx.batch([prompt] * _DRAWS)
    output = ctx.generation(max_new_tokens=1, seed=2, **how).generate(data)
    drawn = output["output_ids"][:, len(prompt)]
    declared = {key: value for key, value in how.items() if key != "top_k" or (value or 0) > 0}
    of = ctx.oracle().truncated(prompt, slack=ctx.tolerance, **declared)
    counts = drawn.bincount(minlength=len(of.probabilities))
    outside = counts[~of.possible].nonzero().flatten()
    same(outside.tolist(), [], "drawn tokens that top_k and top_p exclude")
    # Which tokens stand at the edge is a matter of rounding, how many of them come is not.
    observed, expected = (
        torch.cat([cells[~of.edge], cells[of.edge].sum()[None]])
        for cells in (counts, of.probabilities)
    )
    p_value = chi_square_p_value(observed, expected)
    wanted = expected * _DRAWS
    at = int((observed - wanted).abs().argmax())
    detail = f"one token of {_DRAWS} came {int(observed[at])} times, not about {wanted[at]:.0f}"
    ctx.measure("1 - p_value", 1 - p_value, 1 - _ERROR_RATE, detail=detail)


@check("G17")
def samples_are_laid_out_as_repeat_interleave(ctx: Context) -> None:
    """Greedy samples of each prompt stand side by side."""
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows], label=["a", "b", "c"])
    several = ctx.generation(num_generations=3, max_new_tokens=4).generate(data, greedy=True)
    single = ctx.generation(max_new_tokens=4).generate(data.repeat_interleave(3), greedy=True)
    same_tensor(several["output_ids"], single["output_ids"], "output_ids")
    same(several["label"], single["label"], "column label, repeated")


@check("G17")
def samples_of_a_prompt_are_independent(ctx: Context) -> None:
    """Sampled completions of one prompt differ; sample k equals a row with the seed plus k."""
    data = ctx.prompts(5, 7, 3, 6)
    data["seed"] = torch.arange(4) * 1000
    several = ctx.generation(num_generations=8, **_HOT).generate(data)
    repeated = data.repeat_interleave(8)
    repeated["seed"] += torch.arange(8).repeat(4)
    single = ctx.generation(seed=7, **_HOT).generate(repeated)
    rows = generated(repeated, several)
    same_draws(ctx, rows, generated(repeated, single), repeated["seed"])
    same(len({tuple(row) for row in rows[:8]}), 8, "different completions of 8 samples of row 0")


@refusal("generation", "multi_sample")
def several_samples_are_refused(ctx: Context) -> None:
    """A backend without multi_sample refuses num_generations above 1."""
    with raises(CapabilityError):
        generation = ctx.fresh_generation(num_generations=2)
        generation.prepare_for_generation()
        generation.generate(ctx.prompts(5), greedy=True)


_ONE_CANDIDATE: dict[str, dict[str, Any]] = {
    "top_k_1": {"top_k": 1, "temperature": 1.5},
    "tiny_top_p": {"top_p": 1e-6, "temperature": 1.5},
    "top_k_1_and_top_p": {"top_k": 1, "top_p": 0.5},
    "tiny_top_p_of_the_top_k": {"top_k": 9, "top_p": 1e-6},
}


@check("G10", cases={name: {"how": how} for name, how in _ONE_CANDIDATE.items()})
def the_only_candidate_is_taken(ctx: Context, how: dict[str, Any]) -> None:
    """Where truncation leaves one token, that is the argmax, and it is certain."""
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows])
    output = ctx.generation(max_new_tokens=4, **how).generate(data)
    expected = [row.tokens for row in rows]
    same(generated(data, output), expected, "tokens, where one candidate is left")
    logprobs = output["logprobs"][generated_mask(data, output)]
    require((logprobs > -1e-4).all(), "log-probs of the only candidates", "0", logprobs)


@check("G10")
def a_tiny_temperature_is_greedy(ctx: Context) -> None:
    """At a temperature of 0.01 the likeliest token comes, and its raw log-prob is the logits'."""
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows])
    config: dict[str, Any] = {
        "temperature": 0.01,
        "max_new_tokens": 4,
        "logprobs_mode": "raw",
        "seed": 5,
    }
    output = ctx.generation(**config).generate(data)
    expected = [row.tokens for row in rows]
    same(generated(data, output), expected, "tokens at temperature 0.01")
    got = output["logprobs"][generated_mask(data, output)]
    ctx.measure_error(got, declared_logprobs(ctx, data, output))


_PENALTY = 1.8


@check("G10", cases=families_of("G10"))
def thousands_of_tokens_are_drawn(ctx: Context, family: str) -> None:
    """Of many nearly equal logits truncation keeps thousands, each with its share."""
    path, data = ctx.model(family), ctx.prompts(*[5] * 128)
    how: dict[str, Any] = {"top_k": 12000, "top_p": 0.9}
    config = {**how, "model_name": str(path), "max_new_tokens": 3, "eos_token_id": [], "seed": 2}
    output = ctx.generation(**config).generate(data)
    expected = declared_logprobs(ctx, data, output, path=path, **how)
    ctx.measure_error(output["logprobs"][generated_mask(data, output)], expected)
    places = quantiles(ctx, output, 5, path=path, **how).flatten()
    counts = (places * _BINS).long().bincount(minlength=_BINS)
    p_value = chi_square_p_value(counts, torch.full((_BINS,), 1 / _BINS))
    ctx.measure("1 - p_value", 1 - p_value, 1 - _OTHER_ERROR_RATE)


@check("G10", cases=families_of("G10"))
def a_nucleus_is_the_rows_own(ctx: Context, family: str) -> None:
    """Beside rows that need fewer than 512 tokens for top_p, others keep all that they need."""
    path, data = ctx.model(family), ctx.prompts(*[5] * 16)
    logits = [ctx.oracle(path).logits(row)[-1] for row in data["input_ids"].tolist()]
    shares = torch.stack(logits).softmax(-1).topk(512).values.sum(-1).sort().values
    how = {"top_p": float(shares[7:9].mean())}
    config: dict[str, Any] = {**how, "model_name": str(path), "max_new_tokens": 1, "seed": 2}
    output = ctx.generation(**config).generate(data)
    expected = declared_logprobs(ctx, data, output, path=path, **how)
    ctx.measure_error(output["logprobs"][generated_mask(data, output)], expected)


@check("G10")
def a_repetition_penalty_is_of_the_rows_own_tokens(ctx: Context) -> None:
    """Rows that take the places of others, or share their beginnings, have their own penalties."""
    generation = with_penalty(ctx, repetition_penalty=_PENALTY, temperature=1.3)
    data = ctx.prompts(40, 12, 45, 5, 9, 3).select_indices([0, 1, 2, 3, 4, 5] * 60)
    for argmax in (True, False):
        output = generation.generate(data, greedy=argmax)
        how: dict[str, Any] = {"top_k": 1} if argmax else {"temperature": 1.3}
        expected = declared_logprobs(ctx, data, output, repetition_penalty=_PENALTY, **how)
        if not argmax:
            got = output["logprobs"][generated_mask(data, output)]
            ctx.measure_error(got, expected, scale=_PENALTY, rounding=2)


@check("G10")
def a_repetition_penalty_moves_the_argmax(ctx: Context) -> None:
    """Greedy takes the largest logit after those of the prompt and the completion were lowered."""
    generation = with_penalty(ctx, repetition_penalty=_PENALTY, temperature=1.3)
    data = ctx.prompts(120, 110, 100, 12)
    output, oracle = generation.generate(data, greedy=True), ctx.oracle()
    lengths = data["input_lengths"].tolist()
    gaps, moved = [], 0
    for row, length in enumerate(lengths):
        ids = output["output_ids"][row, : int(output["unpadded_sequence_lengths"][row])].tolist()
        for end, logits in enumerate(oracle.logits(ids)[length - 1 : -1], length):
            scores = penalised(logits, ids[:end], _PENALTY)
            moved += logits.argmax().item() != scores.argmax().item()
            gaps.append(float(scores.max() - scores[ids[end]]))
    require(moved, "the suite's own prompts", "the penalty moves an argmax", "it moves none")
    below = "a greedy token's penalised logit below the largest"
    ctx.measure("gap_to_argmax", max(gaps), 2 * _PENALTY * ctx.tolerance[1], detail=below)


#: Of rows, up to both ends of what 64 bits hold.
_SEEDS = [0, 1, 5, 2**31 - 1, 2**31, 2**32 + 5, 2**40 + 3, 2**62 + 9, 2**63 - 1, -2, -(2**63) + 7]


#: Nothing ends a row by chance: short rows may be equal.
_CONFIG: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 6, "eos_token_id": []}


@check("G9")
def a_row_with_a_seed_does_not_depend_on_the_batch(ctx: Context) -> None:
    """The place of a row, the other rows and earlier calls do not change what it draws."""
    generation = ctx.generation(**_CONFIG)
    rows = random_rows([5, 17, 3, 9, 5, 1, 12, 7, 4, 6, 2], seed=8)
    stops = [None, list("aeiouAEIOU"), None, ["e"], None, list("stlnr"), *[None] * 5]
    data = ctx.batch(rows, stop_strings=stops)
    data["seed"] = torch.tensor(_SEEDS)
    together = generated(data, generation.generate(data))
    order = [4, 10, 7, 0, 2, 9, 6, 1, 5, 8, 3]
    moved = generated(data.select_indices(order), generation.generate(data.select_indices(order)))
    alone = [
        generated(one, generation.generate(one))[0]
        for one in (data.slice(row, row + 1) for row in range(len(rows)))
    ]
    same_draws(ctx, alone, together, data["seed"])
    same_draws(ctx, moved, [together[i] for i in order], data["seed"][order])


@check("G9")
def rows_agree_if_and_only_if_their_seeds_do(ctx: Context) -> None:
    """Of rows with one prompt, those with one seed are equal: 0, negative and the largest, too."""
    prompt = random_rows([5], seed=2)[0]
    seeds = [*_SEEDS, *_SEEDS, 2, 4, 6]
    data = ctx.batch([prompt] * len(seeds))
    data["seed"] = torch.tensor(seeds)
    rows = generated(data, ctx.generation(**_CONFIG).generate(data))
    count = len(_SEEDS)
    same_draws(ctx, rows[:count], rows[count : 2 * count], data["seed"])
    numbers = {seed % 2**32 for seed in seeds}  # a generator may take no more bits than these
    distinct = {tuple(row) for row in rows}
    what = f"completions of {len(numbers)} seeds with different lower halves"
    require(len(distinct) >= len(numbers), what, "all different", sorted(rows))


@check("G9", cases={"zero": {"seed": 0}, "largest": {"seed": 2**64 - 1}})
def a_configured_seed_may_have_any_size(ctx: Context, seed: int) -> None:
    """Engines with it repeat each other, call by call; unlike another seed's."""
    data = ctx.prompts(*[5, 7, 3, 6] * 4)
    calls = []
    for each in (seed, seed, 12345):
        generation = ctx.fresh_generation(seed=each, **_CONFIG)
        generation.prepare_for_generation()
        calls.append([generated(data, generation.generate(data)) for _ in range(2)])
    for first, second in zip(*calls[:2], strict=True):
        same_draws(ctx, second, first)
    pairs = zip(calls[0][0], calls[2][0], strict=True)
    alike = [row for row, (one, other) in enumerate(pairs) if one == other]
    same(alike, [], f"rows in which seeds {seed} and 12345 draw the same tokens")


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
    parts.finish_generation()
    with raises(LifecycleError):
        parts.generate(data.slice(8, 9))
    parts.prepare_for_generation()
    drawn.extend(expected[6:9])  # the refused rows count
    draw(9, 12)
    same_draws(ctx, drawn, expected)


@check("G9")
def sleep_and_refit_do_not_restart_the_seed(ctx: Context) -> None:
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
def streamed_rows_draw_in_the_order_of_calls(ctx: Context) -> None:
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
    same(len({tuple(row) for row in expected}), 6, "different completions of 6 rows of one prompt")


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
    same(distinct, len(drawn), "different completions of rows without a seed")


@check("G9")
def the_global_random_state_is_not_reset(ctx: Context) -> None:
    """What the program draws after a call is not what it drew after an earlier one."""
    data = ctx.prompts(5, 3, 4)
    data_seeded: BatchedDataDict[Any] = BatchedDataDict({**data, "seed": torch.tensor([1, 2, 3])})
    generation = ctx.generation(seed=3, **_CONFIG)
    calls = {
        "greedy": (data, True),
        "seeded": (data, False),
        "seeded by row": (data_seeded, False),
    }
    for what, (batch, argmax) in calls.items():
        numbers = []
        for seed in (101, 202):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            generation.generate(batch, greedy=argmax)
            numbers.append((float(torch.rand(())), random.random(), float(np.random.random())))
        for library, one, two in zip(("torch", "random", "numpy"), *numbers, strict=True):
            want = "it goes on from the program's own seed"
            require(
                one != two, f"{library}'s random state after a {what} call", want, "it was reset"
            )


_ROWS, _STEPS, _BINS = 512, 5, 32


#: Of a test that is repeated for every step, prompt and neighbour.
_OTHER_ERROR_RATE = 1e-6


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
        ctx.measure(f"1 - p_value of {name}", 1 - p_value, 1 - _OTHER_ERROR_RATE)
    for name, (rows, step) in _NEIGHBOURS.items():
        one = places[: _ROWS - rows, max(0, -step) : steps - max(0, step)]
        two = places[rows:, max(0, step) : steps + min(0, step)]
        both = ~(one.isnan() | two.isnan())
        a, b = one[both] - 0.5, two[both] - 0.5
        # 12 is the reciprocal of the variance of a uniform number.
        sigmas = float((a * b).sum().abs() * 12 / both.sum().sqrt())
        ctx.measure(f"correlation with {name}", sigmas, 5.0, "sigma")


@check("G17")
def sample_k_draws_from_seed_plus_k(ctx: Context) -> None:
    """All samples of rows with seeds of their own, not only the first two."""
    count = 5
    data = ctx.prompts(5, 7, 3, 6)
    data["seed"] = torch.tensor([0, 2**63 - count, 2**31 - 2, -3])
    several = ctx.generation(num_generations=count, **_CONFIG).generate(data)
    rows = data.repeat_interleave(count)
    rows["seed"] = torch.tensor([seed + k for seed in data["seed"].tolist() for k in range(count)])
    single = ctx.generation(**_CONFIG).generate(rows)
    same_draws(ctx, generated(rows, several), generated(rows, single), rows["seed"])
    drawn = generated(rows, several)
    for row in range(4):
        distinct = len({tuple(one) for one in drawn[row * count : (row + 1) * count]})
        same(distinct, count, f"different completions of {count} samples of row {row}")


@check("G17")
def samples_draw_as_repeated_rows_do(ctx: Context) -> None:
    """With a configured seed, sample k of row i is what row n * i + k is without samples."""
    data = ctx.prompts(5, 7)
    several = ctx.fresh_generation(seed=13, num_generations=3, **_CONFIG)
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
    several = ctx.generation(num_generations=4, max_new_tokens=4).generate(data, greedy=True)
    single = ctx.generation(max_new_tokens=4).generate(data, greedy=True).repeat_interleave(4)
    same(sorted(several), sorted(single), "columns of the output")
    for key, value in single.items():
        if key == "logprobs":
            ctx.measure_error(several[key], value)
        elif isinstance(value, torch.Tensor):
            same(several[key].tolist(), value.tolist(), f"{key} of the samples, as of their rows")
        else:
            same(several[key], value, f"{key} of the samples, as of their rows")


@check("G17")
def unseeded_samples_differ(ctx: Context) -> None:
    """Samples without any seed are different, in one call and in the next."""
    generation = ctx.generation(num_generations=6, **_CONFIG)
    data = ctx.prompts(5, 7)
    repeated = data.repeat_interleave(6)
    first, second = (generated(repeated, generation.generate(data)) for _ in range(2))
    for start in (0, 6):
        rows = [tuple(row) for row in (*first[start : start + 6], *second[start : start + 6])]
        same(len(set(rows)), 12, "different completions of 12 samples without a seed")


@refusal("generation", "async_generation")
def streaming_is_refused(ctx: Context) -> None:
    """A backend without async_generation refuses and still generates."""
    generation = ctx.generation()
    before = greedy(ctx, generation)
    with raises(CapabilityError):
        read_stream(generation, ctx.prompts(5))
    same_output(ctx, greedy(ctx, generation), before)
