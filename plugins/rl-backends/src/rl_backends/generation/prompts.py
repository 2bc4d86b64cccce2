"""Between batches and engines: checked prompts in, completions out, padded tensors again.

This is clauses G1, G2, G3, G5, G6, G9, G12 and G15 of the contract, written once for all engines.
Shapes: ``B`` rows, ``S`` input width, ``W`` output width.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from rl_backends.inputs import check_limits, input_lengths, row_integers
from rl_core.batch import BatchedDataDict
from rl_core.batch.provenance import Provenance
from rl_core.errors import DataError
from rl_core.interfaces import GenerationOutputSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rl_backends.generation.rows import Completion, ModelFacts, SamplingParams

__all__ = [
    "PromptBatch",
    "RowStreams",
    "assemble_output",
    "assemble_row",
    "passthrough_columns",
    "provenance_of",
    "repeat_for_samples",
    "row_seeds",
]

#: Keys that a generation consumes; every other key is carried through to the output.
CONSUMED_KEYS = frozenset({"input_ids", "input_lengths", "attention_mask", "stop_strings", "seed"})
OUTPUT_KEYS = frozenset(GenerationOutputSpec.__annotations__) - {"__extra__"}


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts that passed the checks, at least one row, each with room for a token.

    Attributes:
        input_ids: ``[B, S]`` int64, right-padded.
        lengths: ``[B]`` int64, at least 1.
        budgets: ``[B]`` int64 tokens that each row may generate, at least 1.
        stop_strings: For each row, config and row merged.
        seeds: ``[B]`` int64 of 63 bits, one independent stream per row.
        seeded: The seeds were asked for; otherwise they are fresh, and an engine may as well draw
            from a stream of its own.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    budgets: torch.Tensor
    stop_strings: Sequence[tuple[str, ...]]
    seeds: torch.Tensor
    seeded: bool = True

    def __len__(self) -> int:
        return len(self.lengths)

    def token_ids(self, row: int) -> list[int]:
        """The unpadded prompt of one row."""
        ids: list[int] = self.input_ids[row, : int(self.lengths[row])].tolist()
        return ids

    def select(self, rows: torch.Tensor) -> PromptBatch:
        """The given rows, an int64 index, in that order."""
        return PromptBatch(
            self.input_ids[rows],
            self.lengths[rows],
            self.budgets[rows],
            [self.stop_strings[row] for row in rows.tolist()],
            self.seeds[rows],
            self.seeded,
        )

    @classmethod
    def from_data(
        cls,
        data: BatchedDataDict[Any],
        sampling: SamplingParams,
        facts: ModelFacts,
        stop_strings: Sequence[str] = (),
        *,
        first_stream: int = 0,
    ) -> PromptBatch:
        """Checks a batch and makes prompts of it; rows without room keep a budget of 0.

        Args:
            data: See :class:`GenerationDatumSpec`; a ``seed`` key ``[B]`` overrides the config's.
            sampling: Gives the budget and the seed.
            facts: The model's limits.
            stop_strings: The config's.
            first_stream: Of the config's seed, that the first row draws from; see
                :class:`RowStreams`.

        Raises:
            DataError: Names the row and what is wrong with it.
        """
        lengths = input_lengths(data, filler=(facts.pad_token_id, 0))
        rows = data.size
        ids = data["input_ids"].to(torch.int64)
        check_limits(ids, lengths, vocab_size=facts.vocab_size, context=facts.max_model_len)
        budgets = (facts.max_model_len - lengths).clamp(max=sampling.max_new_tokens)
        seeds = row_integers(data, "seed", rows)
        seeded = seeds is not None or sampling.seed is not None
        if seeds is None:
            seeds = row_seeds(sampling.seed, rows, first_stream)
        seeds = seeds & (1 << 63) - 1  # engines take no negative ones
        return cls(ids, lengths, budgets, _merge_stops(data, stop_strings, rows), seeds, seeded)


#: More rows than a copy can be asked for.
_STREAMS_OF_A_COPY = 2**40


class RowStreams:
    """Counts the rows that an engine, or a cluster of replicas, is asked for.

    The i-th of them draws from the i-th stream of the configured seed, in whatever calls they come.
    A copy in another process has streams of its own.

    Args:
        first: The first stream.
    """

    def __init__(self, first: int = 0) -> None:
        self._asked = first
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[RowStreams], tuple[int]]:
        return RowStreams, (self.take(_STREAMS_OF_A_COPY),)

    def first_of(self, data: BatchedDataDict[Any], sampling: SamplingParams) -> int:
        """The stream of the first row of a call; takes one for each row if they draw from them."""
        own_or_none = sampling.seed is None or sampling.greedy or data.get("seed") is not None
        return 0 if own_or_none else self.take(data.size)

    def take(self, rows: int) -> int:
        """The number of the first of the next ``rows`` streams, which nobody else gets."""
        with self._lock:
            first = self._asked
            self._asked += rows
        return first


def row_seeds(seed: int | None, rows: int, first: int = 0) -> torch.Tensor:
    """``[rows]`` int64 seeds of streams ``first`` and up: a function of its arguments.

    Args:
        seed: The engine's; None for fresh streams.
        rows: How many streams.
        first: Number of the first one.
    """
    base = secrets.randbits(62) if seed is None else seed

    def stream(number: int) -> int:
        digest = hashlib.blake2b(f"{base} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 2

    return torch.tensor([stream(first + row) for row in range(rows)], dtype=torch.int64)


def _merge_stops(
    data: BatchedDataDict[Any], shared: Sequence[str], rows: int
) -> list[tuple[str, ...]]:
    own = data.get("stop_strings")
    own = [None] * rows if own is None else own
    if not isinstance(own, list):
        raise DataError(
            f"stop_strings must be a list with a list (or None) for each row, not {own!r}",
            fix='such as [["\\n\\n"], None] for two rows',
            key="stop_strings",
        )
    for row, strings in enumerate(own):
        sound = strings is None or isinstance(strings, (list, tuple))
        if not sound or not all(isinstance(s, str) and s for s in strings or ()):
            raise DataError(
                f"row {row}: stop_strings must be a list of non-empty strings or None, "
                f"not {strings!r}",
                fix='such as ["\\n\\n"]',
                row=row,
                key="stop_strings",
            )
    return [tuple(dict.fromkeys([*shared, *(strings or ())])) for strings in own]


def assemble_output(
    data: BatchedDataDict[Any],
    prompts: PromptBatch,
    completions: Iterable[Completion],
    *,
    pad_token_id: int,
    weights: tuple[int, int],
) -> BatchedDataDict[Any]:
    """Lays completions out as a :class:`GenerationOutputSpec` batch, in the order of the prompts.

    Rows without a completion had no room: generation length 0 and truncated. ``weights`` are the
    version and the origin of those that completed the others.
    """
    rows = len(prompts)
    done = sorted(completions, key=lambda c: c.row)
    lengths = torch.zeros(rows, dtype=torch.int64)
    truncated = torch.ones(rows, dtype=torch.bool)
    index = torch.tensor([c.row for c in done], dtype=torch.int64)
    lengths[index] = torch.tensor([len(c.token_ids) for c in done], dtype=torch.int64)
    truncated[index] = torch.tensor([c.truncated for c in done], dtype=torch.bool)
    totals = prompts.lengths + lengths
    width = int(totals.max()) if rows else 0
    positions = torch.arange(width)
    ids = torch.full((rows, width), pad_token_id, dtype=torch.int64)
    kept = min(width, prompts.input_ids.shape[1])
    is_prompt = positions[:kept] < prompts.lengths[:, None]
    ids[:, :kept] = torch.where(is_prompt, prompts.input_ids[:, :kept], pad_token_id)
    logprobs = torch.zeros(rows, width, dtype=torch.float32)
    generated = (positions >= prompts.lengths[:, None]) & (positions < totals[:, None])
    # Boolean assignment fills row by row, which is the order of the sorted completions.
    ids[generated] = torch.tensor([t for c in done for t in c.token_ids], dtype=torch.int64)
    logprobs[generated] = torch.tensor([x for c in done for x in c.logprobs], dtype=torch.float32)
    output: BatchedDataDict[Any] = BatchedDataDict(
        {
            "output_ids": ids,
            "generation_lengths": lengths,
            "unpadded_sequence_lengths": totals,
            "logprobs": logprobs,
            "truncated": truncated,
            "weights_version": torch.full((rows,), weights[0], dtype=torch.int64),
            "weights_origin": torch.full((rows,), weights[1], dtype=torch.int64),
        }
    )
    output.update(passthrough_columns(data))
    return output


def assemble_row(
    data: BatchedDataDict[Any],
    prompts: PromptBatch,
    done: Completion,
    *,
    weights: tuple[int, int],
) -> BatchedDataDict[Any]:
    """Row ``done.row`` as :func:`assemble_output` lays it out without others.

    Calls that stream, and calls of one row each, have this for every row.
    """
    prompt = prompts.token_ids(done.row)
    count, total = len(done.token_ids), len(prompt) + len(done.token_ids)
    numbers = torch.tensor([count, total, *weights])
    output: BatchedDataDict[Any] = BatchedDataDict(
        {
            "output_ids": torch.tensor([[*prompt, *done.token_ids]]),
            "generation_lengths": numbers[:1],
            "unpadded_sequence_lengths": numbers[1:2],
            "logprobs": torch.tensor([[0.0] * len(prompt) + [*done.logprobs]], dtype=torch.float32),
            "truncated": torch.tensor([done.truncated], dtype=torch.bool),
            "weights_version": numbers[2:3],
            "weights_origin": numbers[3:],
        }
    )
    row = slice(done.row, done.row + 1)
    output.update(
        {key: None if v is None else v[row] for key, v in passthrough_columns(data).items()}
    )
    return output


def repeat_for_samples(data: BatchedDataDict[Any], num_generations: int) -> BatchedDataDict[Any]:
    """A row for each sample; a batch without any keys is one without rows.

    Sample k of a row with a ``seed`` of its own draws from ``seed + k``: samples that are all alike
    are of no use.
    """
    if not data:
        nothing = torch.zeros(0, 0, dtype=torch.int64)
        return BatchedDataDict({"input_ids": nothing, "input_lengths": nothing.view(0)})
    if num_generations == 1:
        return data
    ids, memory = data.get("input_ids"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if isinstance(ids, torch.Tensor) and 8 * ids.numel() * num_generations > memory:
        raise DataError(
            f"the batch of {len(ids)} prompts x {num_generations} completions x {ids.shape[-1]} "
            f"tokens does not fit into the {memory >> 30} GiB of this host",
            fix="set a smaller num_generations, or call generate several times",
            key="num_generations",
        )
    rows = data.repeat_interleave(num_generations)
    if isinstance(seeds := rows.get("seed"), torch.Tensor) and seeds.dim() == 1:
        rows["seed"] = seeds + torch.arange(len(seeds)) % num_generations
    return rows


def passthrough_columns(data: BatchedDataDict[Any]) -> dict[str, Any]:
    """The columns that go to the output as they are.

    Those of an earlier output, in a batch that was one, make room for the new ones.
    """
    return {k: v for k, v in data.items() if k not in CONSUMED_KEYS and k not in OUTPUT_KEYS}


def greedy_params(sampling: SamplingParams) -> SamplingParams:
    """The same limits, but the argmax of the model's own distribution."""
    return replace(sampling, greedy=True, temperature=1.0, top_k=0, top_p=1.0)


def provenance_of(sampling: SamplingParams) -> Provenance:
    """Of rows that were sampled like this."""
    comparable = sampling.logprobs_mode == "processed"
    return Provenance(sampling.distribution if comparable else None)
