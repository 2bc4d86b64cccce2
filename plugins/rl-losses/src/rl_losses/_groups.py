"""Rewards and the groups they are in, as all advantages read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from rl_core.errors import ConfigError, DataError

__all__ = ["Columns", "Grouping", "Groups", "Numbers", "read_rows"]

Numbers = torch.Tensor | Sequence[float]
Columns = torch.Tensor | Sequence[Sequence[float]]


class Grouping(TypedDict, total=False):
    """Which rows are a group, and which count.

    Attributes:
        group_size: Rows of a group. Give this or ``prompt_ids``.
        prompt_ids: ``[B]`` or ``[B, S]``.
        sample_mask: ``[B]`` rows that count.
        ignore_nan: Rows with a reward of NaN do not count; otherwise they are refused.
    """

    group_size: int | None
    prompt_ids: Numbers | None
    sample_mask: Numbers | None
    ignore_nan: bool


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Rewards of rows that answer the same prompts.

    Attributes:
        rewards: ``[B]`` or ``[B, K]`` float64; 0 where a row does not count.
        numbers: ``[B]`` int64 from 0, equal within a group.
        valid: ``[B]`` bool; rows that count.
    """

    rewards: torch.Tensor
    numbers: torch.Tensor
    valid: torch.Tensor

    @classmethod
    def read(
        cls,
        rewards: object,
        *,
        caller: str,
        dims: int = 1,
        group_size: int | None = None,
        prompt_ids: object = None,
        sample_mask: object = None,
        ignore_nan: bool = False,
    ) -> Groups:
        """Reads what a function of advantages was given.

        Args:
            rewards: ``[B]``, or ``[B, K]`` with ``dims`` 2.
            caller: That function, for messages.
            dims: Of the rewards.
            group_size: See :class:`Grouping`, here and below.
            prompt_ids: ``[B]`` or ``[B, S]``, or None.
            sample_mask: ``[B]``, or None.
            ignore_nan: The same.

        Raises:
            ConfigError: Both or none of ``group_size`` and ``prompt_ids`` are given.
            DataError: Shapes disagree, groups do not fill the batch, or a reward is not finite.
        """
        values = _tensor("rewards", rewards, caller)
        if values.dim() != dims:
            raise DataError(
                f"{caller}: 'rewards' has shape {list(values.shape)}, "
                f"expected {'[B]' if dims == 1 else '[B, K]'}",
                fix="give one reward for each row" + (" and component" if dims == 2 else ""),
                key="rewards",
            )
        prompts = None if prompt_ids is None else _tensor("prompt_ids", prompt_ids, caller)
        numbers = _group_numbers(len(values), group_size, prompts, caller).to(values.device)
        valid = torch.ones_like(numbers, dtype=torch.bool)
        if sample_mask is not None:
            valid = read_rows("sample_mask", sample_mask, values, caller) != 0
        columns = values.double() if dims == 2 else values.double()[:, None]
        if ignore_nan:
            valid = valid & ~columns.isnan().all(dim=1)
            columns = columns.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        wrong = valid & ~columns.isfinite().all(dim=1)
        if wrong.any():
            row = int(wrong.nonzero()[0, 0])
            raise DataError(
                f"{caller}: the reward of row {row} is {values[row].tolist()}",
                fix="mask the row with 'sample_mask', correct the reward function, or skip rows of "
                "NaN with ignore_nan=True",
                key="rewards",
                row=row,
            )
        kept = torch.where(valid[:, None], columns, 0.0)
        return cls(rewards=kept if dims == 2 else kept[:, 0], numbers=numbers, valid=valid)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """``[B, ...]`` the sum of ``[B, ...]`` values over each row's group."""
        return torch.zeros_like(values).index_add(0, self.numbers, values)[self.numbers]

    @property
    def size(self) -> torch.Tensor:
        """``[B]`` rows of each row's group that count."""
        return self.sum(self.valid.double())

    def centred(self, rewards: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """``[B]`` rewards less their group's mean; 0 where a row does not count."""
        weights = self.valid.double() if weights is None else weights
        total = self.sum(weights)
        mean = self.sum(rewards * weights) / torch.where(total > 0, total, 1.0)
        return self.keep(rewards - mean)

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """``[B]`` values; 0 where a row does not count."""
        return torch.where(self.valid, values, 0.0)

    def std(self, rewards: torch.Tensor) -> torch.Tensor:
        """``[B]`` the sample's standard deviation of each row's group; 0 for a group of one."""
        return (self.sum(self.centred(rewards).square()) / (self.size - 1).clamp(min=1)).sqrt()


def read_rows(key: str, given: object, rewards: torch.Tensor, caller: str) -> torch.Tensor:
    """``[B]`` numbers, one for each reward.

    Raises:
        DataError: They are not numbers, or not as many.
    """
    values = _tensor(key, given, caller)
    if values.shape != rewards.shape[:1]:
        raise DataError(
            f"{caller}: '{key}' has shape {list(values.shape)}, but 'rewards' has shape "
            f"{list(rewards.shape)}",
            fix="give one entry for each row of rewards",
            key=key,
        )
    return values.to(rewards.device)


def _tensor(key: str, given: object, caller: str) -> torch.Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{caller}: '{key}' cannot be read as numbers: {error}",
            fix="give a number for each row, in a list, a tensor or an array",
            key=key,
        ) from None


def _group_numbers(
    rows: int, group_size: int | None, prompt_ids: torch.Tensor | None, caller: str
) -> torch.Tensor:
    """``[B]`` numbers from 0, equal within a group."""
    if (group_size is None) == (prompt_ids is None):
        raise ConfigError(
            f"{caller} needs one of 'group_size' and 'prompt_ids'",
            fix="give 'group_size' if the rows of a group are neighbours and groups have one size, "
            "else 'prompt_ids'",
            key="group_size",
        )
    if prompt_ids is not None:
        if prompt_ids.dim() == 0 or prompt_ids.shape[0] != rows:
            raise DataError(
                f"{caller}: 'prompt_ids' has shape {list(prompt_ids.shape)}, but the number of "
                f"rewards is {rows}",
                fix="give one prompt for each reward",
                key="prompt_ids",
            )
        if rows == 0:
            return torch.zeros(0, dtype=torch.int64)
        numbers: torch.Tensor = torch.unique(prompt_ids, dim=0, return_inverse=True)[1]
        return numbers
    assert group_size is not None
    if group_size < 1 or rows % group_size:
        raise DataError(
            f"{caller}: the number of rewards, {rows}, is not a multiple of the group size "
            f"{group_size}",
            fix="give complete groups, or 'prompt_ids' if groups differ in size",
            key="rewards",
        )
    return torch.arange(rows) // group_size
