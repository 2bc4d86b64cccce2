"""Refits of engines in which vLLM quantises or rearranges the weights after loading.

What runs on a CPU: FP8 with a scale for each channel, or with AMX for each block. After a refit the
engine holds, tensor for tensor, what a new engine holds that loads the trainer's checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines import held
from real_engines import hf_policy, prompts, shake

from rl_core.errors import CapabilityError
from rl_core.weights import refit
from rl_vllm.environment import engine_environment

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("vllm")

from rl_vllm.weights import EngineWeights

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
EXPERTS = {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
#: vLLM's kernel for blocks takes no layer as narrow as a router.
BLOCKS = {"quantization": "fp8_per_block", "quantization_config": {"ignore": ["*mlp.gate"]}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a scale per channel": ({}, {"quantization": "fp8_per_channel"}, {}),
    "a scale per block": ({}, BLOCKS, {}),
    "experts": (EXPERTS, BLOCKS, {}),
    "dummy weights": ({}, BLOCKS, {"load_format": "dummy"}),
    "two workers": ({}, {"quantization": "fp8_per_channel"}, {"tensor_parallel_size": 2}),
}
#: Quantised layers of two: the projections of attention, and of an MLP; or all experts.
LAYERS = {name: 6 if name == "experts" else 8 for name in CASES}
#: Each sends all tensors of the quantised layers.
WAYS: dict[str, dict[str, Any]] = {
    "installed": {"verify": "installed"},
    "delta": {"verify": "installed", "delta": True},
    "staged": {"verify": "installed", "isolation": "staged"},
    "small buckets": {"bucket_bytes": 20_000, "mode": "packed"},
}


def tensors_of(engine: Any) -> list[Any]:
    return engine.call_in_workers("engines.held:tensors")


def same(engine: Any, fresh: Any, *, dummy: bool) -> None:
    """Compares all but, after dummy weights, the rows of tokens that do not exist."""
    padded = {"model.embed_tokens.weight", "lm_head.weight"} if dummy else set()
    for got, wanted in zip(tensors_of(engine), tensors_of(fresh), strict=True):
        assert got.keys() == wanted.keys()
        assert {key for key in wanted if got[key] != wanted[key]} <= padded
    got, wanted = (one.generate(prompts(), greedy=True) for one in (engine, fresh))
    assert torch.equal(got["output_ids"], wanted["output_ids"])
    assert (got["logprobs"] - wanted["logprobs"]).abs().max() < 1e-5


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=[pytest.mark.full] if name == "two workers" else [])
        for name in CASES
    ],
)
def test_a_refit_leaves_what_a_new_engine_has(case, start: Callable[..., Any], tiny, tmp_path):
    sizes, quantization, engine_config = CASES[case]
    if quantization is BLOCKS and not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's kernels for scales per block need a CPU with AMX")
    path = tiny("qwen3", **SIZES, **sizes)
    section = {"engine_args": quantization, **engine_config}
    engine = start("qwen3", section, torch_dtype="bfloat16", model_name=str(path))
    policy = hf_policy(path, torch_dtype="bfloat16")
    for worker in engine.call_in_workers("engines.held:layers"):
        assert len(worker["collected"]) == LAYERS[case]
    for seed, (way, options) in enumerate(WAYS.items(), 1):
        shake(policy, seed)
        report = refit(policy, engine, deadline_s=60.0, **options)
        assert engine.weights_version == seed, way
        assert report.tensors > 0
    policy.export_hf(tmp_path / "exported")
    dummy = section.pop("load_format", "") == "dummy"
    fresh = start("qwen3", section, torch_dtype="bfloat16", model_name=str(tmp_path / "exported"))
    same(engine, fresh, dummy=dummy)
    policy.shutdown()


def test_a_quantised_checkpoint_is_refused_with_the_way_to_have_one():
    model = SimpleNamespace(
        quantization="awq", hf_config=SimpleNamespace(quantization_config={"quant_method": "awq"})
    )
    worker = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model))
    with pytest.raises(CapabilityError, match=r"checkpoint is quantised \(awq\)") as caught:
        EngineWeights(worker)
    assert "vllm_cfg.engine_args.quantization" in caught.value.fix


@pytest.mark.full
def test_experts_that_vllm_packs_for_good_are_packed_again_by_its_own_hook(tiny):
    paths = [str(tiny("qwen3", **EXPERTS, seed=seed)) for seed in (0, 1)]
    program = [sys.executable, "-m", "engines.packed_experts", *paths]
    folders = os.pathsep.join(
        [str(Path(held.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    environment = engine_environment("cpu") | {"PYTHONPATH": folders}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [name.rpartition(".")[2] for name in found["collected"]] == ["routed_experts"] * 2
    assert all("experts" in name for name in found["compared_by_the_sink"])
    assert found["compared_by_the_sink"]
    assert found["changed"]
    assert (found["tensors"], found["tokens"]) == ([], False)
    assert found["logprobs"] < 1e-5
