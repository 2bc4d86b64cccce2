"""Advantages relative to a group: how much better than the other answers to the same prompt.

All take rewards ``[B]`` as a tensor, list or array, and the groups in one of two ways:
``group_size``, when groups are neighbours of equal size (as ``repeat_interleave`` lays them out),
or ``prompt_ids``, ``[B]`` integers that are equal within a group, or ``[B, S]`` prompts of which
equal rows are a group. Rows whose ``sample_mask`` ``[B]`` is 0 are left out of their group and get
0, and with ``ignore_nan=True`` so are rows whose reward is NaN. All return ``[B]`` float32; a group
with one valid row has no baseline and gets 0. All raise ``ConfigError`` where both or none of
``group_size`` and ``prompt_ids`` are given, and ``DataError`` where shapes disagree, groups do not
fill the batch, or a valid reward is not finite. To bound advantages, clamp what is returned.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, get_type_hints

import torch

from rl_core.config import check_config, nearest
from rl_core.errors import ConfigError, DataError
from rl_losses._groups import Columns, Grouping, Groups, Numbers, read_rows
from rl_losses.tokens import whiten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "ESTIMATORS",
    "AdvantageEstimator",
    "Grouping",
    "gdpo_advantages",
    "groups_without_spread",
    "grpo_advantages",
    "opo_advantages",
    "overlong_penalty",
    "pass_at_k_advantages",
    "reinforce_plus_plus_advantages",
]


def grpo_advantages(
    rewards: Numbers,
    *,
    normalize_std: bool = True,
    std_over: Literal["group", "others", "batch"] = "group",
    leave_one_out_baseline: bool = False,
    baseline: Numbers | None = None,
    eps: float = 1e-6,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """Rewards less their group's baseline, optionally over a standard deviation.

    ``A_i = (r_i - b_i) / (std + eps)``. The baseline is the group's mean (Shao et al. 2024,
    "DeepSeekMath", section 4.1.2), or the mean of the others in the group (RLOO; Kool et al. 2019,
    "Buy 4 REINFORCE Samples, Get a Baseline for Free!"), which does not depend on the row itself.
    The standard deviation is the sample's (divided by n - 1). Dividing by it favours prompts that
    are nearly always or nearly never solved; ``normalize_std=False`` does not (Dr.GRPO; Liu et al.
    2025, "Understanding R1-Zero-Like Training").

    Args:
        rewards: ``[B]`` one for each row.
        normalize_std: Divide by the standard deviation, unless it is 0.
        std_over: Of the rewards of the group, of the others in the group (as NeMo RL has it
            together with ``leave_one_out_baseline``), or of the whole batch.
        leave_one_out_baseline: The baseline leaves the row itself out.
        baseline: ``[B]`` what is subtracted instead, such as the rewards of greedy answers to the
            same prompts (ReMax; Li et al. 2023, arXiv 2310.10505), with ``normalize_std=False``.
        eps: Is added to the standard deviation. TRL has 1e-4.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B]`` float32. A group with one valid row gets 0, unless ``baseline`` is given.
    """
    groups = Groups.read(rewards, **grouping, caller="grpo_advantages")
    centred = advantages = groups.centred(groups.rewards)
    others = (groups.size - 1).clamp(min=1)
    if baseline is not None:
        given = read_rows("baseline", baseline, groups.rewards, "grpo_advantages")
        advantages = groups.keep(groups.rewards - given)
    elif leave_one_out_baseline:
        # r_i less the mean of the others is (r_i - mean) n / (n - 1).
        advantages = advantages * groups.size / others
    if normalize_std:
        whole = Groups(
            rewards=groups.rewards,
            numbers=torch.zeros_like(groups.numbers),
            valid=groups.valid,
        )
        if std_over == "others":
            # Squares about the mean of n rows, less row i's part: those of the others about theirs.
            squares = groups.sum(centred.square())
            left = squares - centred.square() * groups.size / others
            left = torch.where(left > 1e-12 * squares, left, 0.0)
            deviation = (left / (groups.size - 2).clamp(min=1)).sqrt()
        else:
            deviation = {"group": groups, "batch": whole}[std_over].std(groups.rewards)
        advantages = advantages / torch.where(deviation > 0, deviation + eps, 1.0)
    return advantages.float()


def opo_advantages(
    rewards: Numbers,
    lengths: Numbers,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """Rewards less the group's mean weighted by length, the baseline of least variance.

    ``A_i = r_i - sum_j l_j r_j / sum_j l_j``. Source: Hao et al. 2025, "On-Policy RL with Optimal
    Reward Baseline", eq. 7.

    Args:
        rewards: ``[B]``.
        lengths: ``[B]`` tokens of each answer.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B]`` float32.
    """
    groups = Groups.read(rewards, **grouping, caller="opo_advantages")
    tokens = read_rows("lengths", lengths, groups.rewards, "opo_advantages").double()
    return groups.centred(groups.rewards, groups.keep(tokens)).float()


def pass_at_k_advantages(
    rewards: Numbers,
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """The best row of a group gets its lead over the second best, all others 0.

    What is maximised is the best of k answers. Where several rows are best, the lead is 0. Source:
    Tang et al. 2025, arXiv 2503.19595.

    Args:
        rewards: ``[B]``.
        normalize_std: Divide by the group's standard deviation.
        eps: Is added to the standard deviation.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B]`` float32.
    """
    groups = Groups.read(rewards, **grouping, caller="pass_at_k_advantages")
    same = groups.numbers[:, None] == groups.numbers
    others = same & groups.valid & ~torch.eye(len(same), dtype=torch.bool, device=same.device)
    second = torch.where(others, groups.rewards, -torch.inf)
    lead = torch.zeros_like(groups.rewards)
    if len(same):
        lead = groups.rewards - second.amax(dim=1)
    lead = torch.where(lead.isfinite() & (groups.size > 1), groups.keep(lead).clamp(min=0), 0.0)
    if normalize_std:
        lead = lead / (groups.std(groups.rewards) + eps)
    return lead.float()


def reinforce_plus_plus_advantages(
    rewards: Numbers,
    *,
    lengths: Numbers | None = None,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """Rewards less their group's mean, then whitened over the batch.

    ``A_i = (c_i - mean(c)) / std(c)`` with ``c_i = r_i - mean_group(r)``, mean and variance over
    all tokens of the batch. With one group it is without a baseline. Source: Hu et al. 2025,
    "REINFORCE++".

    Args:
        rewards: ``[B]``.
        lengths: ``[B]`` tokens of each answer; without them all rows weigh the same.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B]`` float32.
    """
    caller = "reinforce_plus_plus_advantages"
    groups = Groups.read(rewards, **grouping, caller=caller)
    weights = groups.valid.double()
    if lengths is not None:
        weights = groups.keep(read_rows("lengths", lengths, groups.rewards, caller).double())
    return whiten(groups.centred(groups.rewards), weights).float()


def gdpo_advantages(
    rewards: Columns,
    *,
    weights: list[float] | None = None,
    std_over: Literal["group", "others"] = "group",
    leave_one_out_baseline: bool = False,
    eps: float = 1e-6,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """Several rewards, each normalised within its group before they are added up.

    ``S_i = sum_k w_k GRPO_ik`` with the advantages of :func:`grpo_advantages`, and
    ``A_i = (S_i - mean(S)) / (std(S) + eps)`` over the batch: no component drowns out the others.
    Source: 2026, "GDPO", arXiv 2601.05242. It is TRL's ``normalize_then_sum``.

    Args:
        rewards: ``[B, K]`` one for each row and component. With ``ignore_nan`` a component of NaN
            adds nothing, and rows without any reward do not count.
        weights: K factors; 1 each by default.
        std_over: See :func:`grpo_advantages`.
        leave_one_out_baseline: The same.
        eps: Is added to standard deviations. TRL has 1e-4.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B]`` float32.

    Raises:
        DataError: There are not K weights.
    """
    groups = Groups.read(rewards, **grouping, caller="gdpo_advantages", dims=2)
    components = torch.as_tensor(rewards).unbind(dim=1)
    factors = [1.0] * len(components) if weights is None else weights
    if len(factors) != len(components):
        raise DataError(
            f"gdpo_advantages: 'weights' has {len(factors)} entries, but each row has "
            f"{len(components)} rewards",
            fix="give one weight for each component",
            key="weights",
        )
    how: dict[str, Any] = {
        "std_over": std_over,
        "leave_one_out_baseline": leave_one_out_baseline,
        "eps": eps,
    }
    summed = torch.zeros_like(groups.rewards[:, 0])
    for factor, one in zip(factors, components, strict=True):
        summed = summed + factor * grpo_advantages(one, **how, **grouping)
    whole = Groups(rewards=summed, numbers=torch.zeros_like(groups.numbers), valid=groups.valid)
    return (whole.centred(summed) / (whole.std(summed) + eps)).float()


def groups_without_spread(
    rewards: Numbers,
    **grouping: Unpack[Grouping],
) -> torch.Tensor:
    """Marks rows of groups whose rewards are all equal: they teach a policy nothing.

    Dynamic sampling (Yu et al. 2025, "DAPO", section 3.2) leaves them out and samples other
    prompts: ``rows = (~groups_without_spread(rewards, group_size=n)).nonzero()[:, 0]``.

    Args:
        rewards: ``[B]``, before any shaping by length.
        **grouping: See :class:`Grouping`.

    Returns:
        ``[B]`` bool; True for all rows of a group with one reward, with one valid row or without.
    """
    groups = Groups.read(rewards, **grouping, caller="groups_without_spread")
    _, first = torch.unique(groups.rewards, return_inverse=True)
    count = int(groups.numbers.max()) + 1 if len(first) else 0
    least = torch.full((count,), len(first), device=first.device)
    most = torch.full((count,), -1, device=first.device)
    least.scatter_reduce_(0, groups.numbers[groups.valid], first[groups.valid], "amin")
    most.scatter_reduce_(0, groups.numbers[groups.valid], first[groups.valid], "amax")
    return (least >= most)[groups.numbers]


def overlong_penalty(
    lengths: Numbers, *, max_length: int, buffer: int, penalty: float = 1.0
) -> torch.Tensor:
    """What DAPO adds to the rewards of answers that get too long.

    0 up to ``max_length - buffer`` tokens, from there down to ``-penalty`` at ``max_length``, and
    no further. Source: Yu et al. 2025, "DAPO", eq. 13.

    Args:
        lengths: ``[B]`` tokens of each answer.
        max_length: Tokens an answer may have.
        buffer: Tokens over which the penalty grows, at least 1.
        penalty: The greatest penalty.

    Returns:
        ``[B]`` float32, at most 0.
    """
    excess = torch.as_tensor(lengths).double() - (max_length - buffer)
    return (-penalty * (excess / buffer).clamp(0, 1)).float()


#: Advantages by name, for :class:`AdvantageEstimator`.
ESTIMATORS: dict[str, Callable[..., torch.Tensor]] = {
    "grpo": grpo_advantages,
    "opo": opo_advantages,
    "pass_at_k": pass_at_k_advantages,
    "reinforce_plus_plus": reinforce_plus_plus_advantages,
    "gdpo": gdpo_advantages,
}


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    """A function of this module by its name, with options that were checked.

    Attributes:
        name: Of :data:`ESTIMATORS`.
        options: Keyword arguments of the function.
    """

    name: str
    options: dict[str, Any]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads a mapping such as ``{"name": "pass_at_k", "normalize_std": False}``.

        Args:
            config: ``name`` (default ``"grpo"``) and options of that function.

        Raises:
            ConfigError: The name or an option is unknown, or an option is of the wrong type.
        """
        options = dict(config)
        name = options.pop("name", "grpo")
        if name not in ESTIMATORS:
            close = nearest(str(name), ESTIMATORS)
            raise ConfigError(
                f"advantages: there is no {name!r}"
                + (f", did you mean {close!r}" if close else ""),
                fix=f"set 'name' to one of {', '.join(ESTIMATORS)}",
                key="name",
            )
        function = ESTIMATORS[name]
        hints = get_type_hints(function)
        given = ("rewards", "lengths", "baseline", "grouping", "return")
        spec = {key: hint for key, hint in hints.items() if key not in given} | {"ignore_nan": bool}
        checked = check_config(
            type(name, (), {"__annotations__": spec}), options, what=f"advantages {name!r}"
        )
        return cls(name=name, options=checked)

    def __call__(
        self,
        rewards: torch.Tensor,
        *,
        components: torch.Tensor | None = None,
        lengths: Numbers | None = None,
        **grouping: Unpack[Grouping],
    ) -> torch.Tensor:
        """The advantages of some rows.

        Args:
            rewards: ``[B]``.
            components: ``[B, K]``, for ``"gdpo"``.
            lengths: ``[B]`` tokens of each answer, for those that read them.
            **grouping: See :class:`Grouping`.

        Returns:
            ``[B]`` float32.
        """
        function = ESTIMATORS[self.name]
        known = {"lengths": lengths} if "lengths" in inspect.signature(function).parameters else {}
        given = components if self.name == "gdpo" and components is not None else rewards
        return function(given, **known, **self.options, **grouping)
