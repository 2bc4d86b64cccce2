"""Between batches and engines: checked prompts in, completions out, padded tensors again.

This is clauses G1, G2, G3, G5, G6, G9, G12 and G15 of the contract, written once for all engines.
Shapes: ``B`` rows, ``S`` input width, ``W`` output width.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rl_backends.inputs import check_limits, input_lengths, row_integers
from rl_core.batch import BatchedDataDict
from rl_core.batch.provenance import Provenance
from rl_core.errors import DataError
from rl_core.interfaces import GenerationOutputSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "Completion",
    "ModelFacts",
    "PromptBatch",
    "RowStreams",
    "SamplingParams",
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
class ModelFacts:
    """What the frontend must know of the loaded model.

    Attributes:
        pad_token_id: Fills the output on the right.
        eos_token_ids: The model's own end-of-sequence tokens.
        vocab_size: Token ids are in ``[0, vocab_size)``.
        max_model_len: Upper bound on prompt plus generated tokens.
    """

    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How every row of one call is sampled.

    Attributes:
        greedy: Take the argmax; the log-prob is then of the untruncated distribution at
            temperature 1.
        temperature: Divides the logits, > 0.
        top_k: Candidates kept; 0 is off.
        top_p: Nucleus mass; 1 is off.
        repetition_penalty: 1 is off.
        stop_token_ids: Tokens that end a row and are kept.
        logprobs_mode: ``"processed"`` or ``"raw"``.
        max_new_tokens: Upper bound on generated tokens per row.
        num_samples: Completions per prompt.
        seed: Base seed, or None for a fresh one per call.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    logprobs_mode: str = "processed"
    max_new_tokens: int = 128
    num_samples: int = 1
    seed: int | None = None

    @property
    def distribution(self) -> str | None:
        """The options that shape the distribution sampled from; None if nothing is drawn."""
        off = {"temperature": None, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
        set_ = [f"{k} {getattr(self, k):g}" for k, v in off.items() if getattr(self, k) != v]
        return None if self.greedy else ", ".join(set_)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], facts: ModelFacts) -> SamplingParams:
        """Reads the sampling keys of a :class:`GenerationConfig`."""
        eos = config.get("eos_token_id")
        eos_ids = facts.eos_token_ids if eos is None else (eos if isinstance(eos, list) else [eos])
        stops = dict.fromkeys([*(config.get("stop_token_ids") or ()), *eos_ids])
        return cls(
            greedy=not config.get("do_sample", True),
            temperature=float(config.get("temperature", 1.0)),
            top_k=max(0, config.get("top_k") or 0),
            top_p=float(config.get("top_p", 1.0)),
            repetition_penalty=float(config.get("repetition_penalty", 1.0)),
            stop_token_ids=tuple(stops),
            logprobs_mode=config.get("logprobs_mode", "processed"),
            max_new_tokens=config.get("max_new_tokens", 128),
            num_samples=config.get("num_samples", 1),
            seed=config.get("seed"),
        )


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts that passed the checks, at least one row, each with room for a token.

    Attributes:
        input_ids: ``[B, S]`` int64, right-padded.
        lengths: ``[B]`` int64, at least 1.
        budgets: ``[B]`` int64 tokens that each row may generate, at least 1.
        stop_strings: For each row, config and row merged.
        seeds: ``[B]`` int64, one independent stream per row.
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
        return cls(ids, lengths, budgets, _merge_stops(data, stop_strings, rows), seeds, seeded)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine made of one prompt.

    Attributes:
        row: Index of the prompt in its :class:`PromptBatch`.
        token_ids: Generated tokens, stop token included.
        logprobs: One float for each.
        truncated: True if the row ended by length.
    """

    row: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    truncated: bool


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


def repeat_for_samples(data: BatchedDataDict[Any], num_samples: int) -> BatchedDataDict[Any]:
    """A row for each sample; a batch without any keys is one without rows.

    Sample k of a row with a ``seed`` of its own draws from ``seed + k``: samples that are all alike
    are of no use.
    """
    if not data:
        nothing = torch.zeros(0, 0, dtype=torch.int64)
        return BatchedDataDict({"input_ids": nothing, "input_lengths": nothing.view(0)})
    if num_samples == 1:
        return data
    rows = data.repeat_interleave(num_samples)
    if isinstance(seeds := rows.get("seed"), torch.Tensor) and seeds.dim() == 1:
        rows["seed"] = seeds + torch.arange(len(seeds)) % num_samples
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
