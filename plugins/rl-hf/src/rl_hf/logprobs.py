"""Log-probs of chosen tokens from logits, in float32, without a float32 copy of all logits."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["token_logprobs"]

#: Logits held in float32 at a time.
CHUNK_ELEMENTS = 1 << 22


def token_logprobs(
    logits: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Log-prob of one token at each of some positions.

    ``log softmax(logits / temperature)[target]``, differentiable in ``logits``.

    Args:
        logits: ``[M, V]`` of any float dtype.
        positions: ``[N]`` int64 rows of ``logits``; none twice.
        targets: ``[N]`` int64 token ids.
        temperature: Greater than 0.

    Returns:
        ``[N]`` float32.
    """
    result: torch.Tensor = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, positions, targets, temperature
    )
    return result


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits and one normaliser per position; the softmax is made again, by chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        chosen = logits.new_empty(len(positions), dtype=torch.float32)
        normaliser = torch.empty_like(chosen)
        for part in _chunks(logits, positions):
            scaled = logits[positions[part]].float().div_(temperature)
            normaliser[part] = scaled.logsumexp(-1)
            chosen[part] = scaled.gather(-1, targets[part, None])[:, 0]
        ctx.save_for_backward(logits, positions, targets, normaliser)
        ctx.temperature = temperature
        return chosen.sub_(normaliser)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, positions, targets, normaliser = ctx.saved_tensors
        scale = gradients[0] / ctx.temperature
        result = torch.zeros_like(logits)
        for part in _chunks(logits, positions):
            rows = positions[part]
            softmax = logits[rows].float().div_(ctx.temperature).sub_(normaliser[part, None]).exp_()
            softmax.mul_(-scale[part, None])
            softmax.scatter_add_(-1, targets[part, None], scale[part, None])
            result[rows] = softmax.to(logits.dtype)
        return result, None, None, None


def _chunks(logits: torch.Tensor, positions: torch.Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return [slice(start, start + size) for start in range(0, len(positions), size)]
