"""Whether another attention gives what a model's own does, with all options of its configuration.

An option that an attention function does not know goes lost without a word: torch's fused attention
has no soft cap, no sinks. So the two are compared by what they make of one input, in every layer,
not by the names of options. Queries are large enough for a cap to bite; they and all else are
random, so that it does not depend on the weights. Masks are compared by their rule, over the whole
context: a window shows, however long it is.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from transformers import PreTrainedModel

    #: An attention function of transformers.
    Attention = Callable[..., tuple[torch.Tensor, Any]]

__all__ = ["Comparison", "compare_attention"]

#: Tokens that the model is run on.
TOKENS = 24
#: Sizes of the scores before the softmax: sinks show beside small ones, caps beside large ones.
SCORES = (1.0, 1000.0)
#: Of outputs, which are averages of values of about 1; rounding makes less than 1e-4.
LARGEST_DIFFERENCE = 1e-3
#: Name of the implementation among those of transformers.
COMPARED = "rl_hf_compared"

_going_on: ContextVar[Comparison] = ContextVar("attention_comparison")


@dataclass(slots=True)
class Comparison:
    """What was found in a pass of a model.

    Attributes:
        other: The attention that is compared with the model's own.
        alone: What it takes for the mask of a sequence that has a row to itself.
        context: Tokens of the longest row.
        layers: Attention layers that were compared.
        off: The largest difference that was found.
        unlike: A layer's mask is not causal with the window that the layer is given, or unknown.
    """

    other: Attention
    alone: torch.Tensor
    context: int
    layers: int = 0
    off: float = 0.0
    unlike: bool = False

    @property
    def differs(self) -> bool:
        """Whether the other attention leaves something out."""
        return self.off >= LARGEST_DIFFERENCE

    @property
    def fits(self) -> bool:
        """Whether the other attention may be used, with masks of its own."""
        return self.layers > 0 and not self.differs and not self.unlike


@torch.no_grad()
def compare_attention(model: PreTrainedModel, other: Attention, alone: torch.Tensor) -> Comparison:
    """Runs a model once, on a few tokens, comparing what every layer attends to.

    Args:
        model: In evaluation mode. Its attention is the implementation that it was afterwards.
        other: Of transformers' signature; scores of single tokens over a cache are compared, too.
        alone: What ``other`` takes for a mask of a sequence of :data:`TOKENS` tokens.

    Returns:
        Of no layers if the model cannot be run so.
    """
    text = model.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None) or TOKENS
    found = Comparison(other, alone, max(context, TOKENS))
    if not model._can_set_attn_implementation():
        return found
    embeddings = model.get_input_embeddings().weight
    ids = torch.arange(1, 1 + TOKENS, device=embeddings.device).remainder(len(embeddings))
    before = model.config._attn_implementation
    token = _going_on.set(found)
    try:
        model.set_attn_implementation(COMPARED)
        model(input_ids=ids[None], use_cache=False)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        found.layers = 0
    finally:
        model.set_attn_implementation(before)
        _going_on.reset(token)
    return found


def _compared(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """The model's own attention function, after both were tried on other inputs."""
    found = _going_on.get()
    own: Attention = sys.modules[type(module).__module__].eager_attention_forward
    found.unlike |= not _is_causal(attention_mask, options.get("sliding_window"), found.context)
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(t.shape, generator=random, dtype=torch.float64).to(t.device)
        for t in (query, key, value)
    )
    q /= (options.get("scaling") or q.shape[-1] ** -0.5) * q.shape[-1] ** 0.5
    mask = None if attention_mask is None else attention_mask.double()
    seen = None if mask is None else mask == 0
    last = None if seen is None else seen[:, :, -1:]
    for size in SCORES:
        expected = own(module, size * q, k, v, mask, **options)[0]
        all_, one = size * q, size * q[:, :, -1:]
        masked = _off(found.other(module, all_, k, v, seen, **options)[0], expected)
        single = _off(found.other(module, one, k, v, last, **options)[0], expected[:, -1:])
        alone = _off(found.other(module, all_, k, v, found.alone, **options)[0], expected)
        found.off = max(found.off, masked, single)
        found.unlike |= alone >= LARGEST_DIFFERENCE > masked
    found.layers += 1
    return own(module, query, key, value, attention_mask, **options)


def _off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().nan_to_num(torch.inf).max())


def _is_causal(mask: torch.Tensor | None, window: int | None, context: int) -> bool:
    """Whether the last token of the longest row sees the tokens of its window, or all of them."""
    rule = getattr(mask, "rule", None)
    if mask is None or rule is None:
        return False
    keys = torch.arange(context, device=mask.device)
    first = keys.new_zeros(())
    seen = torch.as_tensor(rule(first, first, keys[-1], keys)).expand(context)
    return torch.equal(seen, keys >= context - window if window else torch.ones_like(seen))


def _mask(*, mask_function: Any, **options: Any) -> torch.Tensor | None:
    """A mask that has the rule by which it was made."""
    mask: torch.Tensor | None = eager_mask(mask_function=mask_function, **options)
    if mask is not None:
        mask.rule = mask_function  # type: ignore[attr-defined]
    return mask


AttentionInterface.register(COMPARED, _compared)
AttentionMaskInterface.register(COMPARED, _mask)
