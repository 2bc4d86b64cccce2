"""Continuous batching: rows are decoded together, leave when they finish, and make room.

Shapes: ``R`` rows being decoded. Everything that is kept for a row lies in tensors with one entry
per slot, and slots ``0..R-1`` are in use; per step, Python looks only at rows that end.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from rl_backends import Completion, FailedRow, RowEngine
from rl_backends.generation.stop_strings import StopStrings
from rl_backends.torch.openmp import release_threads
from rl_backends.torch.sampling import Sampler
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence

    from torch import nn

    from rl_backends import Row, SamplingParams
    from rl_backends.torch.slots import Decoder

__all__ = ["DEFAULT_MAX_BATCH_SIZE", "DecodingEngine", "evaluating"]

DEFAULT_MAX_BATCH_SIZE = 256


class DecodingEngine(RowEngine):
    """Generates with a torch module; nothing is kept but the weights when no row is left.

    Args:
        module: A causal language model; it is in evaluation mode while it decodes.
        open_decoder: Makes a decoder of so many rows at a time, such as
            ``partial(SlotDecoder, forward, device)``. A decoder is let go of when its rows are
            done.
        vocab_size: Width of the logits.
        device: Where the decoder takes token ids and gives logits.
        in_groups: Rows of one prompt length get a decoder, which no others join; for
            decoders that are not :class:`~rl_backends.torch.slots.SlotDecoder`.
        tokenizer: Decodes the text that stop strings are looked for in; None if there is none.
        max_batch_size: Rows decoded together. As many wait here, so that prompts are taken in
            several at a time.
        boundary: Tokens at which the model of a row becomes another one; None: at none. A shorter
            row ends there, truncated: its tokens would not be scored as they were drawn.
    """

    def __init__(
        self,
        module: nn.Module,
        open_decoder: Callable[[int], Decoder],
        *,
        vocab_size: int,
        device: torch.device,
        in_groups: bool = False,
        tokenizer: Any = None,
        max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
        boundary: int | None = None,
    ) -> None:
        self._boundary = boundary
        self._module = module
        self._open_decoder = open_decoder
        self._vocab_size = vocab_size
        self._device = device
        self._in_groups = in_groups
        self._tokenizer = tokenizer
        self._most = max_batch_size
        self.room = 2 * max_batch_size
        self._waiting: list[Row] = []
        self._batches: list[_Batch] = []
        self._ended: list[Completion | FailedRow] = []  # before they began
        self.release_threads()  # those that loaded the model

    def submit(self, rows: Sequence[Row]) -> None:
        """See :meth:`RowEngine.submit`. A row with stop strings fails without a tokenizer."""
        sound = []
        for row in rows:
            if row.stop_strings and self._tokenizer is None:
                error = ConfigError(
                    f"row {row.index} has stop strings, and the model directory has no tokenizer",
                    fix="save the tokenizer beside the model, or use stop_token_ids",
                    key="stop_strings",
                    row=row.index,
                )
                self._ended.append(FailedRow(row.key, error))
                continue
            left = (self._boundary or 0) - len(row.token_ids)
            if self._boundary is None or left < 0:
                sound.append(row)
            elif left:
                sound.append(replace(row, budget=min(row.budget, left)))
            else:
                self._ended.append(Completion(row.key, [], [], truncated=True))
        # Long prompts first: rows of like length then share the cache for most of its life.
        self._waiting += sorted(sound, key=lambda row: -len(row.token_ids))

    def collect(self) -> list[Completion | FailedRow]:
        """Moves every row on by a token, or takes prompts in."""
        ended, self._ended = self._ended, []
        with evaluating(self._module), torch.no_grad():
            if not self._in_groups:  # rows join one batch at any time
                if self._waiting and not self._batches:
                    self._open(self._most)
                if self._batches:
                    self._batches[0].waiting += self._waiting
                    self._waiting = []
            # In groups, each length has a batch; else nothing waits here any more.
            while self._waiting and (room := max(0, self._most - sum(map(len, self._batches)))):
                length = len(self._waiting[0].token_ids)
                group = [row for row in self._waiting if len(row.token_ids) == length][:room]
                self._open(len(group)).waiting += group
                taken = {row.key for row in group}
                self._waiting = [row for row in self._waiting if row.key not in taken]
            for batch in self._batches:
                ended += batch.advance()
        self._batches = [batch for batch in self._batches if batch.unfinished]
        return ended

    def cancel(self, keys: Collection[int]) -> None:
        """See :meth:`RowEngine.cancel`."""
        self._waiting = [row for row in self._waiting if row.key not in keys]
        for batch in self._batches:
            batch.cancel(keys)
        self._batches = [batch for batch in self._batches if batch.unfinished]

    def release_threads(self) -> None:
        """See :meth:`RowEngine.release_threads`."""
        if self._device.type == "cpu":
            release_threads()

    def _open(self, rows: int) -> _Batch:
        batch = _Batch(
            self._open_decoder(rows),
            self._waiting[0].sampling,
            vocab_size=self._vocab_size,
            device=self._device,
            tokenizer=self._tokenizer,
        )
        self._batches.append(batch)
        return batch


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
    def empty(cls, vocabulary: int, device: torch.device) -> _Slots:
        """No slots yet, on a device; ``vocabulary`` is the width of ``seen``."""

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            tokens=numbers(0),
            lengths=numbers(0),
            counts=numbers(0),
            budgets=numbers(0),
            seeds=numbers(0),
            generated=numbers(0, 0),
            logprobs=torch.zeros(0, 0, device=device),
            seen=torch.zeros(0, vocabulary, dtype=torch.bool, device=device),
        )

    def grow(self, slots: int, width: int) -> None:
        """Makes room for that many slots, and for as many generated tokens."""
        slots, width = max(slots, len(self.tokens)), max(width, self.generated.shape[1])
        if (slots, width) == tuple(self.generated.shape):
            return
        grown = {}
        for field in fields(self):
            old = getattr(self, field.name)
            shape = [slots, *old.shape[1:]]
            if field.name in ("generated", "logprobs"):
                shape[1] = width
            new = grown[field.name] = old.new_zeros(shape)
            new[tuple(slice(0, size) for size in old.shape)] = old
        for name, new in grown.items():  # all, or none where memory is short
            setattr(self, name, new)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            values[target] = values[source]


class _Batch:
    """Rows that are decoded together: those that wait, those in slots, and what moves them on."""

    def __init__(
        self,
        decoder: Decoder,
        sampling: SamplingParams,
        *,
        vocab_size: int,
        device: torch.device,
        tokenizer: Any,
    ) -> None:
        self.waiting: list[Row] = []
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._device = device
        #: The row in each slot, and its length at step 0 had it been there.
        self._rows: list[Row] = []
        self._origins: list[int] = []
        self._steps = 0
        self._admitted = False  # in the last advance
        self._watchers: dict[int, StopStrings] = {}
        self._samplers: dict[SamplingParams, Sampler] = {}  # that of every row in a slot
        self._penalised = sampling.repetition_penalty != 1.0
        self._slots = _Slots.empty(vocab_size if self._penalised else 0, device)
        self._stops = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._stops[[token for token in sampling.stop_token_ids if 0 <= token < vocab_size]] = True

    def __len__(self) -> int:
        return len(self._rows) + len(self.waiting)

    @property
    def unfinished(self) -> bool:
        return bool(self._rows or self.waiting)

    def advance(self) -> list[Completion | FailedRow]:
        """Admits rows if there is room, else moves all on by a token; returns those that ended."""
        active = len(self._rows)
        next_ones = self.waiting[: self._decoder.slots - active]
        if active and self._admitted:  # those in slots have their turn
            next_ones = []
        lengths = [len(row.token_ids) for row in next_ones]
        last = len(next_ones) == len(self.waiting)
        count = self._decoder.room(lengths, active, last=last) if next_ones else 0
        if count:
            count, refused = self._make_room(count)
            if refused:
                return refused
        self._admitted = bool(count)
        if count:
            first, logits = active, self._admit(next_ones[:count])
        else:
            first, slots = 0, self._slots
            longest = max(self._origins) + self._steps
            logits = self._decoder.step(slots.tokens[:active], slots.lengths[:active], longest)
            slots.lengths[:active] += 1
            self._steps += 1
        ended, stopped = self._record(first, logits)
        return self._release(ended, stopped) if ended else []

    def _make_room(self, count: int) -> tuple[int, list[Completion | FailedRow]]:
        """How many of the first rows that wait may be admitted; none must wait for memory for ever.

        Returns:
            The number, and rows that do not even fit alone.
        """
        active, capacity = len(self._rows), len(self._slots.tokens)
        # Room for all that wait, too, and by halves: growing copies.
        coming = active + len(self.waiting)
        coming = capacity if coming <= capacity else max(coming, capacity * 3 // 2)
        rows = self.waiting
        while True:
            slots = min(self._decoder.slots, max(coming, active + count))
            try:
                self._slots.grow(slots, max(row.budget for row in rows))
                self._decoder.reserve(slots, max(len(r.token_ids) + r.budget for r in rows))
                return count, []
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if len(rows) > count or coming > active + count:  # no more than these
                    rows, coming = self.waiting[:count], active + count
                elif count > 1:
                    count //= 2
                    rows, coming = self.waiting[:count], active + count
                elif active:
                    return 0, []
                else:
                    row = self.waiting.pop(0)
                    return 0, [FailedRow(row.key, error)]

    def cancel(self, keys: Collection[int]) -> None:
        """Forgets rows; others take their places."""
        self.waiting = [row for row in self.waiting if row.key not in keys]
        slots = {slot for slot, row in enumerate(self._rows) if row.key in keys}
        if slots:
            self._close_ranks(slots)

    def _admit(self, rows: list[Row]) -> torch.Tensor:
        first, slots = len(self._rows), self._slots
        into = slice(first, first + len(rows))
        tokens = [row.token_ids for row in rows]
        lengths = [len(ids) for ids in tokens]
        for values, numbers in (
            (slots.lengths, lengths),
            (slots.budgets, [row.budget for row in rows]),
            (slots.seeds, [row.seed for row in rows]),
        ):
            values[into] = torch.tensor(numbers, device=self._device)
        slots.counts[into] = 0
        if self._penalised:
            slots.seen[into] = False
            for slot, ids in enumerate(tokens, first):
                slots.seen[slot, torch.tensor(ids, device=self._device)] = True
        self._rows += rows
        self._origins += [length - self._steps for length in lengths]
        del self.waiting[: len(rows)]
        for row in rows:
            if row.stop_strings and self._tokenizer is not None:
                self._watchers[row.key] = StopStrings(row.stop_strings, self._tokenizer)
        self._note_samplers()
        return self._decoder.admit(tokens, first)

    def _note_samplers(self) -> None:
        kinds = {id(row.sampling): row.sampling for row in self._rows}  # nearly always one object
        self._samplers = {kind: Sampler(kind) for kind in kinds.values()}

    def _record(self, first: int, logits: torch.Tensor) -> tuple[list[int], list[bool]]:
        """Samples for the slots from ``first`` on; returns those that ended, and which stopped."""
        slots, to = self._slots, slice(first, first + len(logits))
        counts = slots.counts[to]
        tokens, logprobs = self._sample(first, logits)
        slots.tokens[to] = tokens
        slots.generated[to].scatter_(1, counts[:, None], tokens[:, None])
        slots.logprobs[to].scatter_(1, counts[:, None], logprobs[:, None])
        if self._penalised:
            slots.seen[to].scatter_(1, tokens[:, None], True)
        counts += 1
        stopped = self._stops[tokens]
        if self._watchers:
            found = [
                row.key in self._watchers and self._watchers[row.key].push(token)
                for row, token in zip(self._rows[first:], tokens.tolist(), strict=True)
            ]
            stopped |= torch.tensor(found, device=self._device)
        ended = (stopped | (counts >= slots.budgets[to])).nonzero()[:, 0]
        return (ended + first).tolist(), stopped[ended].tolist()

    def _sample(self, first: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of every row from a slot on, and its log-prob; each as its call wants."""
        slots, to = self._slots, slice(first, first + len(logits))
        seeds, counts = slots.seeds[to], slots.counts[to]
        seen = slots.seen[to] if self._penalised else None
        if len(self._samplers) == 1:
            [sampler] = self._samplers.values()
            return sampler(logits, seeds, counts, seen)
        tokens = torch.zeros_like(seeds)
        logprobs = torch.zeros(len(logits), device=self._device)
        for sampling, sampler in self._samplers.items():
            rows = [place for place, row in enumerate(self._rows[to]) if row.sampling == sampling]
            if rows:
                which = torch.tensor(rows, device=self._device)
                tokens[which], logprobs[which] = sampler(
                    logits[which],
                    seeds[which],
                    counts[which],
                    None if seen is None else seen[which],
                )
        return tokens, logprobs

    def _release(self, ended: list[int], stopped: list[bool]) -> list[Completion | FailedRow]:
        """Makes completions of slots that ended, and fills their places from the end."""
        slots = self._slots
        index = torch.tensor(ended, device=self._device)
        counts = slots.counts[index].tolist()
        width = max(counts)
        generated = slots.generated[index, :width].tolist()
        logprobs = slots.logprobs[index, :width].tolist()
        completions: list[Completion | FailedRow] = []
        for slot, count, tokens, values, stop in zip(
            ended, counts, generated, logprobs, stopped, strict=True
        ):
            key = self._rows[slot].key
            done = Completion(key, tokens[:count], values[:count], truncated=not stop)
            completions.append(done)
        self._close_ranks(set(ended))
        return completions

    def _close_ranks(self, ended: set[int]) -> None:
        for slot in ended:
            self._watchers.pop(self._rows[slot].key, None)
        remaining = len(self._rows) - len(ended)
        source = [slot for slot in range(remaining, len(self._rows)) if slot not in ended]
        target = [slot for slot in sorted(ended) if slot < remaining]
        for old, new in zip(source, target, strict=True):
            self._rows[new], self._origins[new] = self._rows[old], self._origins[old]
        del self._rows[remaining:], self._origins[remaining:]
        self._note_samplers()
        if not remaining:
            return
        from_slots = torch.tensor(source, dtype=torch.int64, device=self._device)
        to_slots = torch.tensor(target, dtype=torch.int64, device=self._device)
        longest = max(self._origins) + self._steps
        self._slots.move(from_slots, to_slots)
        self._decoder.keep(from_slots, to_slots, remaining, longest)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Of a GPU, or of the CPU, for which torch has no class of errors."""
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


@contextmanager
def evaluating(module: nn.Module) -> Generator[None]:
    """Without dropout, and as it was afterwards."""
    if not module.training:  # the usual case, and switching visits every module
        yield
        return
    module.eval()
    try:
        yield
    finally:
        module.train()
