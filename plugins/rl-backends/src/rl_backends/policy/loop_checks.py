"""What is checked of a training call before a backend sees it: mistakes that would stay silent."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from rl_backends.inputs import as_batch
from rl_backends.policy.losses import check_loss
from rl_core.batch import BatchedDataDict
from rl_core.batch.provenance import off_policy
from rl_core.errors import DataError, LoopWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["LoopChecks", "reward_spread"]

#: Keys of rollouts: where one stands, some tokens are prompts, which no policy has chosen.
_ROLLOUT = ("advantages", "generation_logprobs", "prev_logprobs", "generation_lengths")
_RECIPE = "batch = rl_losses.training_batch(output, rewards, advantages=...), where output is what "
_RECIPE += "generation.generate(...) returned"
_PAIRS = "order the rows {order}: batch = rl_losses.training_batch(output[rows]), where rows lists "
_PAIRS += "their indices, and output is what generation.generate(...) returned"
#: Mean of ``exp(|difference|)`` of log-probs, as clause A1 has it.
_FURTHEST = 1.05


class LoopChecks:
    """Admits the training calls of one policy.

    Args:
        config: The policy's; ``temperature`` is read.
        version: Returns the version of the last committed refit.
        origin: Returns this trainer's origin; 0 if it is not known.
    """

    def __init__(
        self,
        config: Callable[[], Mapping[str, Any]],
        version: Callable[[], int],
        origin: Callable[[], int],
    ) -> None:
        self._config = config
        self._version = version
        self._origin = origin
        self._trained_at: int | None = None  # the version at the last of all trainings
        self._warned: set[str] = set()

    def check_training_call(
        self, data: object, loss_fn: Any, *, eval_mode: bool = False
    ) -> BatchedDataDict[Any]:
        """Checks a call of ``train``.

        Args:
            data: See :class:`~rl_core.interfaces.TrainingDatumSpec`; any mapping will do.
            loss_fn: The loss.
            eval_mode: Nothing will be learned.

        Returns:
            The batch.

        Raises:
            ConfigError: The loss is none.
            DataError: The batch is none, is generation output as it came, or lacks the mask
                without which prompts count as actions.
        """
        check_loss(loss_fn)
        batch = as_batch(data, needed_by="train")
        group, order = getattr(loss_fn, "group_size", 1), getattr(loss_fn, "row_order", "")
        reads = f"; {type(loss_fn).__name__} reads rows as {order}" if order else ""
        if "output_ids" in batch and "input_ids" not in batch:
            raise DataError(
                f"train got the output of generate, which has no token_mask{reads}",
                fix=_PAIRS.format(order=order) if order else _RECIPE,
                key="input_ids",
            )
        if order and batch.size % group:
            raise DataError(
                f"the number of rows, {batch.size}, is not a multiple of the group size {group}"
                f"{reads}",
                fix=f"give rows in the order {order}, {group} of each prompt next to each other",
            )
        found = [key for key in _ROLLOUT if batch.get(key) is not None]
        if found and batch.get("token_mask") is None:
            raise DataError(
                f"the batch has {found[0]} but no token_mask: the tokens of prompts would be "
                "trained, too",
                fix=f"{_RECIPE}; or set batch['token_mask'] to 1 on generated tokens, 0 on others",
                key="token_mask",
            )
        if not eval_mode:
            if reward_spread(batch).get("frac_reward_zero_std") == 1:
                self._warn_once(
                    "for every prompt, the rewards of all completions are equal: the advantages "
                    "are 0, and this step learns nothing. Print some completions with their "
                    "rewards: prompts that are always or never solved teach nothing.",
                    "rewards",
                )
            theirs = None if batch.provenance is None else batch.provenance.distribution
            if text := off_policy("these rows were sampled with", theirs, self._temperature()):
                self._warn_once(text, "distribution")
            if len(rows := self._others(batch).nonzero().flatten()):
                origin = int(batch["weights_origin"][rows[0]])
                self._warn_once(
                    f"{len(rows)} of {batch.size} rows (the first is row {int(rows[0])}) were "
                    f"generated with another trainer's weights (origin {origin}; this policy's is "
                    f"{self._origin()}): their weights_version cannot be compared with this "
                    "policy's. Call rl_core.refit(policy, generation) before generating, and leave "
                    'out such rows: batch.select_indices(batch["weights_origin"] == '
                    "policy.weights_origin).",
                    "origin",
                )
            self._trained_at = self._version()
        return batch

    def compare(self, data: object, ours: torch.Tensor) -> None:
        """Warns once if an engine's log-probs are not those of the policy with the same weights.

        Args:
            data: What was scored: output of a generation, or a batch that was made of it.
            ours: ``[B, S]`` what the policy made of it.
        """
        if (
            not isinstance(data, BatchedDataDict)
            or data.provenance is None
            or "pair" in self._warned
        ):
            return
        theirs = data.get("generation_logprobs", data.get("logprobs"))
        drawn = data.provenance.distribution or "temperature 1"  # of greedy and raw ones
        unlike = drawn != f"temperature {self._temperature():g}"
        if unlike or theirs is None or theirs.shape != ours.shape or self._others(data).any():
            return
        off = float((theirs - ours)[theirs != 0].abs().exp().mean())
        versions = torch.as_tensor(data.get("weights_version", 0))
        trained_since = bool((versions <= (self._trained_at or 0)).any())
        if off > _FURTHEST and not trained_since and (versions <= self._version()).all():
            self._warn_once(
                f"with the same weights, the engine's probabilities of these rows (up to "
                f"{theirs.shape[1]} tokens) differ from the policy's by a factor of {off:.3g} on "
                "average: the two compute different models. Compare dtypes, attention (soft caps, "
                "sinks, windows), positions (rope, max_model_len), and engine arguments that "
                "change sampling. `rl check logprobs` measures the difference.",
                "pair",
            )

    def _others(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """``[B]`` bool: which rows are of another trainer's weights, as far as the batch shows."""
        origins = batch.get("weights_origin")
        if not isinstance(origins, torch.Tensor) or not origins.any() or not self._origin():
            return torch.zeros(0, dtype=torch.bool)
        return (origins != 0) & (origins != self._origin())

    def _temperature(self) -> float:
        return float(self._config().get("temperature", 1.0))

    def _warn_once(self, text: str, about: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, LoopWarning, stacklevel=4)


def reward_spread(batch: Mapping[str, Any]) -> dict[str, float]:
    """``frac_reward_zero_std``: of the prompts with several rows, how many have equal rewards.

    Args:
        batch: What ``train`` was given. Nothing is found without ``rewards`` and ``token_mask``.
    """
    rewards, mask, ids = batch.get("rewards"), batch.get("token_mask"), batch.get("input_ids")
    if not (
        isinstance(rewards, torch.Tensor)
        and isinstance(mask, torch.Tensor)
        and isinstance(ids, torch.Tensor)
        and rewards.shape == mask.shape[:1] == ids.shape[:1]
        and mask.dim() == ids.dim() == 2
        and mask.numel()
    ):
        return {}
    starts = (mask != 0).int().argmax(1).tolist()
    groups: dict[tuple[int, ...], list[float]] = {}
    for row, (start, reward) in enumerate(zip(starts, rewards.tolist(), strict=True)):
        groups.setdefault(tuple(ids[row, :start].tolist()), []).append(reward)
    several = [each for each in groups.values() if len(each) > 1]
    equal = sum(len(set(each)) == 1 for each in several)
    return {"frac_reward_zero_std": equal / len(several)} if several else {}
