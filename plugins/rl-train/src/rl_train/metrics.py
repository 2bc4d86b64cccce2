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

from rl_train.lines import as_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
    metrics: dict[str, float] = {}
    rewards = [as_number(reward) for reward in total]
    groups = [rewards[i : i + group_size] for i in range(0, len(rewards), group_size)]
    for name, values in rewards_each.items():
        of_name = [as_number(value) for value in values]
        metrics[f"rewards/{name}/mean"] = _mean(of_name)
        metrics[f"rewards/{name}/std"] = _std(of_name)
    metrics["reward"], metrics["reward_std"] = _mean(rewards), _std(rewards)
    equal = [group_size == 1 or _std(group) <= 1e-8 for group in groups]
    metrics["frac_reward_zero_std"] = _mean([float(e) for e in equal])
    ended = [length for length, cut in zip(lengths, truncated, strict=True) if not cut] or [0]
    for kind, counted in (("", lengths), ("terminated_", ended)):
        metrics[f"completions/mean_{kind}length"] = mean(counted)
        metrics[f"completions/min_{kind}length"] = min(counted)
        metrics[f"completions/max_{kind}length"] = max(counted)
    metrics["completions/clipped_ratio"] = sum(truncated) / len(truncated)
    return metrics


def _mean(values: Iterable[float]) -> float:
    given = [value for value in values if not math.isnan(value)]
    return mean(given) if given else math.nan


def _std(values: Iterable[float]) -> float:
    given = [value for value in values if not math.isnan(value)]
    return stdev(given) if len(given) > 1 else math.nan
