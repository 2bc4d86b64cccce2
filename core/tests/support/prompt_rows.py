"""Rows of tokens, given or random, as what is asked of an engine."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.batch import BatchedDataDict


def prompts(*rows: list[int], **extra: Any) -> BatchedDataDict[Any]:
    """A batch of prompts, padded with 0 on the right."""
    width = max(map(len, rows), default=0)
    ids = [row + [0] * (width - len(row)) for row in rows]
    return BatchedDataDict(
        {
            "input_ids": torch.tensor(ids, dtype=torch.int64).reshape(len(rows), width),
            "input_lengths": torch.tensor([len(row) for row in rows], dtype=torch.int64),
            **extra,
        }
    )


def single_tokens(*tokens: int) -> BatchedDataDict[Any]:
    """A batch of prompts of one token each."""
    return prompts(*([token] for token in tokens))


def random_prompts(*lengths: int, width: int = 0, seed: int = 7) -> BatchedDataDict[Any]:
    """A batch of prompts of random tokens, padded with 0 on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 269, (len(lengths), max(*lengths, width)), generator=generator)
    sizes = torch.tensor(lengths)
    ids[torch.arange(ids.shape[1]) >= sizes[:, None]] = 0
    return BatchedDataDict({"input_ids": ids, "input_lengths": sizes})
