"""Refits of many architectures: exact, or refused with a reason when the engine is built.

A few run always; ``pytest -m full`` runs all. Models are tiny and random, in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures.table import make_architecture

from rl_conformance.diagnostics.agreement import measure_log_probability_consistency
from rl_conformance.diagnostics.engine import random_prompts
from rl_conformance.weights import engine_weights, policy_weights
from rl_core import create_policy
from rl_core.errors import CapabilityError
from rl_core.weights import refit
from rl_sglang import SglangGeneration

pytestmark = [pytest.mark.engine, pytest.mark.slow]

#: What a refit brings to the trainer's weights, bit for bit.
EXACT = (
    "afmoe",
    "deepseek_v2",
    "deepseek_v2 with experts",
    "deepseek_v3",
    "deepseek_v3 with experts",
    "glm4_moe_lite",
    "olmo3",
    "qwen2_moe",
)

#: What is refused, and what the error says.
REFUSED = {
    "gemma": r"activation GeluAndMul differs from GELUTanh",
    "gemma2": r"attention of layer 0 \(sliding_window=4096, softcap=50.0\) differs",
    "llama4_text": "does not load all",
    "ministral": r"attention of layer 0 \(sliding_window=64\) differs",
    "olmoe": r"leaves out clip_qkv=0\.5",
    "phi": r"lm_head\.bias\) has no effect",
    "vaultgemma": r"softcap=50.0\) differs",
}

#: Tried in each run: latents that are derived of a weight, and what is measured of operations.
ALWAYS = ("deepseek_v3 with experts", "gemma2")


def all_of(names: Any) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.full]) for name in names
    ]


@pytest.fixture
def build(imported, tmp_path):
    """``build(name)`` is an engine of such a model, and the checkpoint of a trainer of another."""
    engines = []

    def make(name: str, engine: Any = None, **changes: Any):
        folder = tmp_path / name.replace(" ", "_")
        paths = [
            make_architecture(folder / str(seed), name, seed=seed, **changes) for seed in (0, 1)
        ]
        config = {"model_name": str(paths[0]), "torch_dtype": "float32", "max_new_tokens": 6}
        sglang_cfg = {"max_total_tokens": 16384, **(engine or {})}
        engines.append(SglangGeneration(None, {**config, "sglang_cfg": sglang_cfg}))
        engines[-1].prepare_for_generation()
        return engines[-1], str(paths[1])

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.mark.parametrize("family", all_of(EXACT))
def test_a_refit_is_exact(family, build):
    """An engine has the trainer's weights and log-probs after a refit."""
    engine, path = build(family)
    policy = create_policy({"backend": "hf", "model_name": path, "torch_dtype": "float32"})
    refit(policy, engine, deadline_s=60.0)
    installed = engine_weights(engine)
    for name, weight in policy_weights(policy).items():
        assert torch.equal(installed[name], weight), name
    found = measure_log_probability_consistency(policy, engine, random_prompts(260, (3, 1, 17)))
    assert found.greedy.max < 1e-4
    policy.shutdown()


@pytest.mark.parametrize("family", all_of(REFUSED))
def test_what_computes_another_model_is_refused_when_the_engine_is_built(family, build):
    changes = {"ministral": {"sliding_window": 64}, "olmoe": {"clip_qkv": 0.5}}
    with pytest.raises(CapabilityError, match=REFUSED[family]) as caught:
        build(family, **changes.get(family, {}))
    assert "sglang_cfg.refit to False" in caught.value.fix


def test_an_engine_that_serves_adapters_is_compared_too(build):
    with pytest.raises(CapabilityError, match=r"softcap=50\.0"):
        build("gemma2", {"lora": {"r": 4, "target_modules": "all-linear"}})
