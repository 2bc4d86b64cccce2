"""How a model takes prompts in and moves all rows on by a token.

Two ways: :class:`SlotDecoder` for models whose layers all attend causally to everything before,
and :class:`GroupDecoder`, slower and for every model that transformers can generate with.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rl_core.errors import ConfigError
from rl_hf.attention import segment_mask, uses_segments
from rl_hf.kv_cache import SlotCache, Writes
from rl_hf.modeling import model_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

__all__ = ["Decoder", "GroupDecoder", "SlotDecoder", "fits_slots"]

#: Prompt tokens taken in by one forward pass, unless a single prompt is longer.
PREFILL_TOKENS = 8192


class Decoder(Protocol):
    """Rows in slots ``0..n-1``; what it returns are the logits of each row's next token."""

    slots: int

    def room(self, lengths: Sequence[int], active: int, *, last: bool) -> int:
        """How many prompts may be admitted now.

        Args:
            lengths: Of the prompts that wait, as far as there are slots; at least one.
            active: Rows in slots.
            last: No other prompts wait.
        """

    def reserve(self, slots: int, limit: int) -> None:
        """Makes room for rows; how much room they need is known now, and may grow later.

        Args:
            slots: Rows at a time.
            limit: Tokens that none of the rows that come exceeds.
        """

    def admit(self, prompts: Sequence[Sequence[int]], first: int) -> torch.Tensor:
        """Takes prompts into slots ``first...``; ``[n, V]`` logits."""

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """Moves every row on; ``[R, V]`` logits.

        Args:
            tokens: ``[R]`` int64, the newest token of each row.
            lengths: ``[R]`` int64 tokens before it.
            longest: The maximum of ``lengths``.
        """

    def keep(self, source: torch.Tensor, target: torch.Tensor, rows: int, longest: int) -> None:
        """Moves slots ``source`` to ``target``, then forgets all from ``rows`` on."""


class SlotDecoder:
    """Prompts without padding, rows of any length side by side, finished rows replaced at once.

    Args:
        model: A model that :func:`fits_slots`.
        slots: Rows at a time, at most.
    """

    def __init__(self, model: PreTrainedModel, slots: int) -> None:
        self._model = model
        self._device = model_device(model)
        self.slots = slots
        self._cache = SlotCache()
        self._rows = torch.arange(slots, device=self._device)

    def room(self, lengths: Sequence[int], active: int, *, last: bool) -> int:
        """As many as a pass takes; a few are not worth a pass, unless they are the last."""
        del active
        if not last and len(lengths) < self.slots // 8:
            return 0
        totals = accumulate(lengths)
        return max(1, sum(1 for total in totals if total <= PREFILL_TOKENS))

    def reserve(self, slots: int, limit: int) -> None:
        """See :meth:`Decoder.reserve`."""
        self._cache.expect(slots, limit)

    def admit(self, prompts: Sequence[Sequence[int]], first: int) -> torch.Tensor:
        """See :meth:`Decoder.admit`. Equal prompts are computed once."""
        unique = {tuple(prompt): 0 for prompt in prompts}
        lengths = [len(prompt) for prompt in unique]
        self._cache.reserve(max(lengths))
        starts = [0]
        for index, (prompt, length) in enumerate(zip(unique, lengths, strict=True)):
            unique[prompt] = index
            starts.append(starts[-1] + length)
        positions = torch.cat([torch.arange(length) for length in lengths])
        ids = torch.tensor([token for prompt in unique for token in prompt])
        which = [unique[tuple(prompt)] for prompt in prompts]
        # Every slot gets the tokens of its own prompt.
        counts = [lengths[prompt] for prompt in which]
        repeats = torch.tensor(counts)
        slots = torch.arange(first, first + len(which)).repeat_interleave(repeats)
        columns = torch.cat([torch.arange(count) for count in counts])
        source = torch.tensor([starts[i] for i in which]).repeat_interleave(repeats) + columns
        self._cache.writes = Writes(
            slots.to(self._device), columns.to(self._device), source.to(self._device)
        )
        logits = self._model(
            input_ids=ids.to(self._device)[None],
            position_ids=positions.to(self._device)[None],
            attention_mask=segment_mask(lengths),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(starts[1:], device=self._device) - 1,
        ).logits[0]
        result: torch.Tensor = logits[torch.tensor(which, device=logits.device)]
        return result

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """See :meth:`Decoder.step`."""
        rows = len(tokens)
        width = self._cache.reserve(longest + 1)
        self._cache.writes = Writes(self._rows[:rows], lengths, rows=rows, width=width)
        seen = torch.arange(width, device=self._device) <= lengths[:, None]
        logits: torch.Tensor = self._model(
            input_ids=tokens[:, None],
            position_ids=lengths[:, None],
            attention_mask=seen[:, None, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits

    def keep(self, source: torch.Tensor, target: torch.Tensor, rows: int, longest: int) -> None:
        """See :meth:`Decoder.keep`."""
        del rows
        self._cache.move(source, target, longest)


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
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = getattr(output, "past_key_values", None)
        if not hasattr(self._cache, "batch_select_indices"):
            raise ConfigError(
                f"{type(self._model).__name__} keeps its state in no cache that rows can leave",
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
            "%s decodes prompts of equal length together, not all: %s", type(model).__name__, reason
        )
    return not reason


@torch.no_grad()
def _difference(model: PreTrainedModel, vocab_size: int) -> str:
    """What is wrong with slots for this model, or nothing."""
    ids = torch.arange(1, 13).remainder(vocab_size).tolist()
    slots = SlotDecoder(model, 2)
    slots.reserve(2, 16)
    device = model_device(model)
    try:
        slots.admit([ids[:7], ids[:4]], 0)
        tokens, lengths = torch.tensor([ids[7], ids[4]]), torch.tensor([7, 4])
        packed = slots.step(tokens.to(device), lengths.to(device), 7)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return f"it takes no packed prompts ({type(error).__name__}: {error})"
    rows = [torch.tensor([ids[:8]], device=device), torch.tensor([ids[:5]], device=device)]
    alone = torch.cat([model(input_ids=row, use_cache=False).logits[:, -1] for row in rows])
    off = float((packed.float().log_softmax(-1) - alone.float().log_softmax(-1)).abs().max())
    limit = 1e-3 if packed.dtype in (torch.float32, torch.float64) else 0.25
    return "" if off < limit else f"packed prompts change its log-probs by {off:.3g}"
