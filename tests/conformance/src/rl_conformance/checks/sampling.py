"""G4, G8, G9, G10, G11, G17: which tokens come, how likely, and from which distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated, generated_mask, random_rows
from rl_conformance.draws import declared_logprobs, same_draws
from rl_conformance.expect import NotRun, raises, require, same_tensor
from rl_conformance.registry import check, refusal
from rl_conformance.served import greedy, same_output
from rl_conformance.statistics import chi_square_p_value
from rl_core.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from rl_conformance.context import Context

#: Probability of rejecting a right distribution, for each combination that is tested.
_ERROR_RATE = 1e-4
_DRAWS = 2048
#: Rows are long and hot enough that no two are equal by chance.
_HOT: dict[str, Any] = {"temperature": 1.5, "eos_token_id": []}


_PROCESSED = {
    "temperature": {"how": {"temperature": 0.7}},
    "top_k": {"how": {"temperature": 1.3, "top_k": 7}},
    "top_p": {"how": {"temperature": 1.2, "top_p": 0.8}},
    "all_three": {"how": {"temperature": 1.4, "top_k": 20, "top_p": 0.9}},
    "top_p_of_the_top_k": {"how": {"temperature": 2.0, "top_k": 6, "top_p": 0.7}},
    "hot": {"how": {"temperature": 5.0}},
    "top_p_of_1_is_off": {"how": {"temperature": 1.5, "top_p": 1.0}},
}


@check("G4", cases=_PROCESSED)
def processed_logprobs_are_of_the_sampled_distribution(ctx: Context, how: dict[str, Any]) -> None:
    """Temperature, then top-k, then top-p, renormalised; the default mode."""
    data = ctx.prompts(5, 5, 5, 5)
    try:
        generation = ctx.generation(seed=1, **how)
    except ConfigError as error:  # an engine that would not do it may say so
        if how["temperature"] <= 2 or "temperature" not in str(error):
            raise
        raise NotRun(str(error), excused=True) from error
    output = generation.generate(data)
    got = output["logprobs"][generated_mask(data, output)]
    expected = declared_logprobs(ctx, data, output, **how)
    ctx.measure_error(got, expected, scale=1 / min(1.0, how["temperature"]), rounding=1.5)


@check("G4")
def raw_logprobs_are_of_the_logits(ctx: Context) -> None:
    """In raw mode temperature and truncation do not show."""
    data = ctx.prompts(5, 5, 5, 5)
    generation = ctx.generation(seed=1, temperature=1.4, top_k=20, top_p=0.9, logprobs_mode="raw")
    output = generation.generate(data)
    got = output["logprobs"][generated_mask(data, output)]
    ctx.measure_error(got, declared_logprobs(ctx, data, output), rounding=1.5)


@check("G4")
def greedy_ignores_temperature_and_truncation(ctx: Context) -> None:
    """With greedy=True the log-prob is raw and the token the argmax."""
    rows = ctx.certain(5, 5, 5, 5)
    data = ctx.batch([row.prompt for row in rows])
    generation = ctx.generation(temperature=1.4, top_k=20, top_p=0.9, seed=1, max_new_tokens=4)
    output = generation.generate(data, greedy=True)
    expected = [row.tokens for row in rows]
    require(generated(data, output) == expected, "the tokens are not the argmax")
    got = output["logprobs"][generated_mask(data, output)]
    ctx.measure_error(got, declared_logprobs(ctx, data, output))


@check("G8")
def greedy_is_deterministic(ctx: Context) -> None:
    """Two calls give the same tokens and log-probs."""
    first, second = (greedy(ctx, ctx.generation()) for _ in range(2))
    same_output(ctx, second, first)


@check("G8")
def greedy_ignores_batch_order(ctx: Context) -> None:
    """Rows in another order give the same rows in that order."""
    rows = [row.prompt for row in ctx.certain(3, 9, 5, 1, 7)]
    data, order = ctx.batch(rows), [4, 2, 0, 3, 1]
    moved = ctx.batch([rows[i] for i in order])
    generation = ctx.generation(max_new_tokens=4)
    before = generation.generate(data, greedy=True)
    after = generation.generate(moved, greedy=True)
    same_tensor(after["output_ids"], before["output_ids"][order], "output_ids")
    ctx.measure_error(after["logprobs"], before["logprobs"][order])


@check("G8")
def greedy_ignores_its_neighbours(ctx: Context) -> None:
    """A row alone gives what it gives among others, longer ones included."""
    rows = [row.prompt for row in ctx.certain(4, 60, 5, 33)]
    together, generation = ctx.batch(rows), ctx.generation(max_new_tokens=4)
    output = generation.generate(together, greedy=True)
    mask = generated_mask(together, output)
    for index, row in enumerate(rows):
        alone_data = ctx.batch([row])
        alone = generation.generate(alone_data, greedy=True)
        got, expected = generated(together, output)[index], generated(alone_data, alone)[0]
        require(got == expected, f"row {index} gives {got} among others, {expected} alone")
        ctx.measure_error(
            output["logprobs"][index][mask[index]],
            alone["logprobs"][0][generated_mask(alone_data, alone)[0]],
        )


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
def calls_with_one_seed_draw_anew(ctx: Context) -> None:
    """One prompt, call after call: a seed makes a run reproducible, not its samples equal."""
    data, generation = ctx.prompts(5), ctx.generation(seed=7, temperature=1.5)
    rows = {tuple(generated(data, generation.generate(data))[0]) for _ in range(8)}
    require(len(rows) > 1, "eight calls of a seeded engine draw the same tokens")


@check("G9")
def a_row_with_a_seed_of_its_own_repeats_itself(ctx: Context) -> None:
    """The seed of a row alone says what it draws, whatever was called before."""
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
    same = [row for row, (a, b) in enumerate(zip(first, second, strict=True)) if a == b]
    require(not same, f"{who} draw the same tokens in rows {same}")


@check("G9")
def rows_of_a_seeded_batch_differ(ctx: Context) -> None:
    """Equal prompts in one seeded batch draw independently."""
    prompt = random_rows([5])[0]
    data = ctx.batch([prompt] * 16)
    rows = generated(data, ctx.generation(seed=7, **_HOT).generate(data))
    require(len({tuple(row) for row in rows}) == 16, "equal prompts draw the same tokens")


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
    require(counts[~of.possible].sum() == 0, "a token outside the truncated set was drawn")
    # Which tokens stand at the edge is a matter of rounding, how many of them come is not.
    p_value = chi_square_p_value(*(_pooled(x, of.edge) for x in (counts, of.probabilities)))
    ctx.measure("1 - p_value", 1 - p_value, 1 - _ERROR_RATE)


def _pooled(cells: torch.Tensor, together: torch.Tensor) -> torch.Tensor:
    return torch.cat([cells[~together], cells[together].sum()[None]])


@check(
    "G11",
    cases={family: {"family": family} for family in ("llama", "qwen2", "qwen3")},
)
def greedy_agrees_with_the_reference(ctx: Context, family: str) -> None:
    """Tokens are the reference's argmax and log-probs lie within the dtype's tolerance."""
    path = ctx.model(family)
    oracle, data = ctx.oracle(path), ctx.prompts(4, 17, 9, 1, 30)
    generation = ctx.generation(model_name=str(path), max_new_tokens=16)
    output = generation.generate(data, greedy=True)
    ends = output["unpadded_sequence_lengths"]
    expected = oracle.batch_logprobs(output["output_ids"], ends)
    inside = generated_mask(data, output)
    got, expected = output["logprobs"][inside], expected[inside]
    title = "Log-prob error of generation against the float32 reference"
    ctx.record_errors(title, family, got, expected, ctx.tolerance[1])
    ctx.measure_error(got, expected)
    gaps = []
    for row, end in enumerate(ends.tolist()):
        ids, start = output["output_ids"][row, :end], int(data["input_lengths"][row])
        scores = oracle.logits(ids.tolist()).log_softmax(-1)[start - 1 : end - 1]
        gaps.append(scores.amax(-1) - scores.gather(1, ids[start:, None])[:, 0])
    ctx.measure("gap_to_argmax", float(torch.cat(gaps).max()), 2 * ctx.tolerance[1])


@check("G17")
def samples_are_laid_out_as_repeat_interleave(ctx: Context) -> None:
    """Greedy samples of each prompt stand side by side."""
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows], label=["a", "b", "c"])
    several = ctx.generation(num_samples=3, max_new_tokens=4).generate(data, greedy=True)
    single = ctx.generation(max_new_tokens=4).generate(data.repeat_interleave(3), greedy=True)
    same_tensor(several["output_ids"], single["output_ids"], "output_ids")
    require(several["label"] == single["label"], "the carried keys are not repeated alike")


@check("G17")
def samples_of_a_prompt_are_independent(ctx: Context) -> None:
    """Sampled completions of one prompt differ; sample k equals a row with the seed plus k."""
    data = ctx.prompts(5, 7, 3, 6)
    data["seed"] = torch.arange(4) * 1000
    several = ctx.generation(num_samples=8, **_HOT).generate(data)
    repeated = data.repeat_interleave(8)
    repeated["seed"] += torch.arange(8).repeat(4)
    single = ctx.generation(seed=7, **_HOT).generate(repeated)
    rows = generated(repeated, several)
    same_draws(ctx, rows, generated(repeated, single), repeated["seed"])
    require(len({tuple(row) for row in rows[:8]}) == 8, "samples of a prompt are the same")


@refusal("generation", "multi_sample")
def several_samples_are_refused(ctx: Context) -> None:
    """A backend without multi_sample refuses num_samples above 1."""
    with raises(CapabilityError):
        generation = ctx.fresh_generation(num_samples=2)
        generation.prepare_for_generation()
        generation.generate(ctx.prompts(5), greedy=True)
