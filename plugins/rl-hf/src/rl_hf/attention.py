"""Attention over sequences laid end to end in one row, without a mask of row times row.

transformers hands a four-dimensional ``attention_mask`` to the attention function as it is. The
mask of a packed row is therefore simply the list of its sequences' lengths, see
:func:`rl_torch.slots.segment_mask`, and attention is causal within each of them. Any other mask
goes to torch's fused attention as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn
    from transformers import PreTrainedModel

__all__ = ["SEGMENTS", "observed", "uses_segments"]

#: Called with an attention module, queries, keys and values.
Observer = Callable[["nn.Module", torch.Tensor, torch.Tensor, torch.Tensor], None]
_observer: ContextVar[Observer | None] = ContextVar("attention_observer", default=None)

#: Name of the implementation among those of transformers.
SEGMENTS = "rl_hf_segments"

#: Kinds of layers that are causal within a segment, with or without a window.
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def uses_segments(model: PreTrainedModel) -> bool:
    """Switches a model with torch's fused attention to segments; False if it keeps its own.

    Models with another implementation, or with layers of another kind, tell packed sequences
    apart by their restarting positions.
    """
    config = model.config
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return getattr(config, "_attn_implementation", None) == SEGMENTS
    if not set(getattr(config, "layer_types", None) or ()) <= KNOWN_LAYERS:
        return False
    if not model._can_set_attn_implementation():
        return False
    model.set_attn_implementation(SEGMENTS)
    return True


@contextmanager
def observed(observer: Observer) -> Generator[None]:
    """Shows every layer's queries, keys and values to an observer, as attention gets them."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def segment_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers; ``query`` is ``[b, heads, tokens, head_dim]``."""
    if (observer := _observer.get()) is not None:
        observer(module, query, key, value)
    if attention_mask is None or attention_mask.dtype != torch.int64:
        if query.shape[2] == 1 and query.shape[1] > key.shape[1] and not module.training:
            return _one_token_each(query, key, value, attention_mask, options["scaling"]), None
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    lengths: list[int] = attention_mask.flatten().tolist()
    window = options.get("sliding_window")
    cut = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    parts = [
        sdpa_attention_forward(module, q, k, v, _window_mask(q, window), **options)[0]
        for q, k, v in zip(*cut, strict=True)
    ]
    return torch.cat(parts, dim=1), None


def _one_token_each(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Grouped-query attention of one token per row over its cache, which is not repeated.

    Heads that share a key head stand in as its queries: ``[b, heads, 1, d]`` is
    ``[b, key heads, group, d]``, and without causality among them the result is the same.
    """
    rows, heads, _, _ = query.shape
    shared = key.shape[1]
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, shared, heads // shared, -1), key, value, attn_mask=mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, -1)


def _window_mask(query: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """None where causal attention alone is right, which the fused kernel does without a mask."""
    tokens = query.shape[2]
    if window is None or tokens <= window:
        return None
    positions = torch.arange(tokens, device=query.device)
    distance = positions[:, None] - positions
    return ((distance >= 0) & (distance < window))[None, None]


AttentionInterface.register(SEGMENTS, segment_attention)
AttentionMaskInterface.register(SEGMENTS, sdpa_mask)
