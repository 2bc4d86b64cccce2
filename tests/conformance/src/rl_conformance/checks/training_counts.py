"""P5 and P7: over several microbatches of unequal counts, numbers are those of the whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.expect import require
from rl_conformance.losses import LogitLikelihood, PairLoss, SequenceLikelihood, TellingLoss
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import ColocatablePolicyInterface, LossFunction

_LENGTHS = (12, 3, 30, 1, 17, 8, 2)
_TOKENS = {"enabled": True, "train_mb_tokens": 40}
_SPLITS: dict[str, dict[str, Any]] = {
    "mbs_1": {"mbs": 1, "config": {}},
    "mbs_3": {"mbs": 3, "config": {}},
    "dynamic": {
        "mbs": None,
        "config": {"dynamic_batching": {**_TOKENS, "sequence_length_round": 4}},
    },
    "packed": {"mbs": None, "config": {"sequence_packing": _TOKENS}},
    "configured": {"mbs": None, "config": {"train_micro_batch_size": 2}},
}


def _trained(ctx: Context, **config: Any) -> ColocatablePolicyInterface:
    policy = ctx.fresh_policy(**config)
    policy.prepare_for_training()
    return policy


@check("P5", cases=_SPLITS)
def a_loss_is_told_the_same_whatever_the_split(
    ctx: Context, mbs: int | None, config: dict[str, Any]
) -> None:
    """Every row once, with its own columns, and the counts of the whole batch; metrics add up."""
    data = training_batch(_LENGTHS)
    data["sample_mask"][[0, 4]] = 0
    data["token_mask"][2, 5:9] = 0
    data["token_mask"][:, 0] = 1  # what nothing comes before does not count
    data["row"] = torch.arange(1.0, 8.0)
    data["echo"] = data["input_ids"].clone()
    before = {key: value.clone() for key, value in data.items()}
    tokens = float((data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum())
    expected = {
        "told_rows": 5.0,
        "told_row_numbers": 2.0 + 3 + 4 + 6 + 7,
        "told_tokens": tokens,
        "told_all_tokens_min": tokens,
        "told_all_tokens_max": tokens,
        "told_all_rows_min": 5.0,
        "told_all_rows_max": 5.0,
        "told_shortest_min": 1.0,
        "told_longest_max": 30.0,
        "told_strangers_max": 0.0,
        "told_unscored_max": 0.0,
        "told_widths_max": 0.0,
        "global_valid_toks": tokens,
        "global_valid_seqs": 5.0,
    }
    policy = _trained(ctx, **config)
    for eval_mode in (True, False):
        result = policy.train(data, TellingLoss(), eval_mode, mbs=mbs)
        got = {key: float(result.get(key, "nan")) for key in expected}
        off = {key: got[key] for key in got if abs(got[key] - expected[key]) > 1e-4}
        require(not off, f"eval_mode={eval_mode}: told {off}, expected {expected}")
        error = abs(float(result["told_likelihood"]) + float(result["loss"]))
        ctx.measure("metric_error", error, 1e-4)
    for key, value in before.items():
        require(torch.equal(data[key], value), f"training wrote into the batch's {key}")


def _all_but_one_token(data: BatchedDataDict[Any]) -> None:
    data["token_mask"][:] = 0
    data["token_mask"][4, 16] = 1


def _only_the_last_tokens(data: BatchedDataDict[Any]) -> None:
    rows, last = torch.arange(7), data["input_lengths"] - 1
    data["token_mask"][:] = 0
    data["token_mask"][rows, last] = 1


def _mask(key: str, *rows: int) -> Callable[[Any], None]:
    def apply(data: Any) -> None:
        data[key][list(rows)] = 0

    return apply


_MASKS: dict[str, Callable[[Any], None]] = {
    "the_first_and_the_last_row": _mask("sample_mask", 0, 6),
    "a_microbatch": _mask("sample_mask", 2, 3),
    "the_first_microbatch": _mask("sample_mask", 0, 1),
    "the_longest_row": _mask("sample_mask", 2),
    "the_tokens_of_a_row": _mask("token_mask", 4),
    "the_tokens_of_a_microbatch": _mask("token_mask", 4, 5),
    "all_but_one_token": _all_but_one_token,
    "all_but_the_last_tokens": _only_the_last_tokens,
}


@check("P7", cases={name: {"mask": mask} for name, mask in _MASKS.items()})
def what_is_masked_is_as_if_not_there(ctx: Context, mask: Callable[[Any], None]) -> None:
    """In microbatches of two, loss and gradient are those of what is left."""
    data = training_batch(_LENGTHS)
    mask(data)
    left = data["token_mask"] * data["sample_mask"][:, None]
    left[:, 0] = 0
    result = _trained(ctx).train(data, NegativeLogLikelihood(), mbs=2)
    loss, norm = ctx.oracle().nll(data["input_ids"], data["input_lengths"], left)
    require(float(result["global_valid_toks"]) == float(left.sum()), f"counts: {result}")
    rows = float(data["sample_mask"].sum())
    require(float(result["global_valid_seqs"]) == rows, f"not {rows} valid rows: {result}")
    # Of few tokens none evens out the error of another.
    allowed = ctx.tolerance[0] if left.sum() > 20 else ctx.tolerance[1]
    ctx.measure("loss_error", abs(float(result["loss"]) - loss), allowed)
    error = abs(float(result["grad_norm"]) / norm - 1)
    ctx.measure("grad_norm_relative_error", error, max(allowed, 1e-4))


_LOSSES = {
    "by_sequence": {"loss_fn": SequenceLikelihood(), "temperature": 1.0},
    "of_pairs": {"loss_fn": PairLoss(), "temperature": 1.0},
    "of_logits": {"loss_fn": LogitLikelihood(), "temperature": 1.0},
    "of_logits_with_a_temperature": {"loss_fn": LogitLikelihood(), "temperature": 0.6},
    "of_logprobs_with_a_temperature": {"loss_fn": NegativeLogLikelihood(), "temperature": 0.6},
}


@check("P5", cases=_LOSSES)
def every_kind_of_loss_is_split(ctx: Context, loss_fn: LossFunction, temperature: float) -> None:
    """Of sequences, of pairs that stay together, of logits: the loss is the whole batch's."""
    data = training_batch((12, 3, 30, 1, 17, 8, 2, 9))
    data["sample_mask"][[2, 3]] = 0
    ids, lengths = data["input_ids"], data["input_lengths"]
    scores = ctx.oracle().batch_logprobs(ids, lengths, temperature)
    counts = {
        "global_valid_seqs": data["sample_mask"].sum(),
        "global_valid_toks": (data["token_mask"] * data["sample_mask"][:, None]).sum(),
    }
    logits = isinstance(loss_fn, LogitLikelihood)
    expected = float((NegativeLogLikelihood() if logits else loss_fn)(scores, data, **counts)[0])
    allowed = ctx.tolerance[1] / temperature if isinstance(loss_fn, PairLoss) else None
    for split in ("mbs_1", "mbs_3", "packed"):
        config, mbs = _SPLITS[split]["config"], _SPLITS[split]["mbs"]
        policy = _trained(ctx, temperature=temperature, **config)
        result = policy.train(data, loss_fn, mbs=mbs)
        error = abs(float(result["loss"]) - expected)
        ctx.measure("loss_error", error, allowed or ctx.tolerance[0] / temperature)
