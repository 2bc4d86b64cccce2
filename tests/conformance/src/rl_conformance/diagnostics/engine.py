"""Whether an engine keeps to its context, and decodes what it prefills: clause A2.

The functions have the names that users know from elsewhere; pytest does not collect them.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.diagnostics.agreement import Agreement
from rl_core.batch import BatchedDataDict
from rl_core.create import create_generation
from rl_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from rl_core.interfaces import Cluster

__all__ = [
    "GenerationConsistency",
    "MaxModelLen",
    "random_prompts",
    "test_generation_consistency",
    "test_max_model_len_respected",
]


@dataclass(frozen=True, slots=True)
class MaxModelLen:
    """What :func:`test_max_model_len_respected` found.

    Attributes:
        max_model_len: The limit that was set.
        prompt_lengths: Of each row.
        total_lengths: Prompt plus generation of each row.
        problems: What is wrong, in words; empty if the limit is respected.
    """

    max_model_len: int
    prompt_lengths: tuple[int, ...]
    total_lengths: tuple[int, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True without problems."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.passed


@dataclass(frozen=True, slots=True)
class GenerationConsistency:
    """What :func:`test_generation_consistency` found.

    Attributes:
        agreement: Log-probs of decoding against those of prefill.
        same_tokens: Fraction of the compared positions where both choose the same token.
        tokens_generated: Length of the longest generation.
        threshold: The agreement's error must stay below it.
        min_same_tokens: ``same_tokens`` must reach it; ties may be broken either way.
    """

    agreement: Agreement
    same_tokens: float
    tokens_generated: int
    threshold: float
    min_same_tokens: float

    @property
    def passed(self) -> bool:
        """True if log-probs and tokens agree."""
        return self.agreement.error < self.threshold and self.same_tokens >= self.min_same_tokens

    def __bool__(self) -> bool:
        return self.passed


def random_prompts(
    vocab_size: int, lengths: Sequence[int], *, seed: int = 0, avoid: int = 0
) -> BatchedDataDict[Any]:
    """Prompts of random tokens.

    Args:
        vocab_size: Tokens are below it.
        lengths: Of each row.
        seed: Of the tokens.
        avoid: A token that does not occur, and pads (the engine's pad token).
    """
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths, dtype=torch.int64)
    shape = (len(lengths), max(lengths, default=0))
    ids = torch.randint(0, vocab_size - 1, shape, generator=generator)
    ids += ids >= avoid
    ids[torch.arange(shape[1]) >= counts[:, None]] = avoid
    return BatchedDataDict({"input_ids": ids, "input_lengths": counts})


def test_max_model_len_respected(
    model_name: str,
    *,
    backend: str = "hf",
    max_model_len: int = 32,
    cluster: Cluster | None = None,
    **config: Any,
) -> MaxModelLen:
    """Whether no row grows past ``max_model_len``, and rows end there and not before.

    Prompts of different lengths, up to the limit, would need more room than there is; one that is
    longer than the limit must be refused.

    Args:
        model_name: The checkpoint.
        backend: Name of the generation backend.
        max_model_len: The limit to set, at least 2.
        cluster: Where to run it; in this process if None.
        **config: Further keys of the backend's configuration.

    Raises:
        ConfigError: ``max_model_len`` is above the model's own context, or below 2.
    """
    if max_model_len < 2:
        raise ConfigError(
            f"max_model_len is {max_model_len}", fix="give at least 2", key="max_model_len"
        )
    lengths = sorted({1, max_model_len // 2, max_model_len - 1, max_model_len})
    limits = {"max_model_len": max_model_len, "max_new_tokens": 2 * max_model_len}
    problems = []
    with _engine(backend, model_name, cluster, {**config, **limits, "eos_token_id": []}) as engine:
        facts = engine.facts
        prompts = random_prompts(facts.vocab_size, lengths, avoid=facts.pad_token_id)
        output = engine.generate(prompts, greedy=True)
        too_long = random_prompts(facts.vocab_size, [max_model_len + 1], avoid=facts.pad_token_id)
        try:
            engine.generate(too_long, greedy=True)
            problems.append(f"a prompt of {max_model_len + 1} tokens was not refused")
        except DataError:
            pass  # as it must be
    totals = output["unpadded_sequence_lengths"].tolist()
    for row, (length, total) in enumerate(zip(lengths, totals, strict=True)):
        if total != max_model_len:
            problems.append(f"row {row}: {length} tokens grew to {total}, not to {max_model_len}")
        elif not output["truncated"][row]:
            problems.append(f"row {row}: ended at the limit and is not marked as truncated")
    return MaxModelLen(max_model_len, tuple(lengths), tuple(totals), tuple(problems))


def test_generation_consistency(
    model_name: str,
    *,
    backend: str = "hf",
    prompts: BatchedDataDict[Any] | None = None,
    max_new_tokens: int = 256,
    positions: int = 16,
    threshold: float = 1.05,
    min_same_tokens: float = 0.95,
    cluster: Cluster | None = None,
    **config: Any,
) -> GenerationConsistency:
    """Whether decoding agrees with prefill over long outputs.

    Long outputs are decoded greedily. Then an engine that generates a single token gets them, cut
    at several positions, as prompts: its token and log-prob come from prefill alone and must be
    those of decoding.

    Args:
        model_name: The checkpoint.
        backend: Name of the generation backend.
        prompts: What to continue; four rows of random tokens if None.
        max_new_tokens: Length of the outputs; the context permitting.
        positions: Cuts for each row, evenly spread.
        threshold: Upper bound of the mean of ``exp(|decode - prefill|)``.
        min_same_tokens: Fraction of positions where both must choose the same token.
        cluster: Where to run it; in this process if None.
        **config: Further keys of the backend's configuration.

    Raises:
        DataError: The prompts leave no room.
    """
    endless = {**config, "eos_token_id": [], "max_new_tokens": max_new_tokens}
    with _engine(backend, model_name, cluster, endless) as engine:
        facts = engine.facts
        if prompts is None:
            lengths = [min(length, facts.max_model_len // 2) for length in (3, 5, 9, 17)]
            prompts = random_prompts(facts.vocab_size, lengths, avoid=facts.pad_token_id)
        output = engine.generate(prompts, greedy=True)
    rows, cuts = _cuts(output, positions)
    width = torch.arange(output["output_ids"].shape[1])
    prefixes: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": output["output_ids"][rows].where(
                width < cuts[:, None], facts.pad_token_id
            ),
            "input_lengths": cuts,
        }
    )
    with _engine(backend, model_name, cluster, {**endless, "max_new_tokens": 1}) as engine:
        prefilled = engine.generate(prefixes, greedy=True)
    here = torch.arange(len(rows))
    decoded_tokens, tokens = output["output_ids"][rows, cuts], prefilled["output_ids"][here, cuts]
    return GenerationConsistency(
        agreement=Agreement.between(
            output["logprobs"][rows, cuts, None],
            prefilled["logprobs"][here, cuts, None],
            torch.ones(len(rows), 1, dtype=torch.bool),
        ),
        same_tokens=float((decoded_tokens == tokens).double().mean()),
        tokens_generated=int(output["generation_lengths"].max()),
        threshold=threshold,
        min_same_tokens=min_same_tokens,
    )


def _cuts(output: BatchedDataDict[Any], positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N]`` rows and ``[N]`` positions of generated tokens, spread evenly, ends included."""
    lengths = output["generation_lengths"]
    rows = (lengths > 0).nonzero().flatten()
    if not len(rows):
        raise DataError(
            "no row has a generated token", fix="give prompts that leave room in the context"
        )
    share = torch.linspace(0, 1, positions, dtype=torch.float64)
    offsets = (share * (lengths[rows, None] - 1)).round().long()
    starts = (output["unpadded_sequence_lengths"] - lengths)[rows, None]
    return rows.repeat_interleave(positions), (starts + offsets).flatten()


@contextmanager
def _engine(
    backend: str, model_name: str, cluster: Cluster | None, config: dict[str, Any]
) -> Generator[Any]:
    # One completion for each prompt, whose places in the output are then known.
    config = {"backend": backend, "model_name": model_name, **config, "num_generations": 1}
    engine = create_generation(config, cluster)
    try:
        engine.prepare_for_generation()
        yield engine
    finally:
        engine.shutdown()


# Names that begin with "test_" are theirs to keep; pytest must not run them as tests.
for _check in (test_max_model_len_respected, test_generation_consistency):
    _check.__dict__["__test__"] = False
