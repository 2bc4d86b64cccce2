"""A policy of megatron-core next to the engine, in one environment."""

from __future__ import annotations

import importlib.util

import pytest
from real_engines import grpo, policy_of_ranks, refit_every_way

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed here"
    ),
]


def test_ranks_refit_an_engine_of_two_workers(start, tiny):
    engine = start("qwen3", {"tp_size": 2}, torch_dtype="float32")
    with policy_of_ranks(tiny("qwen3"), "tp2") as policy:
        refit_every_way(policy, engine)


def test_grpo_agrees_at_every_step(tmp_path):
    grpo(tmp_path, "--policy", "megatron", "--generation", "sglang")
