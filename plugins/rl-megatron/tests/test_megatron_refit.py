"""An engine of rl-hf gets the weights of one rank bit for bit, in every way that there is."""

from __future__ import annotations

import torch

from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_megatron.policy import MegatronPolicy


def weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    source = policy.weight_source()
    names = [spec.name for spec in source.specs() if spec.alias_of is None]
    found = {name: tensor.clone() for name, tensor in source.tensors(names)}
    source.close()
    return found


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
