"""How much memory tests of this plugin take."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from rl_core.weights.gpu.fold import multipliers


@pytest.fixture
def allocated() -> Callable[[], int]:
    """Bytes of the GPU that tensors take, without what stays for the next model.

    That is what torch keeps for cuBLAS once a product was computed, and the multipliers of the
    hash, which each pair of ends has of its own.
    """
    row = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    for kind in (row, row.float()):
        torch.nn.functional.linear(kind, kind, kind[0])
        kind @ kind
    del row, kind

    def kept() -> int:
        gc.collect()
        multipliers.cache_clear()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    before = kept()

    def count() -> int:
        return kept() - before

    return count
