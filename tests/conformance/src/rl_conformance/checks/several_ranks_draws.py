"""P14: nothing that is drawn differs because of the ranks: dropout, and what is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_conformance.batches import generated
from rl_conformance.checks.several_ranks_steps import step_batch, take_steps
from rl_conformance.expect import require, same_tensor
from rl_conformance.losses import TellingLoss
from rl_conformance.registry import check
from rl_conformance.several_ranks import beside, layouts_of, offered, same_step, scores_fit

if TYPE_CHECKING:
    from rl_conformance.context import Context


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def dropout_is_that_of_one_rank(ctx: Context) -> None:
    """Steps that are not clipped, of a model that drops, with dynamic batching: as on one rank."""
    take_steps(ctx, "dropping")


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def evaluating_changes_nothing(ctx: Context) -> None:
    """Evaluated more often than on one rank, it has the same losses and drops the same."""
    data, other = step_batch(2), step_batch(3)
    for layout in layouts_of(ctx):
        with beside(ctx, layout, "dropping", "float32") as pair:
            _, scores = pair.scores(data)
            for rows in (data, other):
                many = pair.many.train(rows, TellingLoss(), eval_mode=True, mbs=2)
            same_step(ctx, pair.one.train(rows, TellingLoss(), eval_mode=True), many)
            same_tensor(pair.scores(data)[1], scores, "logprobs")
            same_step(ctx, *pair.train(data, TellingLoss(), mbs=3))


@check("P14", modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def every_rank_draws_the_same(ctx: Context) -> None:
    """Rows with seeds are those of one rank; without seeds two calls differ, and all fits."""
    if not offered(ctx, "policy_generate"):
        ctx.not_run("the policy offers no policy_generate", excused=True)
    prompts, seeded = ctx.prompts(5, 2, 9, 1), ctx.prompts(5, 2, 9, 1)
    seeded["seed"] = torch.tensor([3, 4, 5, 6])
    for layout in layouts_of(ctx):
        with beside(ctx, layout, "dropping", "float32") as pair:
            one, many = (p.generate(seeded) for p in (pair.one, pair.many))
            rows, expected = generated(seeded, many), generated(seeded, one)
            require(rows == expected, f"seeded rows are {rows}, on one rank {expected}")
            outputs = [many, *(pair.many.generate(prompts) for _ in "12")]
            drawn = [generated(prompts, output) for output in outputs[1:]]
            require(drawn[0] != drawn[1], f"two calls without a seed drew the same: {drawn[0]}")
            for output in outputs:
                scores_fit(ctx, pair.many, prompts, output, "float32")
