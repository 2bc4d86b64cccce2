"""P14: what a copy on several ranks scores is what it is on one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_conformance.expect import require
from rl_conformance.registry import check
from rl_conformance.several_ranks import (
    beside,
    layouts_of,
    offered,
)

if TYPE_CHECKING:
    from rl_conformance.context import Context

#: As many rows as no two copies share evenly; one of a single token.
_LENGTHS = (12, 3, 30, 1, 17, 8, 21)


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def a_copy_is_on_several_ranks(ctx: Context) -> None:
    """Every layout has more ranks than there are copies, and so some that share one."""
    for layout in layouts_of(ctx):
        with beside(ctx, layout) as pair:
            copies = pair.many.data_parallel_size
            require(copies < layout.ranks, f"{layout.ranks} ranks have {copies} whole copies")


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def scores_are_those_of_one_rank(ctx: Context) -> None:
    """Log-probs, and those of the reference, are the oracle's, however rows are split."""
    data = ctx.prompts(*_LENGTHS)
    for layout in layouts_of(ctx):
        with beside(ctx, layout, untrained=True) as pair:
            heat = pair.config["temperature"]
            oracle = ctx.oracle(pair.path)
            expected = oracle.batch_logprobs(data["input_ids"], data["input_lengths"], heat)
            one, many = pair.scores(data)
            ctx.measure_error(many, one, scale=2 / heat)
            for size in (None, 1, 3):
                scores = pair.many.get_logprobs(data, size)["logprobs"]
                ctx.measure_error(scores, expected, scale=1 / heat)
            reference = pair.many.get_reference_policy_logprobs(data, 2)["reference_logprobs"]
            ctx.measure_error(reference, expected, scale=1 / heat)


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def topk_is_that_of_one_rank(ctx: Context) -> None:
    """The k largest logits of all tokens, also where k is more than any rank has of them."""
    if not offered(ctx, "topk_logits"):
        ctx.not_run("the policy offers no topk_logits", excused=True)
    data = ctx.prompts(*_LENGTHS)
    for layout in layouts_of(ctx):
        with beside(ctx, layout, untrained=True) as pair:
            oracle, heat = ctx.oracle(pair.path), pair.config["temperature"]
            pair.many.prepare_for_lp_inference()
            for k in (5, 200):
                got = pair.many.get_topk_logits(data, k)
                for row, length in enumerate(_LENGTHS):
                    ids = data["input_ids"][row, :length].tolist()
                    logits = oracle.logits(ids)[:-1] / heat
                    values = got["topk_logits"][row, : length - 1]
                    tokens = got["topk_indices"][row, : length - 1]
                    distinct = all(len(set(each)) == k for each in tokens.tolist())
                    require(distinct, f"row {row} has a token twice among its {k}")
                    if length > 1:
                        largest = logits.topk(k).values
                        ctx.measure_error(values, largest, scale=1 / heat, rounding=1.5)
                        looked_up = logits.gather(1, tokens)
                        ctx.measure_error(values, looked_up, scale=1 / heat, rounding=1.5)
