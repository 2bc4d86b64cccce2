"""Names of the metrics of a run, and the computation of those of a generated batch.

Names are those of TRL 1.16, with ``eval_`` before those of an evaluation:

=====================================  ==========================================================
all methods                            ``loss``, ``grad_norm``, ``learning_rate``, ``epoch``,
                                       ``num_tokens`` (prompts and completions since the start),
                                       ``step_time`` (seconds)
GRPO: rewards                          ``reward``, ``reward_std``, ``frac_reward_zero_std``,
                                       ``rewards/<name>/mean``, ``rewards/<name>/std``
GRPO: completions                      ``completions/``: ``mean_length``, ``min_length``,
                                       ``max_length``, ``clipped_ratio`` (share that was cut),
                                       ``mean_terminated_length``, ``min_terminated_length``,
                                       ``max_terminated_length`` (those that were not cut)
GRPO: loss                             ``entropy`` (minus the mean log-prob of the tokens),
                                       ``clip_ratio/region_mean`` (share of clipped tokens), ``kl``
                                       (to the reference, with a KL penalty)
DPO                                    ``rewards/chosen``, ``rewards/rejected``,
                                       ``rewards/margins``, ``rewards/accuracies``
=====================================  ==========================================================

TRL has no name for these:

=====================================  ==========================================================
``logprob_error/max``                  largest difference of log-probs of engine and trainer
``refit/seconds``, ``refit/gb_per_s``  the refit after the step
``time/generate``, ``time/reward``,    seconds of a step's phases
``time/score``, ``time/train``
``weights_version``                    version of the weights that generated the completions
``groups/redrawn``                     prompts that were replaced because their rewards were equal
``rewards/timed_out``                  completions without a reward because of the deadline, if any
``eval_pass@k``                        chance that one of k completions is correct
=====================================  ==========================================================
"""

from __future__ import annotations

import math
from statistics import mean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["generation_metrics"]


def generation_metrics(
    rewards_each: Mapping[str, Sequence[float | None]],
    total: Sequence[float | None],
    group_size: int,
    lengths: Sequence[int],
    truncated: Sequence[bool],
) -> dict[str, float]:
    """Figures of a batch's rewards and completions, with TRL's names and arithmetic.

    Args:
        rewards_each: By name of a function its reward of each row; None or NaN where it gave none.
        total: The weighted sum of each row; None or NaN where no function gave a reward.
        group_size: Rows per prompt, which follow each other.
        lengths: Tokens of each completion.
        truncated: Whether it was cut before it ended.

    Returns:
        By name; NaN where too few rows have a reward.
    """
    rewards = _given(total)
    groups = (total[i : i + group_size] for i in range(0, len(total), group_size))
    equal = [group_size == 1 or _std(_given(group)) <= 1e-8 for group in groups]
    metrics: dict[str, float] = {
        "reward": _mean(rewards),
        "reward_std": _std(rewards),
        "frac_reward_zero_std": sum(equal) / len(equal),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
    }
    for name, values in rewards_each.items():
        metrics[f"rewards/{name}/mean"] = _mean(_given(values))
        metrics[f"rewards/{name}/std"] = _std(_given(values))
    ended = [length for length, cut in zip(lengths, truncated, strict=True) if not cut] or [0]
    for kind, counted in (("", lengths), ("terminated_", ended)):
        metrics[f"completions/mean_{kind}length"] = mean(counted)
        metrics[f"completions/min_{kind}length"] = min(counted)
        metrics[f"completions/max_{kind}length"] = max(counted)
    return metrics


def _given(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and not math.isnan(value)]


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan
