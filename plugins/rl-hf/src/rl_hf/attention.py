"""Attention over sequences laid end to end in one row, without a mask of row times row.

transformers hands a four-dimensional ``attention_mask`` to the attention function as it is. The
mask of a packed row is therefore simply the list of its sequences' lengths, see
:func:`rl_backends.torch.slots.segment_mask`, and attention is causal within each of them. Any
other mask goes to torch's fused attention as usual.

That is for models which it gives what their own attention gives: see :mod:`rl_hf.own_attention`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_backends.torch.slots import segment_mask
from rl_core.errors import ConfigError
from rl_hf.own_attention import TOKENS, compare_attention

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn
    from transformers import PreTrainedModel

    from rl_hf.own_attention import Comparison

_log = logging.getLogger(__name__)

__all__ = ["SEGMENTS", "observed", "settle_attention", "unlike_masks", "uses_segments"]

#: Called with an attention module, queries, keys and values.
Observer = Callable[["nn.Module", torch.Tensor, torch.Tensor, torch.Tensor], None]
_observer: ContextVar[Observer | None] = ContextVar("attention_observer", default=None)

#: Name of the implementation among those of transformers.
SEGMENTS = "rl_hf_segments"

#: Kinds of layers that are causal within a segment, with or without a window.
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def settle_attention(model: PreTrainedModel, *, chosen: bool) -> None:
    """Makes a loaded model attend as its authors' code does, by the fastest way that does.

    torch's fused attention, which transformers takes by default, leaves out what its kernels lack,
    such as soft caps, without a word. A model with anything of the kind gets its own attention.

    Args:
        model: In evaluation mode, on its device.
        chosen: Its attention was asked for by name.

    Raises:
        ConfigError: Torch's fused attention was asked for, and gives other results.
    """
    if model.config._attn_implementation != "sdpa":
        return
    found = _compare(model)
    if not found.differs:
        _switch(model, found)
        return
    what = (
        f"torch's fused attention (sdpa) does not compute the attention of {type(model).__name__} "
        f"(soft caps or sinks, for example): outputs differ by {found.off:.2g}"
    )
    if chosen:
        raise ConfigError(
            what, fix="leave attn_implementation out, or set 'eager'", key="attn_implementation"
        )
    model.set_attn_implementation("eager")
    _log.warning("%s; the model's eager attention is used: slower, and with more memory", what)


def uses_segments(model: PreTrainedModel) -> bool:
    """Switches a model with torch's fused attention to segments; False if it keeps what it has.

    It keeps it where segments would change its results, which is tried: what every layer attends
    to, and under which mask. Models with another implementation, or with layers of another kind,
    tell packed sequences apart by their restarting positions.
    """
    now = getattr(model.config, "_attn_implementation", None)
    return now == SEGMENTS or (now == "sdpa" and _switch(model, _compare(model)))


def unlike_masks(model: PreTrainedModel) -> bool:
    """Whether a layer's mask is known to be other than causal, with a window or without."""
    return _compare(model).unlike


def _compare(model: PreTrainedModel) -> Comparison:
    return compare_attention(model, segment_attention, segment_mask([TOKENS]))


def _switch(model: PreTrainedModel, found: Comparison) -> bool:
    layers = set(getattr(model.config, "layer_types", None) or ())
    if not found.fits or not layers <= KNOWN_LAYERS:
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
    window = options.get("sliding_window")
    parts, start = [], 0
    # Neighbours of one length are a batch: one call for all of them.
    for length, run in groupby(attention_mask.flatten().tolist()):
        rows = len(list(run))
        end = start + rows * length
        q, k, v = (
            tensor[0, :, start:end].reshape(tensor.shape[1], rows, length, -1).transpose(0, 1)
            for tensor in (query, key, value)
        )
        mask = None  # the fused kernel does causal attention alone without one
        if window is not None and length > window:
            positions = torch.arange(length, device=q.device)
            distance = positions[:, None] - positions
            mask = ((distance >= 0) & (distance < window))[None, None]
        part, _ = sdpa_attention_forward(module, q, k, v, mask, **options)
        parts.append(part.flatten(0, 1))
        start = end
    return torch.cat(parts)[None], None


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


AttentionInterface.register(SEGMENTS, segment_attention)
AttentionMaskInterface.register(SEGMENTS, sdpa_mask)
