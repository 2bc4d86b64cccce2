"""Batches the checks are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_core.batch import BatchedDataDict

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ORDINARY", "generated", "generated_mask", "pad_rows", "random_prompts", "random_rows"]

#: Ids of tokens that are not special, of the suite's own tokenizer.
ORDINARY = (3, 259)


def random_rows(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Rows of random ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(*ORDINARY, (n,), generator=generator).tolist() for n in lengths]


def pad_rows(rows: Sequence[Sequence[int]], pad: int = 0, **extra: Any) -> BatchedDataDict[Any]:
    """``input_ids`` and ``input_lengths`` of rows, padded on the right."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    width = max((len(row) for row in rows), default=0)
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], dtype=torch.int64)
    ids = ids.reshape(len(rows), width)
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths, **extra})


def random_prompts(lengths: Sequence[int], *, seed: int = 0, **extra: Any) -> BatchedDataDict[Any]:
    """Right-padded prompts of random ordinary tokens."""
    return pad_rows(random_rows(lengths, seed), **extra)


def generated_mask(data: BatchedDataDict[Any], output: BatchedDataDict[Any]) -> torch.Tensor:
    """``[B, W]`` True where a token was generated."""
    positions = torch.arange(output["output_ids"].shape[1])
    ends = output["unpadded_sequence_lengths"][:, None]
    inside: torch.Tensor = (positions >= data["input_lengths"][:, None]) & (positions < ends)
    return inside


def generated(data: BatchedDataDict[Any], output: BatchedDataDict[Any]) -> list[list[int]]:
    """The generated tokens of each row."""
    starts, ends = data["input_lengths"].tolist(), output["unpadded_sequence_lengths"].tolist()
    rows = output["output_ids"].tolist()
    return [row[start:end] for row, start, end in zip(rows, starts, ends, strict=True)]
