"""How much memory tests of this plugin take."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def allocated() -> Callable[[], int]:
    """Bytes of the GPU that tensors take: without the workspaces that torch keeps for cuBLAS."""

    def count() -> int:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

    return count
