"""The contract between a policy backend and a loss function."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from rl_core.batch.data_dict import BatchedDataDict

__all__ = ["LossFunction", "LossInputType", "LossType"]


class LossType(enum.Enum):
    """What one unit of the loss is, and so which global count normalises it."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    """What the policy hands to the loss."""

    LOGPROB = "logprob"
    LOGIT = "logit"


class LossFunction(ABC):
    """A loss that a policy can sum over microbatches, ranks and packings without changing it.

    A call sees some rows of a global batch and returns their *share* of the loss: a sum over rows
    or tokens divided by the count over the whole global batch. Shares add up, so the result does
    not depend on how the rows were split. Policies call it with keywords, by these names.

    Attributes:
        loss_type: Token-level losses divide by ``global_valid_toks``, sequence-level ones by
            ``global_valid_seqs``.
        input_type: Log-probs (the default) or full next-token logits.
        group_size: Neighbouring rows that must stay in one microbatch (2 for preference pairs).
    """

    loss_type: LossType = LossType.TOKEN_LEVEL
    input_type: ClassVar[LossInputType] = LossInputType.LOGPROB
    group_size: ClassVar[int] = 1

    @abstractmethod
    def __call__(
        self,
        inputs: torch.Tensor,
        data: BatchedDataDict[Any],
        *,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Returns this microbatch's share of the loss, and metrics.

        Args:
            inputs: ``[b, s]`` float32 log-probs where entry t scores token t and entry 0 is 0, or
                ``[b, s, V]`` logits where position t predicts token t+1, as ``input_type`` chooses.
                Both already carry the policy's temperature. Log-probs of tokens that do not count
                (``token_mask`` or ``sample_mask`` 0) may be 0: policies need not compute them.
            data: The same rows, cut to the same width; at least ``input_ids``, ``input_lengths``,
                ``token_mask`` and ``sample_mask``.
            global_valid_seqs: 0-d; rows of the global batch whose ``sample_mask`` is 1.
            global_valid_toks: 0-d; tokens of the global batch whose masks are both 1, position 0
                left out.

        Returns:
            The 0-d share of the loss, which carries the gradient, and metrics as shares: values
            add up over microbatches, except keys ending in ``_min`` or ``_max``.
        """
