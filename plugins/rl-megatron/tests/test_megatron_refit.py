"""An engine of rl-hf gets the weights of one rank bit for bit, in every way that there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core.weights import refit
from rl_hf.generation import HuggingFaceGeneration
from rl_megatron.policy import MegatronPolicy

SOON = 60.0
OPTIONS: dict[str, Any] = {"optimizer": {"lr": 1e-2}}
WAYS: list[dict[str, Any]] = [
    {},
    {"transport": "ipc"},
    {"transport": "collective", "address": "127.0.0.1"},
    {"transport": "ipc", "isolation": "staged"},
    {"bucket_bytes": 4096},
]


def engine_of(path: Any, **config: Any) -> HuggingFaceGeneration:
    """With other weights than the model's."""
    engine = HuggingFaceGeneration(str(path), max_new_tokens=4, **config)
    engine.prepare_for_generation()
    with torch.no_grad():
        for parameter in engine._model.parameters():
            parameter.zero_()
    return engine


def weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    source = policy.weight_source()
    names = [spec.name for spec in source.specs() if spec.alias_of is None]
    found = {name: tensor.clone() for name, tensor in source.tensors(names)}
    source.close()
    return found


def same(engine: HuggingFaceGeneration, expected: dict[str, torch.Tensor]) -> bool:
    found = engine._model.state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def step(policy: MegatronPolicy) -> None:
    policy.train(training_batch((9, 4, 15, 2)), NegativeLogLikelihood())


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_every_way_to_refit_is_bit_for_bit(tiny, built, family, options):
    policy = built(MegatronPolicy(str(tiny(family)), **OPTIONS))
    engine = built(engine_of(tiny(family)))
    for _ in range(2):
        step(policy)
        expected = weights(policy)
        refit(policy, engine, verify="installed", deadline_s=SOON, **options)
        assert same(engine, expected)
        assert policy.get_logprobs(training_batch((5,)))["logprobs"].isfinite().all()


def test_bfloat16_is_sent_as_such(tiny, built):
    policy = built(MegatronPolicy(str(tiny()), torch_dtype="bfloat16", **OPTIONS))
    engine = built(engine_of(tiny(), torch_dtype="bfloat16"))
    step(policy)
    refit(policy, engine, verify="installed", deadline_s=SOON)
    assert same(engine, weights(policy))


def test_experts_are_sent_apart_if_asked(tiny, built):
    path = str(tiny("qwen3_moe"))
    together = weights(built(MegatronPolicy(path)))
    policy = built(MegatronPolicy(path, refit_experts="separate"))
    apart = weights(policy)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        both, down = together.pop(at + "gate_up_proj"), together.pop(at + "down_proj")
        for number in range(4):
            parts = [apart.pop(f"{at}{number}.{p}_proj.weight") for p in ("gate", "up", "down")]
            assert both[number].equal(torch.cat(parts[:2]))
            assert down[number].equal(parts[2])
    assert apart.keys() == together.keys()
    assert policy.train(training_batch((5, 3)), NegativeLogLikelihood())["grad_norm"] > 0


def test_the_norm_of_gradients_does_not_depend_on_names_of_experts(tiny, built):
    path, data = str(tiny("qwen3_moe")), training_batch((9, 4, 15, 2))
    norms = [
        built(MegatronPolicy(path, refit_experts=kind)).train(data, NegativeLogLikelihood())
        for kind in ("stacked", "separate")
    ]
    assert norms[0] == norms[1]
