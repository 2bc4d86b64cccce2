"""Policies of megatron-core, of one rank and of several, with every engine.

Engines whose packages exclude each other run in environments of their own: their interpreters are
in the variable RL_ENGINES, as ``test_engines_side_by_side`` says; ``nox -s rest`` sets it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from real_engines import grpo, policy_of_ranks, prompts, refit_every_way

from rl_conformance.memory import MemoryPeak
from rl_conformance.models import make_tiny_model
from rl_core import create_generation
from rl_core.errors import ManifestMismatchError
from rl_core.weights import refit

PYTHONS = dict(one.split("=", 1) for one in os.environ.get("RL_ENGINES", "").split())


def needs_engines(test: Any) -> Any:
    """Marks what needs engines of other environments."""
    missing = pytest.mark.skipif(len(PYTHONS) < 2, reason="RL_ENGINES names no two interpreters")
    return pytest.mark.engine(pytest.mark.full(missing(test)))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed here"
    ),
]
SHARDS = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("experts") / "tiny", "qwen3", **EXPERTS)


def start(name: str, model: Path, **own: Any) -> Any:
    """An engine that is awake; one that is not of this environment runs in its own."""
    config = {"backend": name, "model_name": str(model), "max_new_tokens": 8}
    config |= {"torch_dtype": "float32"}
    if name in PYTHONS:
        config[f"{name}_cfg"] = {"python": PYTHONS[name], **own}
    engine = create_generation(config)
    engine.prepare_for_generation()
    return engine


def of_each_kind(model: str) -> Any:
    """A fixture: each engine that needs an environment, of one worker and of two."""

    @pytest.fixture(
        scope="module",
        params=[(name, workers) for name in SHARDS for workers in (1, 2)],
        ids=lambda param: "-".join(map(str, param)),
    )
    def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
        name, workers = request.param
        engine = start(name, request.getfixturevalue(model), **{SHARDS[name]: workers})
        yield engine
        engine.shutdown()

    return engine


engine, engine_of_experts = of_each_kind("model"), of_each_kind("experts")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.* had version:rl_core.LoopWarning")  # the engine is shared
@pytest.mark.parametrize("ranks", ["one", "tp2", "pp2"])
@needs_engines
def test_every_refit_brings_every_engine_to_the_ranks(engine: Any, model: Path, ranks: str) -> None:
    with policy_of_ranks(model, ranks) as policy:
        refit(policy, engine, deadline_s=60.0)  # the first of a policy has no delta
        refit_every_way(policy, engine)


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["one", "ep2"])
def test_experts_reach_an_engine_of_their_names(experts: Path, ranks: str) -> None:
    engine = start("hf", experts)
    with policy_of_ranks(experts, ranks) as policy:
        refit_every_way(policy, engine)
    engine.shutdown()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.* had version:rl_core.LoopWarning")  # the engine is shared
@pytest.mark.parametrize(
    ("backend", "ranks"), [("hf", "one"), ("megatron", "one"), ("megatron", "ep2")]
)
@needs_engines
def test_experts_reach_every_engine_stacked(
    engine_of_experts: Any, experts: Path, backend: str, ranks: str
) -> None:
    own = {"backend": backend, "generation": {"max_new_tokens": 8}}
    with policy_of_ranks(experts, ranks, **own) as policy:
        refit_every_way(policy, engine_of_experts)
        output = engine_of_experts.generate(prompts(), greedy=True)
        wanted = policy.generate(prompts(), greedy=True)
    assert output["output_ids"].equal(wanted["output_ids"])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.* had version:rl_core.LoopWarning")  # the engine is shared
@needs_engines
def test_experts_that_are_separate_reach_no_engine(engine_of_experts: Any, experts: Path) -> None:
    engine = engine_of_experts
    before, version = engine.generate(prompts(), greedy=True), engine.weights_version
    with (
        policy_of_ranks(experts, "ep2", refit_experts="separate") as policy,
        pytest.raises(ManifestMismatchError),
    ):
        refit(policy, engine, deadline_s=60.0)
    assert engine.weights_version == version
    after = engine.generate(prompts(), greedy=True)
    # What the engine finds in its cache is rounded otherwise than what it computes anew.
    assert after["output_ids"].equal(before["output_ids"])
    assert (after["logprobs"] - before["logprobs"]).abs().max() < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("name", ["hf", *SHARDS])
@needs_engines
def test_experts_are_copied_once_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # So that glibc gives back what is freed, and the peak is what is in use.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 17))
    sizes = {**EXPERTS, "num_experts": 8, "moe_intermediate_size": 384, "head_dim": 64}
    layer = 8 * 3 * 384 * 256 * 4  # bytes of its experts
    path = make_tiny_model(tmp_path / "m", "qwen3", hidden_size=256, num_layers=8, **sizes)
    bucket = 1 << 20
    engine = start(name, path)
    with policy_of_ranks(path, "ep2") as policy:
        peak = MemoryPeak(trim=True)
        for _ in range(2):
            refit(policy, engine, deadline_s=60.0, verify="installed", bucket_bytes=bucket)
    engine.shutdown()
    # On a CPU vLLM itself needs room for a third of a layer more, to pack experts.
    assert peak.resident() < 1.4 * layer + 2 * bucket


@pytest.mark.full
@pytest.mark.parametrize("name", ["hf", *SHARDS])
@pytest.mark.parametrize("ranks", ["one", "tp2", "pp2", "dp2"])
@needs_engines
def test_grpo_agrees_at_every_step(tmp_path: Path, ranks: str, name: str) -> None:
    grpo(tmp_path, ranks, partial(start, name))
