"""Log-probs of chosen tokens, in float32, without a float32 copy of all logits.

Either from the logits of all tokens, or from hidden states, whose logits are then made some tokens
at a time and never kept. Both keep one normaliser per token for the backward pass, which makes the
softmax again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Head = Callable[[torch.Tensor], torch.Tensor]

__all__ = ["chunks", "hidden_logprobs", "token_logprobs"]

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


def hidden_logprobs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    temperature: float,
    parts: list[slice],
) -> torch.Tensor:
    """:func:`token_logprobs` of the logits that a head makes of hidden states, part by part.

    The backward pass calls the head again. It adds the gradients of the head's parameters to their
    ``grad`` part by part, as each is made: it is for ``backward``, not for ``torch.autograd.grad``.

    Args:
        hidden: ``[N, H]``.
        head: Makes ``[n, V]`` logits of ``[n, H]`` hidden states.
        targets: ``[N]`` int64 token ids.
        temperature: Greater than 0.
        parts: That cut ``N`` tokens, see :func:`chunks`.

    Returns:
        ``[N]`` float32, on the device of ``targets``.
    """
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()  # the head may be all that is trained
    result: torch.Tensor = _HiddenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, temperature, parts
    )
    return result


def chunks(tokens: int, vocabulary: int, elements: int) -> list[slice]:
    """Cuts tokens into parts of about one size, each of at most so many logits or of one token."""
    most = max(1, elements // vocabulary)
    parts = max(1, -(-tokens // most))
    size = max(1, -(-tokens // parts))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits."""

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
        for part in chunks(len(positions), logits.shape[-1], CHUNK_ELEMENTS):
            scaled = logits[positions[part]].float().div_(temperature)
            chosen[part], normaliser[part] = _scored(scaled, targets[part])
        ctx.save_for_backward(logits, positions, targets, normaliser)
        ctx.temperature = temperature
        return chosen.sub_(normaliser)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, positions, targets, normaliser = ctx.saved_tensors
        scale = gradients[0] / ctx.temperature
        result = torch.zeros_like(logits)
        for part in chunks(len(positions), logits.shape[-1], CHUNK_ELEMENTS):
            rows = positions[part]
            scores = logits[rows].float().div_(ctx.temperature).sub_(normaliser[part, None])
            result[rows] = _gradient_(scores, targets[part], scale[part]).to(logits.dtype)
        return result, None, None, None


class _HiddenLogprobs(torch.autograd.Function):
    """Keeps the hidden states."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: Head,
        targets: torch.Tensor,
        temperature: float,
        parts: list[slice],
    ) -> torch.Tensor:
        ctx.cuda = [hidden.device] if hidden.is_cuda else []
        ctx.random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, ctx.cuda)]
        chosen = torch.empty(targets.shape, dtype=torch.float32, device=targets.device)
        normaliser = torch.empty_like(chosen)
        for part in parts:
            logits = _scaled(head(hidden[part]), temperature)
            chosen[part], normaliser[part] = _scored(logits, targets[part].to(logits.device))
        ctx.save_for_backward(hidden, targets, normaliser)
        ctx.head, ctx.temperature, ctx.parts = head, temperature, parts
        return chosen.sub_(normaliser)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, targets, normaliser = ctx.saved_tensors
        scale = gradients[0] / ctx.temperature
        result = torch.empty_like(hidden)
        # What the head drops is dropped again, and the random numbers stay where they are.
        with torch.random.fork_rng(ctx.cuda), torch.enable_grad():
            torch.set_rng_state(ctx.random[0])
            for device, state in zip(ctx.cuda, ctx.random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            for part in ctx.parts:
                states = hidden[part].detach().requires_grad_()
                logits = ctx.head(states)
                with torch.no_grad():
                    target, norm, factor = (
                        tensor[part].to(logits.device) for tensor in (targets, normaliser, scale)
                    )
                    # Not in place: the logits are the model's, and of what hooks it.
                    scores = _scaled(logits, ctx.temperature) - norm[:, None]
                    gradient = _gradient_(scores, target, factor)
                torch.autograd.backward(logits, gradient.to(logits.dtype))
                result[part] = states.grad
        return result, None, None, None, None


def _scored(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets' logits, and the normalisers: ``[n]`` each, of ``[n, V]`` float32."""
    return logits.gather(-1, targets[:, None])[:, 0], logits.logsumexp(-1)


def _gradient_(scores: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The logits' gradient, in the place of their log-softmax ``[n, V]``."""
    scores.exp_().mul_(-scale[:, None])
    return scores.scatter_add_(-1, targets[:, None], scale[:, None])


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Float32 logits with the temperature; perhaps the same tensor."""
    logits = logits.float()
    return logits if temperature == 1 else logits / temperature
