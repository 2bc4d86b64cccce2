"""NeMo RL's losses in ``policy.train``."""

from __future__ import annotations

import enum
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import ConfigError
from rl_core.interfaces import LossFunction, LossInputType, LossType

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.batch import BatchedDataDict

__all__ = ["rolled_reference", "wrap_loss"]


def wrap_loss(loss_fn: Any, *, group_size: int = 1) -> LossFunction:
    """A loss of NeMo RL's as one of rl-core.

    Losses on log-probs and on logits do not need it: ``policy.train`` calls them by their names.
    It is for the two that say less than a policy must know: distillation, whose top-k log-probs
    are made here of the policy's logits and the teacher's top-k logits; and losses on pairs,
    which must know that two neighbouring rows belong together.

    Args:
        loss_fn: The loss.
        group_size: Neighbouring rows that must stay in one microbatch: 2 for preference pairs.

    Raises:
        ConfigError: It wants what no policy here computes.
    """
    given = getattr(loss_fn, "input_type", "logprob")
    wanted = given.value if isinstance(given, enum.Enum) else given
    wrappers: dict[Any, Callable[[Any, int], LossFunction]] = {
        "logprob": _Logprobs,
        "logit": _Logits,
        "distillation": _Distillation,
    }
    if wanted not in wrappers:
        raise ConfigError(
            f"{type(loss_fn).__name__} has input_type {wanted!r}, which no policy computes",
            fix=f"use a loss with an input_type of {', '.join(sorted(wrappers))}",
            key="input_type",
        )
    return wrappers[wanted](loss_fn, group_size)


def rolled_reference(loss_fn: LossFunction) -> LossFunction:
    """A loss of rl-core's in ``dpo_train``, which hands over the reference's log-probs rolled.

    Entry t of ``reference_policy_logprobs`` scores token t+1 there, and token t here; on the wrong
    ones the loss would be wrong, or refuse them. The metrics have the names that the loop prints.
    """
    return _RolledReference(loss_fn)


class _RolledReference(LossFunction):
    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn, self.loss_type = loss_fn, loss_fn.loss_type
        self.input_type = loss_fn.input_type  # type: ignore[misc] # it is this loss's alone
        self.group_size = loss_fn.group_size  # type: ignore[misc]

    def __call__(
        self, inputs: torch.Tensor, data: BatchedDataDict[Any], **counts: Any
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`LossFunction`."""
        key = "reference_policy_logprobs"
        # What was cut off on the right with the padding is the 0 that belongs in front.
        ours = torch.cat([torch.zeros_like(data[key][:, :1]), data[key][:, :-1]], 1)
        share, metrics = self.loss_fn(inputs, type(data)({**data, key: ours}), **counts)
        printed = ("rewards_chosen", "rewards_rejected")
        counted = {"num_valid_samples": data["sample_mask"].sum().item() / 2}  # pairs
        return share, metrics | {f"{name}_mean": metrics[name] for name in printed} | counted


class _Wrapped(LossFunction):
    def __init__(self, loss_fn: Any, group_size: int) -> None:
        self.loss_fn = loss_fn
        kind = getattr(loss_fn, "loss_type", LossType.TOKEN_LEVEL)
        self.loss_type = LossType(kind.value if isinstance(kind, enum.Enum) else kind)
        self.group_size = group_size  # type: ignore[misc] # it is this loss's alone

    def __call__(
        self,
        inputs: torch.Tensor,
        data: BatchedDataDict[Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """See :class:`LossFunction`."""
        share, metrics = self.loss_fn(
            data=data,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            **self.arguments(inputs, data),
        )
        return share, metrics

    @abstractmethod
    def arguments(self, inputs: torch.Tensor, data: BatchedDataDict[Any]) -> dict[str, Any]:
        """What the loss gets of what the policy computed."""


class _Logprobs(_Wrapped):
    def arguments(self, inputs: torch.Tensor, data: BatchedDataDict[Any]) -> dict[str, Any]:
        return {"next_token_logprobs": inputs[:, 1:]}


class _Logits(_Wrapped):
    input_type = LossInputType.LOGIT

    def arguments(self, inputs: torch.Tensor, data: BatchedDataDict[Any]) -> dict[str, Any]:
        return {"logits": inputs}


class _Distillation(_Wrapped):
    """Log-probs of the teacher's top k tokens, by the student and by the teacher.

    Where ``zero_outside_topk``, the student's are of the whole vocabulary and its negated entropy
    comes with them; otherwise both are of the k tokens alone.
    """

    input_type = LossInputType.LOGIT

    def arguments(self, inputs: torch.Tensor, data: BatchedDataDict[Any]) -> dict[str, Any]:
        # A teacher of theirs gives one position more than is predicted.
        places = inputs.shape[1] - 1
        logits = inputs[:, :-1].float()
        indices = data["teacher_topk_indices"][:, :places]
        teacher = data["teacher_topk_logits"][:, :places].float().log_softmax(-1)
        entropy = None
        if self.loss_fn.zero_outside_topk:
            every = logits.log_softmax(-1)
            student = every.gather(-1, indices)
            if self.loss_fn.kl_type != "forward":
                entropy = (every.exp() * every).sum(-1)
        else:
            student = logits.gather(-1, indices).log_softmax(-1)
        return {
            "student_topk_logprobs": student,
            "teacher_topk_logprobs": teacher,
            "H_all": entropy,
        }
