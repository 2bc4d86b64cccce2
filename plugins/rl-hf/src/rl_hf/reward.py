"""Reward models: one score for each sequence, from a sequence classification head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from rl_hf.forward import Sequences

__all__ = ["reward_scores"]


def reward_scores(model: Any, rows: Sequences) -> torch.Tensor:
    """``[b]`` float32: the head's output at the last real token of every row.

    The row's own length says which token that is; a pad token that is also a real one (the end of
    a sequence, often) misleads nobody.

    Raises:
        CapabilityError: The classifier has no head named ``score`` over hidden states.
    """
    head = getattr(model, "score", None)
    if head is None:
        raise CapabilityError(
            f"{type(model).__name__} has no head named 'score', so it does not score rows",
            fix="use a classifier of a decoder-only architecture",
        )
    body = getattr(model, model.base_model_prefix)
    hidden = body(input_ids=rows.ids, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(rows.sizes), device=hidden.device), rows.lengths - 1]
    scores: torch.Tensor = head(last)[:, 0].float()
    return scores
