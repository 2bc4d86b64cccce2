"""What is checked of a training call before a backend sees it: mistakes that would stay silent."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from rl_core.backends.inputs import as_batch
from rl_core.backends.losses import check_loss
from rl_core.batch.provenance import moment, off_policy
from rl_core.errors import DataError, LoopWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_core.batch import BatchedDataDict

__all__ = ["Admission"]

#: Keys of rollouts: where one stands, some tokens are prompts, which no policy has chosen.
_ROLLOUT = ("advantages", "generation_logprobs", "prev_logprobs", "generation_lengths")
_RECIPE = "batch = rl_core.training_batch(output, rewards, advantages=...), where output is what "
_RECIPE += "generation.generate(...) returned"


class Admission:
    """Admits the training calls of one policy, and remembers when they were.

    Args:
        config: The policy's; ``temperature`` and ``refit_interval`` are read.
        version: Asks for the version of the last committed refit.
    """

    def __init__(self, config: Callable[[], Mapping[str, Any]], version: Callable[[], int]) -> None:
        self._config = config
        self._version = version
        self._trained: list[int] = []  # moments of the trainings since a refit, as far as is known
        self._refitted = 0  # the version of that refit
        self._said: set[str] = set()

    def admit(self, data: object, loss_fn: Any, *, eval_mode: bool = False) -> BatchedDataDict[Any]:
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
        if "output_ids" in batch and "input_ids" not in batch:
            raise DataError(
                "train got what generate returned: nothing says which tokens count",
                fix=_RECIPE,
                key="input_ids",
            )
        found = [key for key in _ROLLOUT if batch.get(key) is not None]
        if found and batch.get("token_mask") is None:
            raise DataError(
                f"the batch has {found[0]} and no token_mask: prompts would count as actions",
                fix=f"{_RECIPE}; or set batch['token_mask'] to 1 on generated tokens, 0 on others",
                key="token_mask",
            )
        if not eval_mode:
            theirs = None if batch.provenance is None else batch.provenance.distribution
            ours = float(self._config().get("temperature", 1.0))
            if text := off_policy("these rows were sampled with", theirs, ours):
                self._say(text, "distribution")
            self._check_freshness(batch)
            self._trained.append(moment())
        return batch

    def _check_freshness(self, batch: BatchedDataDict[Any]) -> None:
        began = None if batch.provenance is None else batch.provenance.began
        interval = self._config().get("refit_interval", 1)
        trained = len(self._trained)
        if began is None or trained < interval or began < self._trained[interval - 1]:
            return
        if (version := self._version()) != self._refitted:
            self._refitted = version
            self._trained.clear()
            self._said.discard("refit")
            return
        self._say(
            f"these rows were generated after {trained} training{'s' * (trained > 1)} that no "
            f"refit followed: the engine's weights are still version {version}. Call "
            "rl_core.refit(policy, generation) after train. A loop that refits every n trainings "
            'on purpose says "refit_interval": n in the policy\'s configuration.',
            "refit",
        )

    def _say(self, text: str, about: str) -> None:
        if about not in self._said:
            self._said.add(about)
            warnings.warn(text, LoopWarning, stacklevel=5)
