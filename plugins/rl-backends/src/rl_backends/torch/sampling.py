"""Next tokens for a whole batch at once, each row from its own random stream.

Shapes: ``R`` rows, ``V`` vocabulary. The uniform number behind a token is a function of the row's
seed and of the token's index in the row alone, so neither the order of the rows nor who else is
in the batch changes what a row samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rl_backends import SamplingParams

__all__ = ["Sampler", "uniforms"]

#: Candidates looked at first for the nucleus; the whole vocabulary is sorted only if they hold
#: less than its mass in some row.
NUCLEUS_CANDIDATES = 512

#: Temperatures below this are this: the reciprocal must be a float32. It is an argmax by far.
COLDEST = 1e-30

# Constants of the splitmix64 generator (Steele, Lea and Flood 2014), as signed 64-bit numbers.
_GAMMA = -0x61C8864680B583EB
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


class Sampler:
    """Draws the next token of every row, with its log-probability.

    Args:
        params: The same for all rows.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def __call__(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        counts: torch.Tensor,
        seen: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token for each row.

        Args:
            logits: ``[R, V]`` of any float dtype.
            seeds: ``[R]`` int64.
            counts: ``[R]`` int64 tokens that the row has generated so far.
            seen: ``[R, V]`` bool, tokens of the prompt and the completion, for the repetition
                penalty.

        Returns:
            ``[R]`` int64 tokens and ``[R]`` float32 log-probs.
        """
        params = self.params
        raw = logits.float()
        scores = raw if seen is None else penalised(raw, seen, params.repetition_penalty)
        if params.greedy:
            tokens = scores.argmax(-1)
            return tokens, _log_softmax_at(raw, tokens)
        if params.temperature != 1.0:
            # Below the row's largest: what overflows is -inf.
            below = scores - scores.amax(-1, keepdim=True)
            scores = below / max(params.temperature, COLDEST)
        points = uniforms(seeds, counts)
        if params.top_k or params.top_p < 1.0:
            tokens, logprobs = self._truncated(scores, points)
        else:
            tokens = _draw(scores.softmax(-1), points)
            logprobs = _log_softmax_at(scores, tokens)
        if params.logprobs_mode == "raw":
            logprobs = _log_softmax_at(raw, tokens)
        return tokens, logprobs

    def _truncated(
        self, scores: torch.Tensor, points: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws among the most likely tokens only, kept in descending order."""
        top, index = self._candidates(scores)
        if self.params.top_p < 1.0:
            # A token is kept while the more likely ones before it do not reach the mass.
            probabilities = top.softmax(-1) if self.params.top_k else _share(top, scores)
            before = probabilities.cumsum(-1) - probabilities
            dropped = before >= self.params.top_p
            dropped[:, 0] = False
            top = top.masked_fill(dropped, -torch.inf)
            last = (~dropped).sum(-1) - 1
        else:
            last = torch.full_like(points, top.shape[-1] - 1, dtype=torch.int64)
        place = torch.minimum(_draw(top.softmax(-1), points), last)[:, None]
        return index.gather(-1, place)[:, 0], _log_softmax_at(top, place[:, 0])

    def _candidates(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores that survive ``top_k`` (at least those of the nucleus), descending."""
        vocabulary = scores.shape[-1]
        if self.params.top_k:
            top = scores.topk(min(self.params.top_k, vocabulary))
            return top.values, top.indices
        if vocabulary > NUCLEUS_CANDIDATES:
            top = scores.topk(NUCLEUS_CANDIDATES)
            if bool((_share(top.values, scores).sum(-1) >= self.params.top_p).all()):
                return top.values, top.indices
        ordered = scores.sort(dim=-1, descending=True)
        return ordered.values, ordered.indices


def penalised(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Logits of tokens seen before, divided by the penalty, or multiplied if negative."""
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, lowered, logits)


def uniforms(seeds: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``[R]`` float32 in [0, 1): a function of seed and count, by splitmix64.

    Args:
        seeds: ``[R]`` int64.
        counts: ``[R]`` int64.
    """
    # The seed is mixed first: neighbouring seeds are then streams far apart.
    state = _mix(seeds) + (counts + 1) * _GAMMA
    return _shifted(_mix(state), 40).float() * 2.0**-24


def _mix(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shifted(state, 30)) * _MIX[0]
    state = (state ^ _shifted(state, 27)) * _MIX[1]
    return state ^ _shifted(state, 31)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts right and fills with zeros; torch's own shift copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _share(top: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Probabilities of the top scores under the whole row's softmax."""
    return (top - scores.logsumexp(-1, keepdim=True)).exp()


def _draw(probabilities: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Inverts each row's cumulative distribution: the first entry that passes the point."""
    cumulative = probabilities.cumsum(-1)
    index = torch.searchsorted(cumulative, points[:, None] * cumulative[:, -1:], right=True)
    return index[:, 0].clamp(max=probabilities.shape[-1] - 1)


def _log_softmax_at(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    chosen = scores.gather(-1, tokens[:, None])[:, 0]
    return (chosen - scores.logsumexp(-1)).clamp(max=0.0)
