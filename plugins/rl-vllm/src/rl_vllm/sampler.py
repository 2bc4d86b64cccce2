"""Greedy rows have log-probs of the model's own logits, also beside a repetition penalty."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from vllm.v1.sample.sampler import Sampler

__all__ = ["keep_greedy_logprobs"]


def keep_greedy_logprobs() -> None:
    """Has vLLM, in this process, give greedy rows raw log-probs where it processes them.

    vLLM's processed log-probs of a greedy row are those after the penalties, which move the argmax.
    """
    forward = Sampler.forward

    @wraps(forward)
    def with_raw(
        sampler: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        rows = sampling_metadata
        if rows.no_penalties or rows.all_random or sampler.logprobs_mode != "processed_logprobs":
            return forward(sampler, logits, rows, *args, **kwargs)
        raw = sampler.compute_logprobs(logits)  # before the penalties, which change the logits
        output = forward(sampler, logits, rows, *args, **kwargs)
        if (given := output.logprobs_tensors) is not None:
            chosen = raw.gather(1, given.logprob_token_ids.long())
            if not rows.all_greedy:
                greedy = rows.temperature[:, None] == 0
                chosen = torch.where(greedy, chosen, given.logprobs)
            output.logprobs_tensors = given._replace(logprobs=chosen)
        return output

    Sampler.forward = with_raw
