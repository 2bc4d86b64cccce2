"""Refits that are requested at the same time, many times over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_core.futures import spawn, wait
from rl_core.weights import refit


@pytest.mark.parametrize(
    "pairs", [100, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_refits_of_two_threads_all_commit_in_turn(pairs: int) -> None:
    trainer, engine = nn.Linear(4, 4), nn.Linear(4, 4)

    def refits() -> list[int]:
        return [refit(trainer, engine, deadline_s=30).version for _ in range(pairs)]

    first, second = wait([spawn(f"refits-{n}", refits) for n in range(2)], 900)
    assert sorted([*first, *second]) == list(range(1, 2 * pairs + 1))
    assert torch.equal(trainer.weight, engine.weight)
