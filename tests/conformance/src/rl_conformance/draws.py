"""Compares what was drawn with what may be drawn according to the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import generated, generated_mask
from rl_conformance.expect import fail, require, same
from rl_conformance.oracle import Truncated, penalised, truncated_distribution

if TYPE_CHECKING:
    from pathlib import Path

    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict

__all__ = ["as_configured", "declared_logprobs", "quantiles", "same_draws"]


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
    oracle = ctx.oracle(path)
    scored: dict[tuple[tuple[int, ...], int], list[torch.Tensor]] = {}
    rows = []
    lengths = data["input_lengths"].tolist()
    for prompt, length, row in zip(
        data["input_ids"].tolist(), lengths, generated(data, output), strict=True
    ):
        rows.append(((*prompt[:length], *row), length))
    for ids, length in dict.fromkeys(rows):
        scored[ids, length] = each = []
        for end, logits in enumerate(oracle.logits(ids)[length - 1 : -1], length):
            scores = penalised(logits.double(), list(ids[:end]), repetition_penalty) / temperature
            of = Truncated.of(scores, slack=ctx.tolerance, **truncation)
            if not of.possible[ids[end]]:
                what = f"a token of what top_k and top_p leave after {list(ids[:end])}"
                fail("drawn tokens", what, ids[end])
            each.append(of.logprobs[ids[end]])
    return torch.stack([logprob for row in rows for logprob in scored[row]]).float()


def as_configured(
    ctx: Context, data: BatchedDataDict[Any], output: BatchedDataDict[Any], config: dict[str, Any]
) -> None:
    """Fails unless each row of an output is one that the configuration allows.

    Where it ends, what fills it, which tokens it may have and how likely they are follow from its
    own tokens, so that no rounding matters.

    Args:
        ctx: Of the check.
        data: The prompts, a row for each sample.
        output: What came of them.
        config: Of the engine; ``do_sample`` is False for a greedy call.
    """
    oracle, eos = ctx.oracle(), config["eos_token_id"]
    stops = {*(oracle.eos_token_ids if eos is None else eos), *(config["stop_token_ids"] or ())}
    shared, limit = config["stop_strings"] or [], config["max_model_len"] or oracle.context
    decode, lengths = oracle.tokenizer.decode, data["input_lengths"].tolist()
    truncated = output["truncated"].tolist()
    for row, tokens in enumerate(generated(data, output)):
        room = min(config["max_new_tokens"], limit - lengths[row])
        strings = [
            *shared,
            *((data["stop_strings"][row] if "stop_strings" in data else None) or ()),
        ]
        ends = (
            count
            for count, token in enumerate(tokens, 1)
            if token in stops or any(string in decode(tokens[:count]) for string in strings)
        )
        end = next(ends, None)
        what = f"number of tokens of row {row}, which are {tokens}, and truncated"
        same((len(tokens), truncated[row]), (room if end is None else end, end is None), what)
    inside = generated_mask(data, output)
    pad = config["pad_token_id"]
    past = torch.arange(inside.shape[1]) >= output["unpadded_sequence_lengths"][:, None]
    filled = output["output_ids"][past]
    pad = oracle.pad_token_id if pad is None else pad
    require((filled == pad).all(), "output_ids after the rows' ends", f"only {pad}", filled)
    penalty, temperature = config["repetition_penalty"], config["temperature"]
    drawn: dict[str, Any] = {"top_k": 1, "repetition_penalty": penalty}
    if config["do_sample"]:
        keys = ("temperature", "top_p")
        drawn |= {"top_k": config["top_k"] or 0, **{key: config[key] for key in keys}}
    expected = declared_logprobs(ctx, data, output, **drawn)
    if not config["do_sample"] or config["logprobs_mode"] == "raw":
        expected = declared_logprobs(ctx, data, output)
    scale = penalty / min(1.0, temperature)
    ctx.measure_error(output["logprobs"][inside], expected, scale=scale, rounding=2)


def same_draws(
    ctx: Context,
    got: list[list[int]],
    expected: list[list[int]],
    seeds: torch.Tensor | None = None,
) -> None:
    """Fails unless the draws are equal, but for what rounding may change of the first ones.

    Args:
        ctx: Of the check.
        got: Drawn tokens of each row.
        expected: What each row should have drawn.
        seeds: ``[B]`` int64 of the rows, which a failure names.
    """
    allowed = int(8 * len(expected) * ctx.tolerance[0])
    length = 1 if allowed else None
    pairs = enumerate(zip(got, expected, strict=True))
    changed = [row for row, (a, b) in pairs if a[:length] != b[:length]]
    detail = ""
    if changed:
        first, own = changed[0], [row if seeds is None else int(seeds[row]) for row in changed[:8]]
        detail = (
            f"row {first} drew {got[first][:length]}, not {expected[first][:length]}; "
            f"changed are the rows {changed[:8]}{', ...' if changed[8:] else ''} of {len(expected)}"
            + ("" if seeds is None else f"; their seeds are {own}")
        )
    ctx.measure("changed_draws", len(changed), allowed, detail=detail)


def quantiles(
    ctx: Context,
    output: BatchedDataDict[Any],
    length: int,
    *,
    path: Path | None = None,
    temperature: float = 1.0,
    **truncation: Any,
) -> torch.Tensor:
    """Where each drawn token stands in its distribution: uniform in [0, 1) if that was it.

    A token covers as much of the interval as it is likely, the likeliest one the lowest part; the
    place within is random.

    Args:
        ctx: Of the check.
        output: Of prompts of one length.
        length: That length.
        path: Of the model, if it is not the main one.
        temperature: Divides the logits.
        **truncation: ``top_k`` and ``top_p``.

    Returns:
        ``[B, T]`` float64 for the steps that were made, NaN where a row had ended.
    """
    oracle, ids = ctx.oracle(path), output["output_ids"]
    with torch.no_grad():
        logits = oracle.model(ids, use_cache=False).logits[:, length - 1 : -1].double()
    likely = truncated_distribution(logits / temperature, **truncation)
    share = likely.gather(-1, ids[:, length:, None])
    below = likely.where(likely > share, 0).sum(-1)  # no two are equal but by a freak of rounding
    within = torch.rand(below.shape, generator=torch.Generator().manual_seed(17)).double()
    places = (below + share[..., 0] * within).clamp(max=1 - 1e-9)
    ended = torch.arange(below.shape[1]) >= output["generation_lengths"][:, None]
    return places.masked_fill(ended, torch.nan)
