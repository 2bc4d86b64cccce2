"""How transformers models decode: in slots, or in groups of prompts of one length.

:class:`~rl_backends.torch.slots.SlotDecoder` is for models whose layers all attend causally to
everything before; :class:`GroupDecoder`, slower, for every model that transformers can generate
with.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from rl_backends.torch.decoding import DEFAULT_MAX_BATCH_SIZE, DecodingEngine, evaluating
from rl_backends.torch.slots import SlotDecoder
from rl_core.errors import ConfigError
from rl_hf.attention import uses_segments
from rl_hf.forward import base_model
from rl_hf.modeling import model_device
from rl_hf.positions import sharing_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rl_backends.torch.slot_cache import SlotCache

_log = logging.getLogger(__name__)

__all__ = ["GroupDecoder", "decoding_engine", "fits_slots", "slot_decoder"]


def decoding_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
) -> DecodingEngine:
    """Generates with a transformers model, in slots if it fits them.

    Args:
        model: A causal language model, on its device. Its attention may be switched to an
            implementation that gives the same results (see :mod:`rl_hf.attention`).
        tokenizer: Decodes the text that stop strings are looked for in.
        max_batch_size: Rows decoded together.
    """
    with evaluating(model):
        boundary = sharing_limit(model)
        in_groups = boundary is not None or not fits_slots(model)
    if boundary is not None:
        _log.warning(
            "%s changes its positions in rows of more than %d tokens: generation ends rows there. "
            "Engines that use one kind of positions for all rows, as vLLM does, give other results",
            type(model).__name__,
            boundary,
        )
    return DecodingEngine(
        model,
        partial(GroupDecoder if in_groups else slot_decoder, model),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        device=model_device(model),
        in_groups=in_groups,
        tokenizer=tokenizer,
        max_batch_size=max_batch_size,
        boundary=boundary,
    )


def slot_decoder(model: PreTrainedModel, slots: int) -> SlotDecoder:
    """The decoder of a model that :func:`fits_slots`."""
    forward = partial(_forward, model, _name_of_cache(model))
    return SlotDecoder(forward, model_device(model), slots)


def _forward(
    model: PreTrainedModel, name: str, *, past_key_values: SlotCache, **inputs: Any
) -> torch.Tensor:
    """A :class:`~rl_backends.torch.slots.SlotForward`."""
    cache = {name: _TransformersCache(past_key_values)}
    logits: torch.Tensor = model(**cache, use_cache=True, **inputs).logits
    return logits


def _name_of_cache(model: PreTrainedModel) -> str:
    """What the model calls its cache, in arguments and outputs: another name since 5.24."""
    given = inspect.signature(base_model(model).forward).parameters
    return "cache" if "cache" in given else "past_key_values"


class _TransformersCache(Cache):  # type: ignore[misc]
    """Slots, as the attention layers of transformers know a cache."""

    def __init__(self, slots: SlotCache) -> None:
        super().__init__(layers=[])
        self._slots = slots

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`SlotCache.update`."""
        return self._slots.update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given with every pass, so that this is asked for its width alone."""
        return self._slots.columns(layer_idx)


class GroupDecoder:
    """Prompts of one length at a time, with the model's own cache and no mask at all.

    Args:
        model: Any causal language model.
        slots: Rows at a time.
    """

    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        self._model = model
        self._device = model_device(model)
        self.slots = slots
        self._cache: Any = None
        self._name_of_cache = _name_of_cache(model)
        self._rows = 0

    def room(self, lengths: Sequence[int], active: int, *, last: bool) -> int:
        """All of the first prompt's length, once the rows before are done."""
        del last
        return 0 if active else sum(1 for length in lengths if length == lengths[0])

    def reserve(self, slots: int, limit: int) -> None:
        """The model's own cache grows by itself."""

    def admit(self, prompts: Sequence[Sequence[int]], first: int) -> torch.Tensor:
        """See :meth:`Decoder.admit`."""
        assert first == 0
        self._cache, self._rows = None, len(prompts)
        ids = torch.tensor(prompts, device=self._device)
        return self._forward(ids, torch.arange(ids.shape[1], device=self._device)[None])

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """See :meth:`Decoder.step`."""
        del longest
        return self._forward(tokens[:, None], lengths[:, None])

    def keep(self, source: torch.Tensor, target: torch.Tensor, rows: int, longest: int) -> None:
        """See :meth:`Decoder.keep`."""
        del longest
        order = torch.arange(self._rows, device=self._device)
        order[target] = source
        self._rows = rows
        self._cache.batch_select_indices(order[:rows])

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            position_ids=positions.expand_as(ids),
            use_cache=True,
            logits_to_keep=1,
            **{self._name_of_cache: self._cache},
        )
        self._cache = getattr(output, self._name_of_cache, None)
        if not hasattr(self._cache, "batch_select_indices"):
            raise ConfigError(
                f"{type(self._model).__name__} has no cache from which rows can be removed",
                fix="use another architecture, or another backend",
                key="model_name",
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def fits_slots(model: PreTrainedModel) -> bool:
    """Whether slots give this model the logits that it gives by itself; tried on two prompts.

    The model's attention is switched to :data:`rl_hf.attention.SEGMENTS` if they may.
    """
    text = model.config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ["full_attention"])
    windowed = not hasattr(text, "layer_types") and getattr(text, "sliding_window", None)
    if layers != {"full_attention"} or windowed or not uses_segments(model):
        reason = "its layers are not all full attention through torch's fused kernel"
    else:
        reason = _difference(model, text.vocab_size)
    if reason:
        _log.warning(
            "%s decodes only prompts of equal length together, which is slower: %s",
            type(model).__name__,
            reason,
        )
    return not reason


@torch.no_grad()
def _difference(model: PreTrainedModel, vocab_size: int) -> str:
    """What is wrong with slots for this model, or nothing."""
    ids = torch.arange(1, 13).remainder(vocab_size).tolist()
    slots = slot_decoder(model, 2)
    slots.reserve(2, 16)
    device = model_device(model)
    try:
        slots.admit([ids[:7], ids[:4]], 0)
        tokens, lengths = torch.tensor([ids[7], ids[4]]), torch.tensor([7, 4])
        packed = slots.step(tokens.to(device), lengths.to(device), 7)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return f"it does not take packed prompts ({type(error).__name__}: {error})"
    rows = [torch.tensor([ids[:8]], device=device), torch.tensor([ids[:5]], device=device)]
    alone = torch.cat([model(input_ids=row, use_cache=False).logits[:, -1] for row in rows])
    off = float((packed.float().log_softmax(-1) - alone.float().log_softmax(-1)).abs().max())
    limit = 1e-3 if packed.dtype in (torch.float32, torch.float64) else 0.25
    return "" if off < limit else f"packed prompts change its log-probs by {off:.3g}"
