"""G8: greedy output depends on nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_conformance.batches import generated, generated_mask, random_rows
from rl_conformance.checks.common import two_engines
from rl_conformance.draws import declared_logprobs
from rl_conformance.expect import same, same_tensor
from rl_conformance.registry import check
from rl_conformance.served import greedy, same_output

if TYPE_CHECKING:
    from rl_conformance.context import Context


def _lookalikes(length: int) -> list[list[int]]:
    """Prompts of one length that share all but a token, their ends, their beginnings, or their set.

    No two of them are the same.
    """
    [row, other] = random_rows([length, length], seed=length)
    half = length // 2
    return [
        row,
        [other[0], *row[1:]],
        [*row[:half], other[half], *row[half + 1 :]],
        [*other[:half], *row[half:]],
        [*row[:half], *other[half:]],
        [*row[half:], *row[:half]],
        row[::-1],
    ]


@check("G8", cases={f"of_{n}_tokens": {"length": n} for n in (20, 40, 150)})
def similar_prompts_are_not_confused(ctx: Context, length: int) -> None:
    """In one call, and in calls one after another, each is continued with its own log-probs."""
    generation = ctx.generation(max_new_tokens=2)
    rows = _lookalikes(length)
    for batch in (rows, *([row] for row in rows[:4]), [*reversed(rows), *rows[:2]]):
        data = ctx.batch(batch)
        output = generation.generate(data, greedy=True)
        expected = declared_logprobs(ctx, data, output)
        ctx.measure_error(output["logprobs"][generated_mask(data, output)], expected, rounding=2)


@check("G8")
def two_engines_are_independent(ctx: Context) -> None:
    """Engines with other models, limits and stop strings keep to their own, call by call."""
    check_both, engines = two_engines(ctx)
    for engine in engines:
        engine.prepare_for_generation()
    for when in ("at first", "then", "again"):
        check_both(when)


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
        same(got, expected, f"tokens of row {index} among others, as alone")
        ctx.measure_error(
            output["logprobs"][index][mask[index]],
            alone["logprobs"][0][generated_mask(alone_data, alone)[0]],
        )


@check("G8")
def without_do_sample_every_call_is_greedy(ctx: Context) -> None:
    """do_sample=False takes the argmax, whatever the temperature; so the log-prob is raw."""
    rows = ctx.certain(3, 9, 5)
    data = ctx.batch([row.prompt for row in rows])
    generation = ctx.generation(do_sample=False, temperature=1.5, top_k=40, max_new_tokens=4)
    for argmax in (False, True):
        output = generation.generate(data, greedy=argmax)
        got = generated(data, output)
        same(got, [row.tokens for row in rows], "greedy tokens")
        logprobs = output["logprobs"][generated_mask(data, output)]
        ctx.measure_error(logprobs, declared_logprobs(ctx, data, output))
