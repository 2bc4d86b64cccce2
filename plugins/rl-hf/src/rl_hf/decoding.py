"""Continuous batching: rows are decoded together, leave when they finish, and make room.

Shapes: ``R`` rows being decoded. Everything that is kept for a row lies in tensors with one entry
per slot, and slots ``0..R-1`` are in use; per step, Python looks only at rows that end.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from rl_core.backends import Completion
from rl_core.errors import ConfigError, RLError
from rl_hf.decoders import Decoder, GroupDecoder, SlotDecoder, fits_slots
from rl_hf.modeling import model_device
from rl_hf.sampling import Sampler
from rl_hf.stopping import StopStrings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rl_core.backends import PromptBatch, SamplingParams

__all__ = ["DEFAULT_MAX_BATCH_SIZE", "DecodingEngine"]

DEFAULT_MAX_BATCH_SIZE = 256


class DecodingEngine:
    """Generates with a transformers model.

    Args:
        model: A causal language model. Its attention may be switched to an implementation that
            gives the same results (see :mod:`rl_hf.attention`).
        tokenizer: Decodes the text that stop strings are looked for in.
        max_batch_size: Rows decoded together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_batch_size = max_batch_size
        with _evaluating(model):
            self._fits_slots = fits_slots(model)

    def __call__(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        """Yields each row as it finishes.

        Args:
            prompts: At least one row, every row with a budget of at least 1.
            sampling: The same for all rows.

        Raises:
            ConfigError: A row has stop strings and there is no tokenizer.
            RLError: The model's logits are not finite; names the row.
        """
        if self._tokenizer is None and any(prompts.stop_strings):
            row = next(i for i, strings in enumerate(prompts.stop_strings) if strings)
            raise ConfigError(
                f"row {row} has stop strings, and the model directory has no tokenizer",
                fix="save the tokenizer beside the model, or use stop_token_ids",
                key="stop_strings",
                row=row,
            )
        return self._run(prompts, sampling)

    def _run(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        with _evaluating(self._model), torch.no_grad():
            run = _Run(self._model, self._tokenizer, self._decoder(prompts), prompts, sampling)
        while run.unfinished:
            # Not across the yield: modes of torch belong to the thread, not to the generator.
            with _evaluating(self._model), torch.no_grad():
                completions = run.advance()
            yield from completions

    def _decoder(self, prompts: PromptBatch) -> Decoder:
        slots = min(self._max_batch_size, len(prompts))
        if not self._fits_slots:
            return GroupDecoder(self._model, slots)
        return SlotDecoder(self._model, slots, int((prompts.lengths + prompts.budgets).max()))


@dataclass(slots=True)
class _Slots:
    """One entry per slot, on the model's device.

    Attributes:
        tokens: ``[slots]`` int64 newest token, not yet in the cache.
        lengths: ``[slots]`` int64 tokens in the cache.
        counts: ``[slots]`` int64 tokens generated.
        budgets: ``[slots]`` int64 tokens that may be generated.
        seeds: ``[slots]`` int64.
        generated: ``[slots, longest budget]`` int64.
        logprobs: ``[slots, longest budget]`` float32.
        seen: ``[slots, V]`` bool, or ``[slots, 0]`` without repetition penalty.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    counts: torch.Tensor
    budgets: torch.Tensor
    seeds: torch.Tensor
    generated: torch.Tensor
    logprobs: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def empty(cls, slots: int, width: int, vocabulary: int, device: torch.device) -> _Slots:
        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            tokens=numbers(slots),
            lengths=numbers(slots),
            counts=numbers(slots),
            budgets=numbers(slots),
            seeds=numbers(slots),
            generated=numbers(slots, width),
            logprobs=torch.zeros(slots, width, device=device),
            seen=torch.zeros(slots, vocabulary, dtype=torch.bool, device=device),
        )

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            values[target] = values[source]


class _Run:
    """One call: the rows that wait, the rows in slots, and what moves them on."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        decoder: Decoder,
        prompts: PromptBatch,
        sampling: SamplingParams,
    ) -> None:
        self._decoder = decoder
        self._prompts = prompts
        self._sampler = Sampler(sampling)
        self._device = model_device(model)
        # Long prompts first: rows of like length then share the cache for most of its life.
        self._order: list[int] = prompts.lengths.argsort(descending=True, stable=True).tolist()
        self._admitted = 0
        self._lengths: list[int] = prompts.lengths.tolist()
        #: The row in each slot, and its length at step 0 had it been there.
        self._rows: list[int] = []
        self._origins: list[int] = []
        self._steps = 0
        self._watchers = {
            row: StopStrings(strings, tokenizer)
            for row, strings in enumerate(prompts.stop_strings)
            if strings and tokenizer is not None
        }
        vocabulary = model.get_input_embeddings().weight.shape[0]
        self._penalised = sampling.repetition_penalty != 1.0
        self._slots = _Slots.empty(
            decoder.slots,
            int(prompts.budgets.max()),
            vocabulary if self._penalised else 0,
            self._device,
        )
        self._stops = torch.zeros(vocabulary, dtype=torch.bool, device=self._device)
        self._stops[[token for token in sampling.stop_token_ids if 0 <= token < vocabulary]] = True

    @property
    def unfinished(self) -> bool:
        return bool(self._rows) or self._admitted < len(self._order)

    def advance(self) -> list[Completion]:
        """Admits rows if there is room, else moves all on by a token; returns those that ended."""
        active = len(self._rows)
        waiting = self._order[self._admitted : self._admitted + self._decoder.slots - active]
        lengths = [self._lengths[row] for row in waiting]
        last = self._admitted + len(waiting) == len(self._order)
        count = self._decoder.room(lengths, active, last=last) if waiting else 0
        if count:
            first, logits = active, self._admit(waiting[:count])
        else:
            first, logits = 0, self._step()
        ended, stopped = self._record(first, logits)
        return self._release(ended, stopped) if ended else []

    def _admit(self, rows: list[int]) -> torch.Tensor:
        first, slots, prompts = len(self._rows), self._slots, self._prompts
        index = torch.tensor(rows)
        into = slice(first, first + len(rows))
        slots.lengths[into] = prompts.lengths[index].to(self._device)
        slots.budgets[into] = prompts.budgets[index].to(self._device)
        slots.seeds[into] = prompts.seeds[index].to(self._device)
        slots.counts[into] = 0
        self._rows += rows
        self._origins += [self._lengths[row] - self._steps for row in rows]
        self._admitted += len(rows)
        tokens = [prompts.token_ids(row) for row in rows]
        if self._penalised:
            slots.seen[into] = False
            for slot, ids in enumerate(tokens, first):
                slots.seen[slot, torch.tensor(ids, device=self._device)] = True
        return self._decoder.admit(tokens, first)

    def _step(self) -> torch.Tensor:
        slots, active = self._slots, len(self._rows)
        longest = max(self._origins) + self._steps
        logits = self._decoder.step(slots.tokens[:active], slots.lengths[:active], longest)
        slots.lengths[:active] += 1
        self._steps += 1
        return logits

    def _record(self, first: int, logits: torch.Tensor) -> tuple[list[int], list[bool]]:
        """Samples for the slots from ``first`` on; returns those that ended, and which stopped."""
        slots, to = self._slots, slice(first, first + len(logits))
        counts = slots.counts[to]
        tokens, logprobs = self._sampler(
            logits, slots.seeds[to], counts, slots.seen[to] if self._penalised else None
        )
        slots.tokens[to] = tokens
        slots.generated[to].scatter_(1, counts[:, None], tokens[:, None])
        slots.logprobs[to].scatter_(1, counts[:, None], logprobs[:, None])
        if self._penalised:
            slots.seen[to].scatter_(1, tokens[:, None], True)
        counts += 1
        stopped = self._stops[tokens]
        if self._watchers:
            stopped |= self._matches(first, tokens)
        ended = (stopped | (counts >= slots.budgets[to])).nonzero()[:, 0]
        return (ended + first).tolist(), stopped[ended].tolist()

    def _matches(self, first: int, tokens: torch.Tensor) -> torch.Tensor:
        """``[n]`` bool: the rows whose text holds one of their stop strings now."""
        found = [
            row in self._watchers and self._watchers[row].push(token)
            for row, token in zip(self._rows[first:], tokens.tolist(), strict=True)
        ]
        return torch.tensor(found, device=self._device)

    def _release(self, ended: list[int], stopped: list[bool]) -> list[Completion]:
        """Makes completions of slots that ended, and fills their places from the end."""
        slots = self._slots
        index = torch.tensor(ended, device=self._device)
        counts = slots.counts[index].tolist()
        width = max(counts)
        generated = slots.generated[index, :width].tolist()
        logprobs = slots.logprobs[index, :width].tolist()
        completions = [
            self._completion(slot, tokens[:count], values[:count], truncated=not stop)
            for slot, count, tokens, values, stop in zip(
                ended, counts, generated, logprobs, stopped, strict=True
            )
        ]
        self._close_ranks(set(ended))
        return completions

    def _completion(
        self, slot: int, tokens: list[int], logprobs: list[float], *, truncated: bool
    ) -> Completion:
        row = self._rows[slot]
        if not all(map(math.isfinite, logprobs)):
            raise RLError(
                f"row {row}: the model's logits are not finite",
                fix="check the weights of the last refit; bfloat16 has more range than float16",
                row=row,
            )
        return Completion(row, tokens, logprobs, truncated)

    def _close_ranks(self, ended: set[int]) -> None:
        remaining = len(self._rows) - len(ended)
        source = [slot for slot in range(remaining, len(self._rows)) if slot not in ended]
        target = [slot for slot in sorted(ended) if slot < remaining]
        for old, new in zip(source, target, strict=True):
            self._rows[new], self._origins[new] = self._rows[old], self._origins[old]
        del self._rows[remaining:], self._origins[remaining:]
        if not remaining:
            return
        from_slots = torch.tensor(source, dtype=torch.int64, device=self._device)
        to_slots = torch.tensor(target, dtype=torch.int64, device=self._device)
        longest = max(self._origins) + self._steps
        self._slots.move(from_slots, to_slots)
        self._decoder.keep(from_slots, to_slots, remaining, longest)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Generator[None]:
    """Without dropout, and as it was afterwards."""
    if not model.training:  # the usual case, and switching visits every module
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()
