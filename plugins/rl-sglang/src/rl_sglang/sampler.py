"""The next token of every row, and how likely it was, as the contract says.

SGLang's own samplers do not: they keep what is left of ``top_p`` before ``top_k``, their log-probs
know of neither, and a row's seed counts only in a mode that few kernels have. A token is drawn here
by the Gumbel trick, from a hash of the row's seed, the position and the token: neither the order of
rows nor who else is in the batch changes what a row draws. The hash is SGLang's, with its kernel.

Shapes: ``R`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.sampler import Sampler, multinomial_with_seed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GREEDY", "RowSampler", "with_seeds"]

#: The seed of rows that are not sampled; all others are positive.
GREEDY = -1


class RowSampler(Sampler):  # type: ignore[misc]
    """Samples for SGLang.

    Args:
        raw: Log-probs are of the logits as they are, also of rows that are sampled.
    """

    def __init__(self, *, raw: bool) -> None:
        super().__init__()
        self._raw = raw

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """``[R]`` tokens; their log-probs are left where SGLang looks for them."""
        del return_logprob, top_logprobs_nums, token_ids_logprobs  # they are cheap, and alone
        logits: torch.Tensor = logits_output.next_token_logits.float()
        greedy = sampling_info.sampling_seed == GREEDY
        tokens, logprobs = logits.argmax(-1), logits.log_softmax(-1)
        best = _at(logprobs, tokens)
        if sampling_info.is_all_greedy:  # of one candidate each, also where rows are sampled
            found = best if self._raw else torch.where(greedy, best, best - best)  # NaN stays
        else:
            scores = _truncated(logits / sampling_info.temperatures, sampling_info)
            scores = scores.log_softmax(-1)
            drawn = multinomial_with_seed(scores, sampling_info.sampling_seed, positions)[:, 0]
            likely = _at(logprobs if self._raw else scores, drawn)
            tokens = torch.where(greedy, tokens, drawn)
            found = torch.where(greedy, best, likely)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        logits_output.next_token_logprobs = found
        return tokens


def _truncated(scores: torch.Tensor, sampling_info: Any) -> torch.Tensor:
    """``[R, V]`` scores with -inf for what ``top_k`` drops, then ``top_p`` of the rest."""
    if not (sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling):
        return scores
    ordered, index = scores.sort(dim=-1, descending=True)
    places = torch.arange(scores.shape[-1], device=scores.device)
    dropped = places >= sampling_info.top_ks[:, None]
    if sampling_info.need_top_p_sampling:
        shares = ordered.masked_fill(dropped, -torch.inf).softmax(-1)
        # A token is kept while the more likely ones before it do not reach the mass.
        dropped |= shares.cumsum(-1) - shares >= sampling_info.top_ps[:, None]
    dropped[:, 0] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(-1, index, dropped), -torch.inf)


def _at(logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logprobs.gather(-1, tokens[:, None])[:, 0]


def with_seeds(make: Callable[..., Any]) -> Callable[..., Any]:
    """Has SGLang keep the seeds of rows, which it by itself does in its deterministic mode alone.

    Args:
        make: ``SamplingBatchInfo.from_schedule_batch``, without its class.
    """

    @wraps(make)
    def made(cls: type, batch: Any, *args: Any, **kwargs: Any) -> Any:
        info = make(cls, batch, *args, **kwargs)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        # Of requests that are not ours, such as SGLang's own probes of its health.
        known = [GREEDY if seed is None else seed for seed in seeds]
        info.sampling_seed = torch.tensor(known, dtype=torch.int64).to(info.device)
        return info

    return made
