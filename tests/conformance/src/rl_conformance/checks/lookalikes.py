"""G8: prompts that are alike in part, which a cache of prefixes could take for one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_conformance.batches import generated_mask, random_rows
from rl_conformance.draws import declared_logprobs
from rl_conformance.registry import check

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
def prompts_that_are_alike_are_told_apart(ctx: Context, length: int) -> None:
    """In one call, and in calls one after another, each is continued with its own log-probs."""
    generation = ctx.generation(max_new_tokens=2)
    rows = _lookalikes(length)
    for batch in (rows, *([row] for row in rows[:4]), [*reversed(rows), *rows[:2]]):
        data = ctx.batch(batch)
        output = generation.generate(data, greedy=True)
        expected = declared_logprobs(ctx, data, output)
        ctx.measure_error(output["logprobs"][generated_mask(data, output)], expected, rounding=2)
