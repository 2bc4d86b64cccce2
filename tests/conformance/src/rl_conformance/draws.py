"""What was drawn, against what the oracle says may be drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated
from rl_conformance.expect import fail
from rl_conformance.oracle import Truncated, penalised, truncated_distribution

if TYPE_CHECKING:
    from pathlib import Path

    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict

__all__ = ["declared_logprobs", "quantiles", "same_draws"]


def declared_logprobs(
    ctx: Context,
    data: BatchedDataDict[Any],
    output: BatchedDataDict[Any],
    *,
    path: Path | None = None,
    temperature: float = 1.0,
    repetition_penalty: float = 1.0,
    **truncation: Any,
) -> torch.Tensor:
    """The log-probs that the generated tokens should carry.

    Args:
        ctx: Of the check.
        data: The prompts.
        output: What came of them.
        path: Of the model, if it is not the main one.
        temperature: Divides the logits.
        repetition_penalty: See :func:`rl_conformance.oracle.penalised`.
        **truncation: ``top_k`` and ``top_p``.

    Returns:
        ``[N]`` float32, in the order of the mask of generated tokens.
    """
    oracle, expected = ctx.oracle(path), []
    lengths = data["input_lengths"].tolist()
    rows = zip(data["input_ids"].tolist(), lengths, generated(data, output), strict=True)
    for prompt, length, row in rows:
        ids = [*prompt[:length], *row]
        for end, logits in enumerate(oracle.logits(ids)[length - 1 : -1], length):
            scores = penalised(logits.double(), ids[:end], repetition_penalty) / temperature
            of = Truncated.of(scores, slack=ctx.tolerance, **truncation)
            if not of.possible[ids[end]]:
                fail(f"token {ids[end]} after {ids[:end]} is outside the truncated set")
            expected.append(of.logprobs[ids[end]])
    return torch.stack(expected).float()


def same_draws(ctx: Context, got: list[list[int]], expected: list[list[int]]) -> None:
    """Fails unless the draws are equal, but for what rounding may change of the first ones.

    If log-probs are off by e on average, a draw is another with a probability of about e / 2 to e.
    Up to eight times as many as that may change; in float32 there is none, and rows count whole.
    """
    allowed = int(8 * len(expected) * ctx.tolerance[0])
    length = 1 if allowed else None
    changed = sum(a[:length] != b[:length] for a, b in zip(got, expected, strict=True))
    ctx.measure("changed_draws", changed, allowed)


def quantiles(
    ctx: Context,
    output: BatchedDataDict[Any],
    length: int,
    *,
    temperature: float,
    **truncation: Any,
) -> torch.Tensor:
    """Where each drawn token stands in its distribution: uniform in [0, 1) if that was it.

    A token covers as much of the interval as it is likely, the likeliest one the lowest part; the
    place within is random.

    Args:
        ctx: Of the check.
        output: Of prompts of one length.
        length: That length.
        temperature: Divides the logits.
        **truncation: ``top_k`` and ``top_p``.

    Returns:
        ``[B, T]`` float64 for the steps that were made, NaN where a row had ended.
    """
    oracle, ids = ctx.oracle(), output["output_ids"]
    with torch.no_grad():
        logits = oracle.model(ids, use_cache=False).logits[:, length - 1 : -1].double()
    likely = truncated_distribution(logits / temperature, **truncation)
    share = likely.gather(-1, ids[:, length:, None])
    below = likely.where(likely > share, 0).sum(-1)  # no two are equal but by a freak of rounding
    within = torch.rand(below.shape, generator=torch.Generator().manual_seed(17)).double()
    places = (below + share[..., 0] * within).clamp(max=1 - 1e-9)
    ended = torch.arange(below.shape[1]) >= output["generation_lengths"][:, None]
    return places.masked_fill(ended, torch.nan)
