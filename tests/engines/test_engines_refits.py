"""Real engines: what they generate, and what refits bring them to."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch
from real_engines import (
    difference,
    hf_policy,
    policy_of_ranks,
    prompts,
    refit_every_way,
    shake,
)
from transformers import AutoModelForImageTextToText

from rl_backends import Row, SamplingParams
from rl_conformance.weights import engine_weights, policy_weights
from rl_core.errors import DataError
from rl_core.weights import refit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engines.kinds import Kind

    from rl_core.batch import BatchedDataDict

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EXPERTS = {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
#: For each engine what is special about a case: the model's family and sizes, the engine's section.
CASES: dict[str, dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "vllm": {
        "tied, fused bias": ("qwen2", {}, {}),
        "untied": ("llama", {}, {}),
        "asynchronous, dummy weights": (
            "qwen2",
            {},
            {"async_engine": True, "load_format": "dummy"},
        ),
        "images and text": ("qwen2_5_vl", {}, {}),
        "images and text, two workers": ("qwen2_5_vl", {}, {"tensor_parallel_size": 2}),
    },
    "sglang": {
        "tied, fused bias": ("qwen2", {}, {}),
        "untied": ("llama", {}, {}),
        "dummy weights": ("qwen2", {}, {"load_format": "dummy"}),
        "experts": ("qwen3", EXPERTS, {"tp_size": 2}),
        "images and text": ("qwen2_5_vl", {}, {"tp_size": 2}),
    },
}
#: Takes long and adds the least: vLLM imports itself anew in each of two workers.
FULL = ["images and text, two workers"]
#: A prompt that an engine refuses, and what it calls it.
REFUSED_PROMPTS = {"vllm": ([10**6], "vocabulary"), "sglang": ([5] * 5000, "context length")}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(name, case, marks=[pytest.mark.full] if case in FULL else [])
        for name, cases in CASES.items()
        for case in cases
    ],
    indirect=["kind"],
)
def test_refits_bring_the_engine_to_the_policy(kind, case, start, tiny):
    family, sizes, engine_config = CASES[kind.name][case]
    path = tiny(family, **sizes)
    engine = start(family, engine_config, torch_dtype="float32", model_name=str(path))
    policy = hf_policy(path)
    if engine_config.get("load_format") != "dummy":
        assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4
    refit_and_compare(policy, engine)
    policy.shutdown()


def refit_and_compare(policy: Any, engine: Any) -> None:
    """Several refits of new weights; each time the engine is greedy, and draws, as the policy."""
    for seed, options in enumerate(
        ({"verify": "installed"}, {"mode": "packed", "bucket_bytes": 20_000}, {"delta": True}), 1
    ):
        shake(policy, seed)
        refit(policy, engine, deadline_s=60.0, **options)
        assert (engine.weights_version, engine.weights_origin) == (seed, policy.weights_origin)
        for greedy in (True, False):
            assert difference(policy, engine.generate(prompts(), greedy=greedy)) < 1e-4


@pytest.fixture(scope="module")
def two_workers(
    kind: Kind, imported: Callable[..., int], tiny: Callable[..., Path]
) -> Iterator[tuple[Any, BatchedDataDict[Any]]]:
    """An engine of two workers, which takes long to start, and what it generates as loaded."""
    imported(2)
    config = {"model_name": str(tiny("qwen3")), "max_new_tokens": 12, "torch_dtype": "float32"}
    engine = kind.build(config, {kind.backend.workers_key: 2})
    engine.prepare_for_generation()
    yield engine, engine.generate(prompts(), greedy=True)
    engine.shutdown()


#: The trainer of the test before had it.
of_another_trainer = pytest.mark.filterwarnings("ignore:.* had version:rl_core.errors.LoopWarning")


@pytest.mark.full
@of_another_trainer
def test_refits_bring_an_engine_of_two_workers_to_the_policy(two_workers, tiny):
    engine, loaded = two_workers
    policy = hf_policy(tiny("qwen3"))
    assert difference(policy, loaded) < 1e-4
    refit_and_compare(policy, engine)
    policy.shutdown()


@pytest.mark.full
def test_a_module_of_images_and_text_is_sent_whole(kind, start, tiny):
    engine = start("qwen2_5_vl", torch_dtype="float32")
    module = AutoModelForImageTextToText.from_pretrained(tiny("qwen2_5_vl"))
    policy = hf_policy(tiny("qwen2_5_vl"))
    shake(policy)
    module.load_state_dict(policy.model.state_dict())
    refit(module, engine, deadline_s=60.0, verify="installed")
    assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4
    installed = engine_weights(engine)
    for name, weight in policy_weights(policy).items():
        assert torch.equal(installed[name], weight), name
    data = prompts()
    data["pixel_values"] = torch.zeros(data.size, 3)
    with pytest.raises(DataError, match="the batch has pixel_values"):
        engine.generate(data)
    policy.shutdown()


@of_another_trainer
def test_every_way_of_the_bytes_reaches_every_worker(two_workers, tiny):
    engine, _ = two_workers
    policy = hf_policy(tiny("qwen3"))
    shake(policy, 1)
    report = refit(policy, engine, transport="collective", verify="installed", deadline_s=60.0)
    assert report.receivers == engine.receiver_count == 2
    assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4
    shake(policy, 2)
    [keys] = policy.prepare_weights_for_ipc()
    assert engine.update_weights(policy.get_weights_ipc_handles(keys, receivers=2)) is True
    assert engine.weights_version == 2
    assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4
    shake(policy, 3)
    refit(policy, engine, isolation="staged", deadline_s=60.0)
    assert difference(policy, engine.generate(prompts())) < 1e-4
    policy.shutdown()


@of_another_trainer
@pytest.mark.parametrize("mode", ["direct", "packed"])
def test_a_worker_is_sent_the_bytes_that_it_keeps(two_workers, tiny, mode, monkeypatch):
    engine, _ = two_workers
    policy, states = hf_policy(tiny("qwen3")), []
    adopt = engine._receiver._adopt
    monkeypatch.setattr(engine._receiver, "_adopt", lambda s: (states.extend(s), adopt(s)))
    shake(policy, 1)
    report = refit(policy, engine, mode=mode, deadline_s=60.0)
    kept = engine.call_in_workers("engines.held:kept")
    assert report.mode == mode
    assert [state["result"]["bytes"] for state in states] == [sum(one) for one in kept]
    whole = sum(spec.nbytes for spec in policy.weight_source().specs() if not spec.alias_of)
    # Norms are whole on both, and rows of the vocabulary are padded at its end.
    assert all(called == 0 and 0.45 < pieces / whole < 0.55 for pieces, called in kept)
    policy.shutdown()


def ray_cluster() -> Any:
    from rl_ray import RayVirtualCluster

    return RayVirtualCluster([2], name="replicas")


def local_cluster() -> Any:
    from rl_hosting import LocalCluster

    return LocalCluster(2)


CLUSTERS: dict[str, Callable[[], Any]] = {"vllm": ray_cluster, "sglang": local_cluster}


@pytest.mark.full
def test_replicas_on_a_cluster_share_the_rows_and_a_refit(kind, tiny):
    config = {"model_name": str(tiny("qwen2")), "torch_dtype": "float32", "max_new_tokens": 6}
    policy = hf_policy(tiny("qwen2"))
    shake(policy)
    with CLUSTERS[kind.name]() as cluster:
        engine = kind.build({**config, "num_generations": 2}, cluster=cluster)
        engine.prepare_for_generation()
        refit(policy, engine, deadline_s=60.0)
        output = engine.generate(prompts(5))
        assert output.size == 10
        assert difference(policy, output) < 1e-4
        engine.shutdown()
    policy.shutdown()


def test_a_row_that_the_engine_refuses_fails_alone(kind, start):
    engine = start("qwen2", torch_dtype="float32")
    whole = engine.generate(prompts(), greedy=True)
    tokens, words = REFUSED_PROMPTS[kind.name]
    how = SamplingParams(greedy=True)
    sound = Row(1 << 40, 0, 0, [5, 6, 7], 9, 0, False, (), how)
    refused = Row((1 << 40) + 1, 0, 1, tokens, 9, 0, False, (), how)
    engine._process.submit([sound, refused])
    done, failed = [], {}
    while not (done and failed):
        if (progress := engine._process.progress(20.0)) is not None:
            done += progress.rows
            failed |= progress.failed
    assert [(one.row, len(one.token_ids)) for one in done] == [(sound.key, 9)]
    assert words in str(failed[refused.key])
    assert torch.equal(engine.generate(prompts(), greedy=True)["output_ids"], whole["output_ids"])


beside_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed here"
)


@beside_megatron
@of_another_trainer
def test_ranks_refit_an_engine_of_two_workers(two_workers, tiny):
    engine, _ = two_workers
    with policy_of_ranks(tiny("qwen3"), "tp2") as policy:
        refit_every_way(policy, engine)
