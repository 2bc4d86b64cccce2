"""Refits that are requested at the same time, many times over."""

from __future__ import annotations

import sys
import threading
from functools import partial

import pytest
import torch
from torch import nn

from rl_backends.modules import end_of
from rl_core.futures import spawn, wait
from rl_core.weights import refit


@pytest.mark.parametrize("sends", [True, False])
def test_threads_that_refit_a_new_module_at_once_share_its_end(sends):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(60):
            model, start = nn.Linear(2, 2), threading.Barrier(2, timeout=60)

            def find(model: nn.Module = model, start: threading.Barrier = start) -> object:
                start.wait()
                return end_of(model, sends=sends)

            first, second = wait([spawn(f"end-{n}", find) for n in range(2)], 60)
            assert first is second is not None
    finally:
        sys.setswitchinterval(interval)


def test_each_of_two_refits_at_once_keeps_its_names():
    trainer = nn.Linear(4, 4)
    engines = {prefix: nn.ModuleDict({prefix: nn.Linear(4, 4)}) for prefix in "ab"}

    def refits(prefix: str) -> None:
        for _ in range(20):
            refit(trainer, engines[prefix], rename=lambda name: f"{prefix}.{name}", deadline_s=30)

    wait([spawn(f"refits-{prefix}", partial(refits, prefix)) for prefix in engines], 120)
    for prefix, engine in engines.items():
        assert torch.equal(trainer.weight, engine.get_parameter(f"{prefix}.weight"))
