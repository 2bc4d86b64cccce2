"""How a model takes prompts in and moves all rows on by a token, in slots.

For models in which all layers attend causally to everything before. Prompts are laid end to end in
one row, so that nothing is computed on padding; then every row has a slot, whatever its length.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch

from rl_backends.torch.slot_cache import SlotCache, Writes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Decoder", "SlotDecoder", "SlotForward", "segment_mask"]

#: Prompt tokens taken in by one forward pass, unless a single prompt is longer.
PREFILL_TOKENS = 8192


def segment_mask(lengths: Sequence[int]) -> torch.Tensor:
    """``[1, 1, 1, n]`` int64 on the CPU, for a row made of sequences of these lengths."""
    return torch.tensor(lengths, dtype=torch.int64).view(1, 1, 1, -1)


class SlotForward(Protocol):
    """A model's forward pass, as :class:`SlotDecoder` wants it.

    Every attention layer hands its keys and values, rotated where they are, to
    :meth:`SlotCache.update <rl_backends.torch.slot_cache.SlotCache.update>` and attends to what
    that returns, under the mask.
    """

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_key_values: SlotCache,
        logits_to_keep: torch.Tensor | int,
    ) -> torch.Tensor:
        """The logits of some tokens.

        Args:
            input_ids: ``[1, T]`` int64 where prompts are taken in, end to end; ``[R, 1]`` in a
                step, the newest token of each row.
            position_ids: Of the same shape, each token's place in its own row.
            attention_mask: Where prompts are taken in, a :func:`segment_mask` of their lengths:
                attention is causal within each. In a step ``[R, 1, 1, width]`` bool, on the
                device: the columns of the cache that a row has written, its newest token included.
            past_key_values: Takes keys and values.
            logits_to_keep: Where prompts are taken in, ``[n]`` int64 on the device, the places of
                their last tokens; in a step 1, for the last token of each row.

        Returns:
            ``[1, n, V]`` where prompts are taken in, ``[R, 1, V]`` in a step, of any float dtype.
        """


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
        forward: The model's forward pass.
        device: Where it takes its token ids.
        slots: Rows at a time, at most.
    """

    def __init__(self, forward: SlotForward, device: torch.device, slots: int) -> None:
        self._forward = forward
        self._device = device
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
        logits = self._forward(
            input_ids=ids.to(self._device)[None],
            position_ids=positions.to(self._device)[None],
            attention_mask=segment_mask(lengths),
            past_key_values=self._cache,
            logits_to_keep=torch.tensor(starts[1:], device=self._device) - 1,
        )[0]
        return logits[torch.tensor(which, device=logits.device)]

    def step(self, tokens: torch.Tensor, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """See :meth:`Decoder.step`."""
        rows = len(tokens)
        width = self._cache.reserve(longest + 1)
        self._cache.writes = Writes(self._rows[:rows], lengths, rows=rows, width=width)
        seen = torch.arange(width, device=self._device) <= lengths[:, None]
        return self._forward(
            input_ids=tokens[:, None],
            position_ids=lengths[:, None],
            attention_mask=seen[:, None, None],
            past_key_values=self._cache,
            logits_to_keep=1,
        )[:, -1]

    def keep(self, source: torch.Tensor, target: torch.Tensor, rows: int, longest: int) -> None:
        """See :meth:`Decoder.keep`."""
        del rows
        self._cache.move(source, target, longest)
