"""One process, one trainer, and engines whose packages exclude each other, refit together.

The interpreters are in the variable RL_ENGINES, such as ``vllm=/a/bin/python sglang=/b/python``;
``nox -s rest`` sets it.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from examples.additions import make_model
from real_engines import difference, hf_policy, prompts, shake

from rl_conformance.models import make_tiny_model
from rl_core import create_generation
from rl_core.errors import RLError
from rl_hosting import LocalCluster
from rl_train import train

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHONS = dict(one.split("=", 1) for one in os.environ.get("RL_ENGINES", "").split())
pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.skipif(len(PYTHONS) < 2, reason="RL_ENGINES names no two interpreters"),
]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[Any]]]:
    """A trainer, and an engine of each environment with its model."""
    path = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "qwen2")
    engines = []
    for name, python in PYTHONS.items():
        config = {"backend": name, "model_name": str(path), "torch_dtype": "float32"}
        own = {f"{name}_cfg": {"python": python}}
        engines.append(create_generation({**config, **own, "max_new_tokens": 8}))
        engines[-1].prepare_for_generation()
    policy = hf_policy(path)
    yield policy, engines
    for one in [*engines, policy]:
        one.shutdown()


def refit_all(policy: Any, engines: list[Any], **options: Any) -> list[BaseException]:
    """One refit of all engines; what it raised, on either side."""
    info = policy.prepare_refit_info()
    for engine in engines:
        engine.prepare_refit_info(info)
    how = {"deadline_s": 60.0, "number": info["number"]}
    sent = policy.send_weights(receivers=len(engines), **how, **options)
    received = [f for engine in engines for f in engine.receive_weights(**how)]
    raised = []
    for future in [*sent, *received]:
        try:
            future.result(90)
        except RLError as error:
            raised.append(error)
    return raised


def test_engines_of_other_environments_are_refit_together_or_not_at_all(both):
    policy, engines = both
    for version in (1, 2):
        shake(policy, version)
        assert refit_all(policy, engines, verify="installed") == []
        assert {engine.weights_version for engine in engines} == {version}
        for engine in engines:
            assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4

    before = [engine.generate(prompts(), greedy=True)["output_ids"] for engine in engines]
    shake(policy, 3)
    held = engines[0]._lock
    with held:  # one of them never lets go of its rows
        assert refit_all(policy, engines, isolation="staged", version=3)
    assert {engine.weights_version for engine in engines} == {2}
    for engine, ids in zip(engines, before, strict=True):
        assert engine.generate(prompts(), greedy=True)["output_ids"].equal(ids)
    assert refit_all(policy, engines) == []
    for engine in engines:
        assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4


@pytest.mark.parametrize("name", PYTHONS)
def test_an_engine_of_another_environment_on_a_cluster(name, tmp_path):
    path = make_tiny_model(tmp_path / "tiny", "qwen2")
    config = {"backend": name, "model_name": str(path), "torch_dtype": "float32"}
    own = {f"{name}_cfg": {"python": PYTHONS[name]}, "max_new_tokens": 4}
    with LocalCluster(1) as cluster:
        engine = create_generation({**config, **own}, cluster)
        engine.prepare_for_generation()
        policy = hf_policy(path)
        shake(policy, 1)
        assert refit_all(policy, [engine], verify="installed") == []
        assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4
        engine.shutdown()
        policy.shutdown()


def last_digit(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ with the text, of any model."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


@pytest.mark.parametrize("name", PYTHONS)
def test_a_run_of_rl_train_sends_only_adapters(name, tmp_path):
    lora = {"r": 4, "target_modules": "all-linear"}
    config = {
        "model": str(make_model(tmp_path / "model", seed=0, layers=2)),
        "output": str(tmp_path / "run"),
        "steps": 3,
        "batch_size": 4,
        "grpo": {"num_generations": 4},
        "policy": {
            "lora": {**lora, "alpha": 6.0, "refit": "adapter"},
            "optimizer": {"lr": 1e-2},
        },
        "generation": {
            "backend": name,
            "max_new_tokens": 4,
            "torch_dtype": "float32",
            f"{name}_cfg": {"python": PYTHONS[name], "lora": lora},
        },
        "rewards": {"functions": [f"{__file__}:last_digit"], "workers": 0},
        "log": {"plot": None},
    }
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    assert train(config, rows=rows).steps == 3
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "loss" in line]
    assert [line["weights_version"] for line in steps] == [1, 2, 3]
    assert max(line["logprob_error/max"] for line in steps) < 1e-4
