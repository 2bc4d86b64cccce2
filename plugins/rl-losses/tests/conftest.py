from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_core.batch import BatchedDataDict
from rl_core.interfaces import LossFunction

Result = tuple[torch.Tensor, dict[str, float]]


@pytest.fixture(scope="session")
def call() -> Callable[..., Result]:
    """Calls a loss on rows that are the whole global batch; missing masks are all ones."""

    def run(loss_fn: LossFunction, inputs: torch.Tensor, **data: Any) -> Result:
        rows, width = inputs.shape[:2]
        data.setdefault("token_mask", torch.ones(rows, width))
        data.setdefault("sample_mask", torch.ones(rows))
        valid = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        return loss_fn(
            inputs,
            BatchedDataDict(data),
            global_valid_seqs=data["sample_mask"].sum(),
            global_valid_toks=valid.sum(),
        )

    return run
